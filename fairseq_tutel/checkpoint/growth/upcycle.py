"""Sparse upcycling (arXiv 2212.05055): a dense model of stock fairseq becomes one with experts.

The FFN of every F-th layer becomes E experts, and the router starts near zero. Several dense models
give their FFNs to one set in turn; the rest is averaged (:mod:`.mix`). The optimizer state is left
out, and the schedule begins anew. For experts of 1/G of the width see
:func:`fairseq_tutel.distributed.experts_of_ffn`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...config.options import FRACTION, as_flag, at_least, documented, option
from ...distributed import experts_of_ffn
from ..layout import CheckpointError
from ..reader import SetReader, read_set
from ..state import MODEL, options_of, updates_done
from ..store import refuse_target
from .change import check_ffn, write_change
from .mix import OF_FUNCTION, average, check_alike

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"((?:.*\.)?(encoder|decoder)\.layers\.(\d+)\.)(.*)")
_FFN = re.compile(r"fc[12]\.(?:weight|bias)")
# fairseq 0.12.2 stores the weights of an encoder layer twice; sparse layers have no second copy
_SECOND = re.compile(r"(?:in_proj|out_proj|fc[12])_(?:weight|bias)")
# fairseq's criterion classes -> those that add the gate loss
CRITERIONS = {
    "CrossEntropyCriterion": "MoECrossEntropyCriterion",
    "LabelSmoothedCrossEntropyCriterion": "MoELabelSmoothedCrossEntropyCriterion",
}
_CRITERION_NAMES = ("cross_entropy", "label_smoothed_cross_entropy")
_OF_TRAINING = ("dropout", "attention_dropout", "activation_dropout")
# options by which a layer has more than an FFN, or its norm elsewhere
_REFUSED = ("scale_fc", "scale_resids", "base_layers", "quant_noise_pq", "adaptive_input")


@documented
@dataclass(frozen=True)
class Upcycling:
    """Options of :func:`upcycle`; CheckpointError if they do not fit, or need ``inexact``."""

    num_experts: int = option(0, "E, experts per MoE layer", at_least(1))
    freq: int | None = option(None, "F: every F-th layer becomes sparse, 0: none (default: 2, or 0 "
                              "with a frequency for one side)", at_least(0))  # fmt: skip
    encoder_freq: int = option(0, "the same for the encoder; the larger F counts", at_least(0))
    decoder_freq: int = option(0, "the same for the decoder; the larger F counts", at_least(0))
    top_k: int = option(2, "K, experts per token", at_least(1))
    granularity: int = option(1, "G: cut each FFN into G experts; G must divide K", at_least(1))
    shared: bool = option(False, "keep the FFN as a shared expert; the others add nothing at first")
    drop_ratio: float = option(0.0, "share of each expert's units to draw anew", FRACTION)
    router_std: float = option(0.02, "standard deviation of the router's weights", at_least(0))
    seed: int = option(1, "seed of all draws")
    from_first: bool = option(False, "with several models: take all but the experts from the first "
                              "one, not the average")  # fmt: skip
    inexact: bool = option(False, "allow a model that does not start as the dense one: K = 1, a G "
                           "that does not divide K, or a drop ratio")  # fmt: skip

    def __post_init__(self):
        if self.freq is None:
            one_side = self.encoder_freq or self.decoder_freq
            object.__setattr__(self, "freq", 0 if one_side else 2)
        if not 1 <= self.top_k <= self.num_experts:
            limit = f"--num-experts {self.num_experts}"
            raise CheckpointError(f"--top-k {self.top_k} must lie between 1 and {limit}")
        if self.num_experts % self.granularity:
            given = f"--num-experts {self.num_experts}"
            raise CheckpointError(f"{given} is no multiple of --granularity {self.granularity}")
        if reason := self.why_inexact():
            if not self.inexact:
                ways = "--allow-inexact accepts that, --shared-expert avoids it"
                raise CheckpointError(f"{reason}; {ways}")
            logger.warning("%s", reason)

    def why_inexact(self) -> str:
        """Return why the model does not start as the dense one, or ""."""
        k, parts = self.top_k, self.granularity
        if self.shared:
            return ""
        if k == 1:
            share = f"1/{self.num_experts}"
            return f"--top-k 1 weights an expert by the gate's probability, about {share} at first"
        if k % parts:
            slices = "a token does not go to all slices of a replica"
            return f"--granularity {parts} does not divide --top-k {k}, so that {slices}"
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
        words += ["dense parameters of the first"] * self.from_first
        return ", ".join(words)


def upcycle(
    src: str | Sequence[str],
    dst: str,
    how: Upcycling,
    *,
    ranks: int | None = None,
    force: bool = False,
) -> str:
    """Write a set with experts from one or several dense checkpoints of stock fairseq.

    Each replica of an FFN has G experts; replica r comes from model r modulo the number of models.
    Options and position in the data are those of the first.

    Args:
        src: X.pt of a dense language model or transformer. Or several files, of models that differ
            only in the values of their parameters.
        dst, force: see :func:`.grow.grow`; the canonical path is returned.
        how: the options.
        ranks: W of the set; None: one.

    Raises:
        CheckpointError: a source has experts, no layer to make sparse, or options that experts
            cannot be combined with; several are not alike, or more than there are replicas.
    """
    paths = [src] if isinstance(src, str) else list(src)
    sources = _open_dense(paths, dst, how, force)
    states = [source.shared_state(with_optimizer=False) for source in sources]
    splits = [_split(state[MODEL], how) for state in states]
    ffns = [each for _, each in splits]
    for path, each in zip(paths, ffns, strict=True):
        for prefix, ffn in each.items():
            check_ffn(ffn, f"{path}: {prefix}")
    width = _common_width(ffns[0], how, paths[0])
    mixed = splits[:1] if how.from_first else splits
    model = average([kept for kept, _ in mixed])
    model |= _routers(ffns[0], how)
    if how.shared:
        for prefix in ffns[0]:
            ffn = average([each[prefix] for _, each in mixed])
            model |= {f"{prefix}moe_layer.shared_expert.{name}": v for name, v in ffn.items()}
    state = with_criterions({**states[0], MODEL: model}, CRITERIONS)
    # without the state of the optimizer the trainer counts its updates from 0
    if history := state["optimizer_history"]:
        history[-1]["num_updates"] = 0
    kind = "a dense model" if len(paths) == 1 else f"{len(paths)} dense models"
    updates = ", ".join(str(updates_done(each)) for each in states)
    change = ("upcycle", f"{how}, of {kind} after {updates} updates", how.num_experts)

    def experts(wanted: range) -> tuple[dict[str, Any], dict[str, Any]]:
        return _experts(ffns, how, wanted), {}

    return write_change(
        dst, sources[0], state, experts, change,
        ranks=ranks or 1, options=_options(width, how), force=force,
        more_flags={**_dense_options(states[0]), "moe_capacity_factor": 0},  # 0 drops nothing
    )  # fmt: skip


def _open_dense(paths: Sequence[str], dst: str, how: Upcycling, force: bool) -> list[SetReader]:
    """Open the dense models; raise CheckpointError if they cannot become experts of one set."""
    replicas = how.num_experts // how.granularity
    if not 1 <= len(paths) <= replicas:
        raise CheckpointError(
            f"{len(paths)} dense models cannot become {replicas} experts of full width; give "
            f"--num-experts {max(len(paths), 1) * how.granularity} or more"
        )
    for path in paths:
        refuse_target(dst, path, force)  # before a model is read
    sources = [read_set(path) for path in paths]
    for path, source in zip(paths, sources, strict=True):
        if source.num_experts:
            raise CheckpointError(f"{path}: has experts; `grow` makes more of them")
        _check_options(source.shared, path)
    check_alike([(path, source.shared) for path, source in zip(paths, sources, strict=True)])
    return sources


def with_criterions(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a state whose history names other criterion classes, without the best loss.

    A loss with the gate loss and one without cannot be compared.
    """
    history = [dict(entry) for entry in state.get("optimizer_history") or ()]
    for entry in history:
        name = entry.get("criterion_name")
        entry["criterion_name"] = names.get(name, name)
    changed = {**state, "optimizer_history": history}
    if extra := state.get("extra_state"):
        changed["extra_state"] = {name: each for name, each in extra.items() if name != "best"}
    return changed


