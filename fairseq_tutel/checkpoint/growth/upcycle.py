"""A dense model of stock fairseq becomes one with experts: sparse upcycling (arXiv 2212.05055).

The FFN of every F-th layer becomes E experts, and the router starts near zero. With K > 1 choices a
token's weights sum to one, so that equal experts give what the FFN gave, as long as none of its
choices is dropped; with one choice the weight is the gate's probability. Experts of 1/G of the
width: :func:`fairseq_tutel.distributed.experts_of_ffn`. With the FFN as a shared expert beside
experts that start silent, the start is exact whatever is chosen or dropped.
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
from ..reader import SetReader, read_set
from ..state import GROWTH, MODEL, NAMED_STATE, OPTIMIZER, options_of, with_options
from ..store import write_set
from .dense_optimizer import expert_state, fresh_state, gradient_factor, named_optimizer
from .grow import ranks_of
from .history import Growth, updates_done, with_entry

logger = logging.getLogger(__name__)

_FFN = re.compile(r"((?:.*\.)?(encoder|decoder)\.layers\.(\d+)\.)(fc[12]\.(?:weight|bias))")
# fairseq 0.12.2 keeps the weights of an encoder's layers a second time, which sparse ones do not
_SECOND = re.compile(r"(?:in_proj|out_proj|fc[12])_(?:weight|bias)")
# fairseq's classes -> those that add the gate loss
CRITERIONS = {
    "CrossEntropyCriterion": "MoECrossEntropyCriterion",
    "LabelSmoothedCrossEntropyCriterion": "MoELabelSmoothedCrossEntropyCriterion",
}
# options of fairseq's models by which a layer is more than an FFN, or its norm elsewhere
_REFUSED = ("scale_fc", "scale_resids", "base_layers", "quant_noise_pq", "adaptive_input")


@dataclass(frozen=True)
class Upcycling:
    """How a dense model becomes one with experts.

    Attributes:
        num_experts: E, a multiple of the granularity.
        freq: every so many-th layer of encoder and decoder (from 1) becomes sparse; 0: none.
        encoder_freq, decoder_freq: of one side; the larger counts.
        top_k: K.
        granularity: G, parts that each replica of an FFN is cut into.
        shared: the FFN stays as a shared expert, and the experts add nothing at first.
        drop_ratio: share of each expert's hidden units that are drawn anew (arXiv 2502.19261).
        router_std: deviation of the router's weights.
        seed: of these.
        copy_optimizer: take over the optimizer's state (:mod:`.dense_optimizer`).
        expert_grad: ``--moe-normalize-expert-grad`` of the run to come.
        inexact: whether the model may start as another function.
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
    copy_optimizer: bool = False
    expert_grad: str = "world_size"
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
        if self.copy_optimizer and (self.granularity > 1 or self.drop_ratio):
            raise CheckpointError(
                "--optimizer copy is for whole copies: leave out --granularity and --drop-ratio"
            )
        if reason := self.changes_function():
            if not self.inexact:
                raise CheckpointError(
                    f"{reason}; --allow-inexact starts so, --shared-expert exactly"
                )
            logger.warning("%s", reason)

    def changes_function(self) -> str:
        """Why the model does not start as the dense one, "" if it does."""
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
                "token does not go to all parts of a replica"
            )
        if self.drop_ratio:
            return f"--drop-ratio {self.drop_ratio:g} draws hidden units anew"
        return ""

    def is_sparse(self, side: str, layer: int) -> bool:
        """Of a layer, from 0."""
        freq = max(self.freq, self.encoder_freq if side == "encoder" else self.decoder_freq)
        return freq > 0 and (layer + 1) % freq == 0


def upcycle(
    src: str, dst: str, how: Upcycling, *, ranks: int | None = None, force: bool = False
) -> str:
    """Write a set with experts from a dense checkpoint of stock fairseq.

    Args:
        src: the dense model's file, X.pt; a language model or a transformer.
        dst: X.pt of the set.
        how: see there.
        ranks: W of the set; None: one.
        force: replace what ``dst`` names.

    Returns:
        The canonical path.

    Raises:
        CheckpointError: ``src`` has experts, no layer to make sparse, or options that experts
            cannot be combined with; its optimizer state is not Adam's; or as of
            :func:`..store.write_set`.
    """
    source = read_set(src, foreign_optimizer=True)
    upcycled = _Upcycled(source, how, src, ranks or 1)
    ranks = ranks_of(source, how.num_experts, ranks or 1)
    written = write_set(
        dst, upcycled.shared_state(), upcycled.experts,
        num_experts=how.num_experts, num_ranks=ranks, source=source, force=force,
    )  # fmt: skip
    logger.info("train on with: %s", " ".join(upcycled.flags()))
    return written


