"""Sparse upcycling (arXiv 2212.05055): a dense model of stock fairseq becomes one with experts.

The FFN of every F-th layer becomes E experts, and the router starts near zero. With K > 1 the K
weights of a token sum to one, so that equal experts give what the FFN gave, unless a choice is
dropped. With K = 1 the weight is the gate's probability, so the function changes. With the FFN as a
shared expert and silent experts beside it the function is always kept. Experts of 1/G of the width:
:func:`fairseq_tutel.distributed.experts_of_ffn`.

The optimizer state is left out, and the schedule begins anew.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...distributed import experts_of_ffn
from ..layout import CheckpointError
from ..reader import read_set
from ..state import MODEL, options_of
from .change import Change
from .history import Growth, updates_done

logger = logging.getLogger(__name__)

_FFN = re.compile(r"((?:.*\.)?(encoder|decoder)\.layers\.(\d+)\.)(fc[12]\.(?:weight|bias))")
# fairseq 0.12.2 stores the weights of an encoder layer twice; sparse layers have no second copy
_SECOND = re.compile(r"(?:in_proj|out_proj|fc[12])_(?:weight|bias)")
# fairseq's criterion classes -> those that add the gate loss
CRITERIONS = {
    "CrossEntropyCriterion": "MoECrossEntropyCriterion",
    "LabelSmoothedCrossEntropyCriterion": "MoELabelSmoothedCrossEntropyCriterion",
}
# options by which a layer has more than an FFN, or its norm elsewhere
_REFUSED = ("scale_fc", "scale_resids", "base_layers", "quant_noise_pq", "adaptive_input")


@dataclass(frozen=True)
class Upcycling:
    """Options of :func:`upcycle`.

    Attributes:
        num_experts: E, a multiple of the granularity.
        freq: every F-th layer of encoder and decoder (counted from 1) becomes sparse; 0: none.
        encoder_freq, decoder_freq: F for one side; the larger of this and ``freq`` counts.
        top_k: K.
        granularity: G, slices that each replica of an FFN is cut into.
        shared: keep the FFN as a shared expert; the other experts start silent.
        drop_ratio: share of each expert's hidden units that is drawn anew (arXiv 2502.19261).
        router_std: standard deviation of the router's weights.
        seed: seed of all draws.
        inexact: allow a model that does not start as the dense one.

    Raises:
        CheckpointError: K, E and G do not fit, or the function changes without ``inexact``.
    """

    num_experts: int
    freq: int = 2
    encoder_freq: int = 0
    decoder_freq: int = 0
    top_k: int = 2
    granularity: int = 1
    shared: bool = False
    drop_ratio: float = 0.0
    router_std: float = 0.02
    seed: int = 1
    inexact: bool = False

    def __post_init__(self):
        if not 1 <= self.top_k <= self.num_experts:
            raise CheckpointError(
                f"--top-k {self.top_k} must lie between 1 and --num-experts {self.num_experts}"
            )
        if self.num_experts % self.granularity:
            raise CheckpointError(
                f"--num-experts {self.num_experts} is no multiple of --granularity "
                f"{self.granularity}: each replica of an FFN has as many experts"
            )
        if reason := self.changes_function():
            if not self.inexact:
                raise CheckpointError(
                    f"{reason}; --allow-inexact accepts that, --shared-expert avoids it"
                )
            logger.warning("%s", reason)

    def changes_function(self) -> str:
        """Return why the model does not start as the dense one, or ""."""
        if self.shared:
            return ""
        if self.top_k == 1:
            return (
                "--top-k 1 weights an expert by the gate's probability, about "
                f"1/{self.num_experts} at first"
            )
        if self.top_k % self.granularity:
            return (
                f"--granularity {self.granularity} does not divide --top-k {self.top_k}, so that a "
                "token does not go to all slices of a replica"
            )
        if self.drop_ratio:
            return f"--drop-ratio {self.drop_ratio:g} draws hidden units anew"
        return ""

    def is_sparse(self, side: str, layer: int) -> bool:
        """Return whether a layer, counted from 0, becomes sparse."""
        freq = max(self.freq, self.encoder_freq if side == "encoder" else self.decoder_freq)
        return freq > 0 and (layer + 1) % freq == 0

    def __str__(self) -> str:
        words = [f"top-{self.top_k}"]
        words += [f"granularity {self.granularity}"] * (self.granularity > 1)
        words += ["shared expert"] * self.shared
        words += [f"drop ratio {self.drop_ratio:g}"] * (self.drop_ratio > 0)
        return ", ".join(words)


def upcycle(
    src: str, dst: str, how: Upcycling, *, ranks: int | None = None, force: bool = False
) -> str:
    """Write a set with experts from a dense checkpoint of stock fairseq.

    Args:
        src: file of the dense model, X.pt; a language model or a transformer.
        dst: X.pt of the set.
        how: the options.
        ranks: W of the set; None: one.
        force: replace what ``dst`` names.

    Returns:
        The canonical path.

    Raises:
        CheckpointError: ``src`` has experts, no layer to make sparse, or options that experts
            cannot be combined with; or as of :func:`..store.write_set`.
    """
    source = read_set(src)
    if source.num_experts:
        raise CheckpointError(f"{src}: has experts; `grow` makes more of them")
    _check_options(source.shared, src)
    dense = source.shared_state(with_optimizer=False)
    ffns = _find_ffns(dense[MODEL], how, src)
    options = _options(ffns, how)
    # without the state of the optimizer the trainer counts its updates from 0
    history = [_with_gate_loss(each) for each in dense.get("optimizer_history") or ()]
    history[-1:] = [{**each, "num_updates": 0} for each in history[-1:]]
    state = {**dense, MODEL: _shared_model(dense[MODEL], ffns, how), "optimizer_history": history}
    words = f"{how}, of a dense model after {updates_done(dense)} updates"
    entry = Growth("upcycle", words, 0, how.num_experts, 0)
    arch = "transformer_lm_gpt_moe" if _is_lm(dense[MODEL]) else "transformer_moe"
    flags = {"arch": arch, **options, "moe_capacity_factor": 0}  # 0 drops nothing

    def experts(wanted: range) -> tuple[dict[str, Any], dict[str, Any]]:
        return _experts(ffns, how, wanted), {}

    return Change(source, state, experts, entry, options, flags).write(dst, ranks or 1, force=force)


# names of the layers that become sparse, ``decoder.layers.1.`` -> tensors of their FFNs
_Ffns = dict[str, dict[str, Tensor]]


def _find_ffns(model: Mapping[str, Any], how: Upcycling, src: str) -> _Ffns:
    found: _Ffns = {}
    for name, value in model.items():
        match = _FFN.fullmatch(name)
        if match and how.is_sparse(match[2], int(match[3])):
            found.setdefault(match[1], {})[match[4]] = value
    if not found:
        raise CheckpointError(
            f"{src}: none of its layers becomes sparse with --moe-freq {how.freq}"
        )
    widths = {ffn["fc1.weight"].shape[0] for ffn in found.values()}
    wrong = [width for width in widths if width % how.granularity]
    if len(widths) > 1 and (how.granularity > 1 or how.shared) or wrong:
        raise CheckpointError(
            f"{src}: FFNs of {', '.join(map(str, sorted(widths)))} hidden units cannot be cut "
            f"alike into {how.granularity} slices, or kept as shared experts"
        )
    return found


def _options(ffns: _Ffns, how: Upcycling) -> dict[str, Any]:
    """Return the options of the model, by fairseq's names."""
    width = next(iter(ffns.values()))["fc1.weight"].shape[0]
    options: dict[str, Any] = {"moe_expert_count": how.num_experts, "moe_top_k": how.top_k}
    sides = {"encoder_moe_freq": how.encoder_freq, "decoder_moe_freq": how.decoder_freq}
    options |= {"moe_freq": how.freq, **{name: freq for name, freq in sides.items() if freq}}
    options["moe_second_expert_policy"] = "all"
    if how.granularity > 1:
        options["moe_expert_ffn_dim"] = width // how.granularity
    if how.shared:
        options["moe_shared_expert_ffn_dim"] = width
    return options


