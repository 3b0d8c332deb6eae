"""This package as an implementation of transformers' experts interface, on one rank.

::

    import fairseq_tutel.integrations.transformers.interface

    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="fairseq_tutel")

The model's routers, parameters and files stay as they are. Use :func:`~..replace_moe` for several
ranks, and for options of routing.
"""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ... import ops
from ...moe.experts import StackedExperts
from .experts import Activation, Projections

NAME = "fairseq_tutel"


def experts_forward(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the experts of a module of transformers: [T, M] -> [T, M].

    ``top_k_index`` is int64 [T, K], where a number of E or more is no expert; ``top_k_weights`` are
    [T, K]. Raise ValueError for a module with other parameters.
    """
    # without those of a norm; adapters of peft are parametrizations, and computed at each reading
    names = [name for name, _ in experts.named_parameters(recurse=False)]
    names += getattr(experts, "parametrizations", ())
    params = {name: getattr(experts, name) for name in names}
    projections = Projections.of(type(experts).__name__, experts, params)
    num_experts, _, _ = projections.shape
    expert_TK = top_k_index.masked_fill(top_k_index >= num_experts, -1).to(torch.int32)
    gate_TK = top_k_weights.to(torch.promote_types(top_k_weights.dtype, torch.float32))
    dest_row_TK, src_pair_R, weight_TK, _, row_end_E, _ = ops.assign_rows(
        expert_TK, gate_TK, num_experts, capacity=None, padded=False, normalize=False
    )
    rows = ops.dispatch(hidden_states.to(projections.up.dtype), dest_row_TK, src_pair_R)
    out = _compute(experts, projections, rows, row_end_E)
    if getattr(experts, "has_post_expert_norm", False):
        out = experts.post_expert_norm(out)
    return ops.combine(out, dest_row_TK, src_pair_R, weight_TK).to(hidden_states.dtype)


def _compute(experts: nn.Module, projections: Projections, rows: Tensor, offsets: Tensor) -> Tensor:
    """Return the experts' outputs for their rows [R, M]."""
    up, down, *biases, gated, interleaved = projections
    activation = Activation(experts, projections)
    if experts not in _networks:
        _networks[experts] = activation.built_in()
    network = _networks[experts]
    if network is None or interleaved:
        product = StackedExperts.product
        hidden = activation.of_hidden(product(rows, up, offsets, biases[0]))
        return product(hidden, down, offsets, biases[1])
    return ops.expert_ffn(rows, up, biases[0], down, biases[1], activation=network, offsets=offsets)


# experts module -> its built-in network, which takes a while to recognise
_networks: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()

ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