class _Upcycled:
    """What ``write_set`` takes, of a dense model."""

    def __init__(self, source: SetReader, how: Upcycling, src: str, world_size: int):
        self.how, self._src = how, src
        if source.num_experts:
            raise CheckpointError(f"{src}: has experts; `grow` makes more of them")
        _check_options(source.shared, src)
        self._dense = source.shared_state()
        self._ffns = self._find_ffns()
        self._gradient = gradient_factor(how.expert_grad, world_size)
        self._optimizer = None
        if how.copy_optimizer:
            self._optimizer = self._read_optimizer(source)

    def _find_ffns(self) -> dict[str, dict[str, Tensor]]:
        """By the layer's prefix, the tensors of the FFNs that become experts."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, value in self._dense[MODEL].items():
            match = _FFN.fullmatch(name)
            if match and self.how.is_sparse(match[2], int(match[3])):
                found.setdefault(match[1], {})[match[4]] = value
        if not found:
            raise CheckpointError(
                f"{self._src}: none of its layers becomes sparse with --moe-freq {self.how.freq}"
            )
        widths = {ffn["fc1.weight"].shape[0] for ffn in found.values()}
        wrong = [width for width in widths if width % self.how.granularity]
        if len(widths) > 1 and (self.how.granularity > 1 or self.how.shared) or wrong:
            raise CheckpointError(
                f"{self._src}: FFNs of {', '.join(map(str, sorted(widths)))} hidden units cannot "
                f"be cut alike into {self.how.granularity} parts, or kept as shared experts"
            )
        return found

    def _read_optimizer(self, source: SetReader) -> dict[str, Any]:
        stored = source.foreign_optimizer
        if stored is None:
            raise CheckpointError(
                f"{self._src}: has no optimizer state; leave out --optimizer copy"
            )
        source.check(stored)
        return named_optimizer(stored, self._dense[MODEL], self._src)

    def options(self) -> dict[str, Any]:
        """Of the model, by fairseq's names."""
        how, width = self.how, next(iter(self._ffns.values()))["fc1.weight"].shape[0]
        options: dict[str, Any] = {"moe_expert_count": how.num_experts, "moe_top_k": how.top_k}
        sides = {"encoder_moe_freq": how.encoder_freq, "decoder_moe_freq": how.decoder_freq}
        options |= {"moe_freq": how.freq, **{k: freq for k, freq in sides.items() if freq}}
        options["moe_second_expert_policy"] = "all"
        if how.granularity > 1:
            options["moe_expert_ffn_dim"] = width // how.granularity
        if how.shared:
            options["moe_shared_expert_ffn_dim"] = width
        return options

    def flags(self) -> list[str]:
        """Of the command that trains on; 0 drops nothing, as exactness wants."""
        arch = "transformer_lm_gpt_moe" if _is_lm(self._dense[MODEL]) else "transformer_moe"
        words = ["--arch", arch]
        for name, value in {**self.options(), "moe_capacity_factor": 0}.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        return words

    def shared_state(self) -> dict[str, Any]:
        model = self._without_ffns(self._dense[MODEL])
        generator = torch.Generator().manual_seed(self.how.seed)
        replicas, parts = self.how.num_experts // self.how.granularity, self.how.granularity
        named = None
        if self._optimizer is not None:
            named = self._without_ffns(self._optimizer[NAMED_STATE])
        for prefix, ffn in self._ffns.items():
            like = ffn["fc1.weight"]
            rows = torch.randn(replicas, like.shape[1], generator=generator) * self.how.router_std
            gate = f"{prefix}moe_layer.gate.wg.weight"
            # parts of a replica have one row, so that they are chosen together
            model[gate] = rows.repeat_interleave(parts, dim=0).to(like.dtype)
            if named is not None:
                state = self._optimizer[NAMED_STATE][f"{prefix}fc1.weight"]
                named[gate] = fresh_state(state, model[gate])
            if self.how.shared:
                for name, value in ffn.items():
                    shared = f"{prefix}moe_layer.shared_expert.{name}"
                    model[shared] = value
                    if named is not None:
                        named[shared] = self._optimizer[NAMED_STATE][f"{prefix}{name}"]
        state = with_options({**self._dense, MODEL: model}, self.options())
        if named is not None:
            state[OPTIMIZER] = {**self._optimizer, NAMED_STATE: named}
        state["optimizer_history"] = _of_moe_criterion(state.get("optimizer_history"))
        state[GROWTH] = with_entry(state, self._entry())
        return state

    def experts(self, wanted: range) -> tuple[dict[str, Any], dict[str, Any]]:
        model: dict[str, Any] = {}
        named: dict[str, Any] = {}
        how = self.how
        for index, (prefix, ffn) in enumerate(self._ffns.items()):
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
                model[key] = value.clone()  # experts are no tied weights, which a file has once
                if self._optimizer is not None:
                    named[key] = self._state_of_expert(f"{prefix}{rest}", value)
        return model, named

    def _state_of_expert(self, name: str, value: Tensor) -> dict[str, Any]:
        state = self._optimizer[NAMED_STATE][name]
        if self.how.shared:  # the dense network's is the shared expert's
            return fresh_state(state, value)
        return expert_state(state, self.how.num_experts, self.how.top_k, self._gradient)

    def _without_ffns(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        def is_replaced(name: str) -> bool:
            prefix, rest = next(
                ((p, name[len(p) :]) for p in self._ffns if name.startswith(p)), ("", "")
            )
            return bool(prefix) and bool(_SECOND.fullmatch(rest) or rest in self._ffns[prefix])

        return {name: value for name, value in entries.items() if not is_replaced(name)}

    def _entry(self) -> Growth:
        how = self.how
        words = [f"top-{how.top_k}"]
        words += [f"granularity {how.granularity}"] * (how.granularity > 1)
        words += ["shared expert"] * how.shared
        words += [f"drop ratio {how.drop_ratio:g}"] * (how.drop_ratio > 0)
        words += ["optimizer copied"] * how.copy_optimizer
        done = updates_done(self._dense)
        return Growth("upcycle", ", ".join(words), 0, how.num_experts, done)


def _of_moe_criterion(history: Any) -> Any:
    """fairseq's history with the criterion that adds the gate loss to what was trained with."""
    return [
        {**entry, "criterion_name": CRITERIONS.get(name, name)}
        for entry in history or ()
        for name in [entry.get("criterion_name")]
    ]


def _check_options(shared: Mapping[str, Any], src: str) -> None:
    """Raises CheckpointError for a model that none with experts can continue."""
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
    """Whether a model has no encoder, by the names of its parameters."""
    return not any(_side(name) == "encoder" for name in names)


def _side(name: str) -> str | None:
    match = _FFN.fullmatch(name)
    return match and match[2]