def _shared_model(model: Mapping[str, Any], ffns: _Ffns, how: Upcycling) -> dict[str, Any]:
    """Return the model's tensors without experts, with routers and shared experts."""
    shared = {name: value for name, value in model.items() if not _is_replaced(name, ffns)}
    generator = torch.Generator().manual_seed(how.seed)
    replicas = how.num_experts // how.granularity
    for prefix, ffn in ffns.items():
        like = ffn["fc1.weight"]
        rows = torch.randn(replicas, like.shape[1], generator=generator) * how.router_std
        # slices of a replica have one row, so that they are chosen together
        rows = rows.repeat_interleave(how.granularity, dim=0).to(like.dtype)
        shared[f"{prefix}moe_layer.gate.wg.weight"] = rows
        if how.shared:
            shared |= {f"{prefix}moe_layer.shared_expert.{name}": v for name, v in ffn.items()}
    return shared


def _is_replaced(name: str, ffns: _Ffns) -> bool:
    for prefix, ffn in ffns.items():
        if name.startswith(prefix):
            rest = name[len(prefix) :]
            return rest in ffn or bool(_SECOND.fullmatch(rest))
    return False


def _experts(ffns: _Ffns, how: Upcycling, wanted: range) -> dict[str, Tensor]:
    """Return the tensors of some experts of all layers, renumbered from 0."""
    model: dict[str, Tensor] = {}
    for index, (prefix, ffn) in enumerate(ffns.items()):
        made = experts_of_ffn(
            ffn,
            wanted,
            granularity=how.granularity,
            silent=how.shared,
            drop_ratio=how.drop_ratio,
            seed=how.seed + index * how.num_experts,
        )
        for name, value in made.items():
            number, _, rest = name.partition(".")
            key = f"{prefix}moe_layer.experts.{int(number) - wanted.start}.{rest}"
            model[key] = value.clone()  # a file stores tensors that share memory once
    return model


def _with_gate_loss(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Name the criterion that adds the gate loss to the one that was trained with."""
    name = entry.get("criterion_name")
    return {**entry, "criterion_name": CRITERIONS.get(name, name)}


def _check_options(shared: Mapping[str, Any], src: str) -> None:
    """Raise CheckpointError for a model that none with experts can continue."""
    options = options_of(shared)
    for name in _REFUSED:
        if options.get(name):
            flag = f"--{name.replace('_', '-')}"
            raise CheckpointError(f"{src}: {flag} {options[name]} cannot be combined with experts")
    if _is_lm(shared[MODEL]) and options.get("decoder_normalize_before") is False:
        raise CheckpointError(
            f"{src}: norms come after the blocks (no --decoder-normalize-before), and language "
            "models with experts have them before"
        )


def _is_lm(names: Iterable[str]) -> bool:
    """Return whether a model has no encoder, by the names of its parameters."""
    return not any((found := _FFN.fullmatch(name)) and found[2] == "encoder" for name in names)
