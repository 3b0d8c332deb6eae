"""What the planner needs of a run, read from its composed configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..config import ExchangeConfig, MoEConfig, exchange_size
from ..integrations.fairseq.models import check_model_options
from ..integrations.fairseq.options.options import exchange_config, moe_config


@dataclass(frozen=True)
class Precision:
    """Bytes of the numbers that training keeps."""

    name: str  # as in fairseq's options
    element: int  # of a weight, a gradient and an activation
    master_copies: bool  # whether fp32 copies of weights and gradients exist beside them
    statistic: int  # of each of Adam's two statistics


@dataclass(frozen=True)
class Settings:
    """One training run."""

    name: str  # of the config, for titles
    model: SimpleNamespace  # sizes and switches by fairseq's names, defaults filled in
    precision: Precision
    vocabulary: int  # size of the dictionary, special symbols and padding included
    gpus: int  # W, ranks
    batch_size: int  # sequences per GPU and forward pass
    tokens_per_sample: int
    update_freq: int  # forward passes per update
    ddp_backend: str
    routing: MoEConfig | None  # options of the MoE layers, None for a dense model

    @property
    def exchange(self) -> ExchangeConfig:
        """How rows travel between GPUs, as the model's options say it."""
        return exchange_config(self.model)

    @property
    def placement(self) -> str:
        """What each of several GPUs that share an expert holds: ``replicated`` or ``sliced``."""
        return str(self.model.moe_expert_placement)

    def with_placement(self, placement: str | None = None, r: int = 1) -> Settings:
        """The same run with another placement of experts, and r."""
        placement = placement or self.placement
        return self.replace(model={"moe_expert_placement": placement, "moe_parallelism_r": r})

    @property
    def exchange_peers(self) -> int:
        """P, GPUs that hold all experts between them; 1 for a dense model."""
        if self.routing is None:
            return 1
        chosen = self.model.moe_expert_parallel_size
        return exchange_size(self.routing.num_experts, self.gpus, chosen)

    @property
    def tokens(self) -> int:
        """T, tokens per GPU and forward pass."""
        return self.batch_size * self.tokens_per_sample

    def replace(self, **changes: Any) -> Settings:
        """A copy with other fields; ``model`` may be a mapping of the model's keys to change."""
        if isinstance(changes.get("model"), Mapping):
            changes["model"] = SimpleNamespace(**{**vars(self.model), **changes["model"]})
        return dataclasses.replace(self, **changes)


def read_settings(
    config: DictConfig, name: str, *, gpus: int | None = None, vocabulary: int | None = None
) -> Settings:
    """Settings of a config of :mod:`.compose`. ``gpus``: W; if None the config's world size, or one
    GPU per expert. ``vocabulary``: in place of the task's.

    Raises ValueError where the config leaves out what the planner needs, holds what it cannot
    count, or contradicts itself.
    """
    model, dataset = _section(config, "model"), _section(config, "dataset")
    distributed = _section(config, "distributed_training")
    check_model_options(model)
    _fill_sizes(model)
    length = OmegaConf.select(config, "task.tokens_per_sample")
    if not length:
        raise ValueError("task.tokens_per_sample is not set: activations depend on it")
    if not (dataset.batch_size or dataset.max_tokens):
        raise ValueError("neither dataset.batch_size nor dataset.max_tokens is set")
    passes = _section(config, "optimization").update_freq
    world = model.moe_simulate_world_size or distributed.distributed_world_size
    gpus = gpus or world or model.moe_expert_count or 1
    routing = None
    if model.moe_freq and not model.alternate_decoder_ffn_embed_dim > 0:
        model.moe_expert_count = model.moe_expert_count or gpus  # as the model reads 0
        exchange_size(model.moe_expert_count, gpus, model.moe_expert_parallel_size)  # raises
        exchange_config(model)  # raises
        routing = moe_config(model, model.moe_expert_count)
    return Settings(
        name=name,
        model=model,
        precision=_precision(config),
        vocabulary=vocabulary or _vocabulary(config),
        gpus=gpus,
        batch_size=int(dataset.batch_size or max(1, int(dataset.max_tokens) // length)),
        tokens_per_sample=length,
        update_freq=int(passes if isinstance(passes, int) else passes[-1]),
        ddp_backend=str(distributed.ddp_backend),
        routing=routing,
    )


def _section(config: DictConfig, name: str) -> SimpleNamespace:
    """A section as plain values, interpolations resolved."""
    values = OmegaConf.to_container(config[name], resolve=True, enum_to_str=True)
    return SimpleNamespace(**{"_name": None, **values})


def _fill_sizes(model: SimpleNamespace) -> None:
    if model.adaptive_softmax_cutoff:
        raise ValueError(
            f"model.adaptive_softmax_cutoff={model.adaptive_softmax_cutoff}: the planner cannot "
            "count the memory of its output"
        )
    model.decoder_input_dim = model.decoder_input_dim or model.decoder_embed_dim
    model.decoder_output_dim = model.decoder_output_dim or model.decoder_embed_dim
    model.moe_expert_ffn_dim = model.moe_expert_ffn_dim or model.decoder_ffn_embed_dim
    model.checkpoint_activations |= bool(model.offload_activations)
    for name, first in (("moe_a2a", "linear"), ("moe_overlap_degree", 1), ("moe_parallelism_r", 1)):
        if str(getattr(model, name)) == "auto":
            setattr(model, name, first)  # where the tuner starts
    model.moe_tune_file = None


def _vocabulary(config: DictConfig) -> int:
    """Symbols of the dictionary: dummy_lm's, or those of the data-bin's dict.txt."""
    if OmegaConf.select(config, "task._name") == "dummy_lm":
        words = OmegaConf.select(config, "task.dict_size")
        words = 49996 if words is None else words
        return -(-(words + 4) // 8) * 8  # <s> <pad> </s> <unk>, padded to a multiple of 8
    data = OmegaConf.select(config, "task.data", throw_on_missing=False)
    dictionary = Path(str(data).split(":")[0]) / "dict.txt"
    if not data or not dictionary.is_file():
        raise ValueError(
            f"the size of the dictionary is unknown: task.data={data} has no dict.txt here; "
            "give vocabulary=N"
        )
    with dictionary.open(encoding="utf-8") as lines:
        return 4 + sum(1 for _ in lines)


def _precision(config: DictConfig) -> Precision:
    common, optimizer = _section(config, "common"), _section(config, "optimizer")
    if optimizer._name != "adam":
        raise ValueError(f"optimizer._name is {optimizer._name!r}: the planner supports adam only")
    half = "fp16" if common.fp16 else "bf16" if common.bf16 else None
    efficient = half is not None and getattr(common, f"memory_efficient_{half}")
    return Precision(
        name="fp32" if half is None else f"memory-efficient {half}" if efficient else half,
        element=4 if half is None else 2,
        master_copies=half is not None and not efficient,
        statistic=2 if optimizer.fp16_adam_stats else 4,
    )