# prefix of a layer that becomes sparse, ``decoder.layers.1.`` -> tensors of its FFN
_Ffns = dict[str, dict[str, Tensor]]


def _split(model: Mapping[str, Any], how: Upcycling) -> tuple[dict[str, Any], _Ffns]:
    """Return the tensors that stay, and the FFNs that become experts."""
    kept, ffns = {}, {}
    for name, value in model.items():
        layer = _LAYER.fullmatch(name)
        sparse = layer is not None and how.is_sparse(layer[2], int(layer[3]))
        ffn = ffns.setdefault(layer[1], {}) if sparse else {}
        if sparse and _FFN.fullmatch(layer[4]):
            ffn[layer[4]] = value
        elif not (sparse and _SECOND.fullmatch(layer[4])):
            kept[name] = value
    return kept, ffns


def _common_width(ffns: _Ffns, how: Upcycling, src: str) -> int:
    """Return the hidden width of the FFNs; CheckpointError if they cannot become experts."""
    widths = sorted({ffn["fc1.weight"].shape[0] for ffn in ffns.values()})
    if not widths:
        raise CheckpointError(f"{src}: none of its layers becomes sparse, --moe-freq {how.freq}")
    unequal = len(widths) > 1 and (how.granularity > 1 or how.shared)
    if unequal or any(width % how.granularity for width in widths):
        raise CheckpointError(
            f"{src}: FFNs of {', '.join(map(str, widths))} hidden units cannot be cut "
            f"alike into {how.granularity} slices, or kept as shared experts"
        )
    return widths[0]


