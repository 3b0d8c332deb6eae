"""Routing from logits in three stages: select experts, place the choices, report.

Numerics follow fairseq's ``moe`` branch (top1gate.py, top2gate.py) for K = 1 and 2; larger K
extends its top-2 rules. Differences:

- fp32 gating does not round half-precision products: logits are fp32.
- Padding and rejected second choices get no row and no weight. In the branch they overwrite the
  first token of an expert.
- Evaluation is deterministic: ``sampling`` and ``random`` take the next best expert.
"""

from contextlib import nullcontext

import torch

from ..given_choices import encode
from ..reports import RouterAux
from ..routing import RouterCall, Routing
from ..torch_modes import outside_checkpoints
from .null_experts import without_null_experts
from .place import assign_rows
from .report import make_report
from .select import scores_of, select_top_k


def route_logits(
    logits_TE: torch.Tensor,
    call: RouterCall,
    pad_mask_T: torch.Tensor | None = None,
    load_bias_E: torch.Tensor | None = None,
) -> tuple[Routing, RouterAux | None]:
    """Choose the K best experts of each token, and return the routing and its losses.

    Args:
        logits_TE: with gradient, null experts last. Half logits are cast to fp32.
        call: options of the call. Without ``call.reports`` the second result is None.
        pad_mask_T: bool, True for padding (default None: no padding).
        load_bias_E: fp32, the router's ``load_bias`` (default None: without that option).
    """
    config = call.config
    if logits_TE.shape[1] != config.num_outputs:
        nulls = f" and {config.null_experts} null experts" if config.null_experts else ""
        has = f"the layer has {config.num_experts}{nulls}"
        raise ValueError(f"the gate gave logits for {logits_TE.shape[1]} experts, {has}")
    if config.load_bias != "none" and load_bias_E is None:
        raise ValueError(
            f"load_bias={config.load_bias!r} needs a router that passes it to route_logits()"
        )
    scores = scores_of(logits_TE, call, pad_mask_T)
    chosen, bias_counts = select_top_k(scores, call, load_bias_E)
    of_experts, num_null_KN = without_null_experts(chosen, call)
    routing, rejected_TK = assign_rows(of_experts, call, scores.score_TE)
    if call.steering is not None:
        call.steering.chosen_TK = encode(chosen.expert_TK, rejected_TK)
    if not call.reports:
        return routing, None
    with nullcontext() if call.reports_again else outside_checkpoints():
        report = make_report(scores, chosen, of_experts, routing, call, num_null_KN, bias_counts)
    return routing, report
