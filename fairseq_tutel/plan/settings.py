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
from ..models.exchange_options import exchange_config
from ..models.options import check_model_options
from ..models.routing_options import moe_config

FORMULATIONS = ("sparse", "dense")
DDP_BACKENDS = ("legacy_ddp", "pytorch_ddp", "fully_sharded")


@dataclass(frozen=True)
class Precision:
    """Bytes of the numbers that training keeps.

    Attributes:
        name: as in fairseq's options.
        element: bytes of a weight, a gradient and an activation.
        master_copies: whether fp32 copies of weights and gradients exist beside them.
        statistic: bytes of each of Adam's two statistics.
    """

    name: str
    element: int
    master_copies: bool
    statistic: int


@dataclass(frozen=True)
class Settings:
    """One training run.

    Attributes:
        name: of the config.
        model: sizes and switches by fairseq's names, defaults filled in.
        precision: bytes per number.
        vocabulary: size of the dictionary, special symbols and padding included.
        gpus: W, ranks.
        batch_size: sequences per GPU and forward pass.
        tokens_per_sample: length of a sequence.
        update_freq: forward passes per update.
        ddp_backend: of fairseq.
        routing: options of the MoE layers, None for a dense model.
        formulation: sparse, as this plugin computes; dense, as fairseq's moe branch did.
    """

    name: str
    model: SimpleNamespace
    precision: Precision
    vocabulary: int
    gpus: int
    batch_size: int
    tokens_per_sample: int
    update_freq: int
    ddp_backend: str
    routing: MoEConfig | None
    formulation: str = "sparse"

    @property
    def is_dense_formulation(self) -> bool:
        """Whether tables of masks and scores exist."""
        return self.formulation == "dense"

    @property
    def is_fully_sharded(self) -> bool:
        """Whether dense parameters are spread over the GPUs; this plugin replicates them."""
        return self.is_dense_formulation and self.ddp_backend == "fully_sharded"

    @property
    def exchange(self) -> ExchangeConfig:
        """How rows travel between GPUs, as the model's options say it."""
        return exchange_config(self.model)

    @property
    def placement(self) -> str:
        """What each of several GPUs that share an expert holds: ``replicated`` or ``sliced``."""
        return str(self.model.moe_expert_placement)

    def with_flow(self, placement: str | None = None, r: int = 1) -> Settings:
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
    """Settings of a config for a number of GPUs.

    Args:
        config: of :func:`~fairseq_tutel.plan.compose.load_config`.
        name: for titles.
        gpus: W; the config's world size, or one GPU per expert, if None.
        vocabulary: in place of the task's.

    Raises:
        ValueError: the config leaves out what the planner needs, or holds what it cannot count.
    """
    model = _section(config, "model")
    _check_model(model)
    check_model_options(model)
    _fill_sizes(model)
    world = _section(config, "distributed_training").distributed_world_size
    gpus = gpus or model.moe_simulate_world_size or world or model.moe_expert_count or 1
    tokens_per_sample = OmegaConf.select(config, "task.tokens_per_sample")
    if not tokens_per_sample:
        raise ValueError("task.tokens_per_sample is not set: activations depend on it")
    settings = Settings(
        name=name,
        model=model,
        precision=_precision(config),
        vocabulary=vocabulary or _vocabulary(config),
        gpus=gpus,
        batch_size=_batch_size(config, tokens_per_sample),
        tokens_per_sample=tokens_per_sample,
        update_freq=_update_freq(config),
        ddp_backend=str(_section(config, "distributed_training").ddp_backend),
        routing=None,
    )
    return with_experts(settings, model.moe_expert_count)


def with_experts(settings: Settings, num_experts: int) -> Settings:
    """The same run with another number of experts; 0: one per GPU, as the model reads it.

    Raises:
        ValueError: experts and GPUs do not divide, or the routing options contradict each other.
    """
    model = settings.model
    if not model.moe_freq or model.alternate_decoder_ffn_embed_dim > 0:
        return settings.replace(routing=None)
    num_experts = num_experts or settings.gpus
    exchange_size(num_experts, settings.gpus, model.moe_expert_parallel_size)  # raises
    routing = moe_config(model, num_experts)
    return settings.replace(routing=routing, model={"moe_expert_count": num_experts})


def _section(config: DictConfig, name: str) -> SimpleNamespace:
    """A section as plain values, interpolations resolved."""
    values = OmegaConf.to_container(config[name], resolve=True, enum_to_str=True)
    return SimpleNamespace(**{"_name": None, **values})


def _check_model(model: SimpleNamespace) -> None:
    if model.adaptive_softmax_cutoff:
        raise ValueError(
            f"model.adaptive_softmax_cutoff={model.adaptive_softmax_cutoff}: the planner cannot "
            "count the memory of its output"
        )


def _fill_sizes(model: SimpleNamespace) -> None:
    model.decoder_input_dim = model.decoder_input_dim or model.decoder_embed_dim
    model.decoder_output_dim = model.decoder_output_dim or model.decoder_embed_dim
    model.moe_expert_ffn_dim = model.moe_expert_ffn_dim or model.decoder_ffn_embed_dim
    model.checkpoint_activations |= bool(model.offload_activations)
    for name in ("moe_overlap_degree", "moe_parallelism_r"):
        if str(getattr(model, name)) == "auto":
            setattr(model, name, 1)  # where the tuner starts
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


def _batch_size(config: DictConfig, tokens_per_sample: int) -> int:
    dataset = _section(config, "dataset")
    if dataset.batch_size:
        return int(dataset.batch_size)
    if dataset.max_tokens:
        return max(1, int(dataset.max_tokens) // tokens_per_sample)
    raise ValueError("neither dataset.batch_size nor dataset.max_tokens is set")


def _update_freq(config: DictConfig) -> int:
    frequency = _section(config, "optimization").update_freq
    return int(frequency if isinstance(frequency, int) else frequency[-1])


def _precision(config: DictConfig) -> Precision:
    common, optimizer = _section(config, "common"), _section(config, "optimizer")
    if optimizer._name != "adam":
        raise ValueError(f"optimizer._name is {optimizer._name!r}: the planner supports adam only")
    if common.fp16 and common.bf16:
        raise ValueError("common.fp16 and common.bf16 are both set: choose one")
    for half in ("fp16", "bf16"):
        if getattr(common, f"memory_efficient_{half}") and not getattr(common, half):
            raise ValueError(
                f"common.memory_efficient_{half}=true does nothing without common.{half}=true "
                "(fairseq-train sets both, fairseq-hydra-train does not)"
            )
    half = "fp16" if common.fp16 else "bf16" if common.bf16 else None
    efficient = half is not None and getattr(common, f"memory_efficient_{half}")
    return Precision(
        name="fp32" if half is None else f"memory-efficient {half}" if efficient else half,
        element=4 if half is None else 2,
        master_copies=half is not None and not efficient,
        statistic=2 if optimizer.fp16_adam_stats else 4,
    )