def _options(width: int, how: Upcycling) -> dict[str, Any]:
    """Return the options of the model, by fairseq's names; FFNs have ``width`` hidden units."""
    options: dict[str, Any] = {"moe_expert_count": how.num_experts, "moe_top_k": how.top_k}
    sides = {"encoder_moe_freq": how.encoder_freq, "decoder_moe_freq": how.decoder_freq}
    options |= {"moe_freq": how.freq, **{name: freq for name, freq in sides.items() if freq}}
    options["moe_second_expert_policy"] = "all"
    if how.granularity > 1:
        options["moe_expert_ffn_dim"] = width // how.granularity
    if how.shared:
        options["moe_shared_expert_ffn_dim"] = width
    return options


def _dense_options(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a dense run that its model with experts needs, by fairseq's names."""
    options, of_criterion = options_of(state), options_of(state, "criterion")
    criterion = _chosen(state, "criterion")
    lm = _is_lm(state[MODEL])
    found: dict[str, Any] = {"arch": "transformer_lm_gpt_moe" if lm else "transformer_moe"}
    found["task"] = _chosen(state, "task")
    found["criterion"] = f"moe_{criterion}" if criterion in _CRITERION_NAMES else criterion
    if str(criterion).endswith("label_smoothed_cross_entropy"):
        found["label_smoothing"] = of_criterion.get("label_smoothing")
    found |= {name: options.get(name) for name in (*OF_FUNCTION, *_OF_TRAINING)}
    positions = ["max_source_positions", "max_target_positions"]
    if lm:
        found["tokens_per_sample"] = options.get("tokens_per_sample")
        equal = options.get("max_target_positions") == found["tokens_per_sample"]
        positions = [] if equal else positions[1:]  # by default equal, and not every task's flag
    return found | {name: options.get(name) for name in positions}


def _chosen(state: Mapping[str, Any], section: str) -> str | None:
    """Return the name of a run's task or criterion; a section has it under another key."""
    options = options_of(state, section)
    return options.get(section) or options.get("_name")


def _routers(ffns: _Ffns, how: Upcycling) -> dict[str, Tensor]:
    """Return the routers of the layers that become sparse."""
    made: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(how.seed)
    replicas = how.num_experts // how.granularity
    for prefix, ffn in ffns.items():
        like = ffn["fc1.weight"]
        rows = torch.randn(replicas, like.shape[1], generator=generator) * how.router_std
        # slices of a replica have one row, so that they are chosen together
        rows = rows.repeat_interleave(how.granularity, dim=0).to(like.dtype)
        made[f"{prefix}moe_layer.gate.wg.weight"] = rows
    return made


def _experts(sources: Sequence[_Ffns], how: Upcycling, wanted: range) -> dict[str, Tensor]:
    """Return the tensors of some experts of all layers, renumbered from 0."""
    model: dict[str, Tensor] = {}
    options: dict[str, Any] = {"granularity": how.granularity, "silent": how.shared}
    options["drop_ratio"] = how.drop_ratio
    for index, prefix in enumerate(sources[0]):
        for number in wanted:
            source = sources[number // how.granularity % len(sources)]
            seed = how.seed + index * how.num_experts
            made = experts_of_ffn(source[prefix], [number], seed=seed, **options)
            for name, value in made.items():
                rest = name.partition(".")[2]
                key = f"{prefix}moe_layer.experts.{number - wanted.start}.{rest}"
                model[key] = value.clone()  # a file stores tensors that share memory once
    return model


def _check_options(shared: Mapping[str, Any], src: str) -> None:
    """Raise CheckpointError if an option of the dense model does not work with experts."""
    options = options_of(shared)
    for name in _REFUSED:
        if options.get(name):
            flag = as_flag(name, options[name])
            raise CheckpointError(f"{src}: {flag} cannot be combined with experts")
    if _is_lm(shared[MODEL]) and options.get("decoder_normalize_before") is False:
        raise CheckpointError(
            f"{src}: norms come after the blocks (no --decoder-normalize-before), and this command "
            "needs them before: give fairseq-train --arch NAME_moe --finetune-from-model instead"
        )


def _is_lm(names: Iterable[str]) -> bool:
    """Return whether a model has no encoder, by the names of its parameters."""
    return not any("encoder.layers." in name for name in names)
