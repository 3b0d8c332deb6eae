"""Reads a Hydra config of fairseq as the planner needs it; omegaconf only, nothing of fairseq.

What a config leaves out has the default that fairseq and ``transformer_lm_gpt_moe`` give it;
``tests/plan`` holds the defaults below against the dataclasses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fairseq_tutel.config import ROUTERS, MoEConfig, check_divisible, resolve_capacity

ARCH = "transformer_lm_gpt_moe"
# Keys of the command line that are the planner's own.
PLAN_KEYS = ("gpus", "hardware", "vocabulary")

DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {
        "activation_fn": "gelu",
        "dropout": 0.1,
        "decoder_embed_dim": 768,
        "decoder_input_dim": None,
        "decoder_output_dim": None,
        "decoder_ffn_embed_dim": 3072,
        "decoder_layers": 12,
        "decoder_attention_heads": 12,
        "decoder_learned_pos": False,
        "decoder_layers_to_keep": None,
        "no_token_positional_embeddings": False,
        "no_decoder_final_norm": False,
        "layernorm_embedding": False,
        "use_stable_embedding": False,
        "share_decoder_input_output_embed": False,
        "adaptive_input": False,
        "adaptive_softmax_cutoff": None,
        "character_embeddings": False,
        "quant_noise_pq": 0.0,
        "base_layers": 0,
        "scale_fc": False,
        "scale_attn": False,
        "scale_heads": False,
        "scale_resids": False,
        "checkpoint_activations": False,
        "offload_activations": False,
        "moe_freq": 2,
        "moe_expert_count": 0,
        "moe_expert_ffn_dim": None,
        "moe_top1_expert": False,
        "moe_top_k": None,
        "moe_capacity_factor": None,
        "moe_eval_capacity_factor": None,
        "moe_eval_capacity_token_fraction": None,
        "moe_router": "linear",
        "moe_a2a": "linear",
        "moe_simulate_world_size": 0,
        "alternate_decoder_ffn_embed_dim": 0,
    },
    "common": {
        "fp16": False,
        "bf16": False,
        "memory_efficient_fp16": False,
        "memory_efficient_bf16": False,
    },
    "dataset": {"batch_size": None, "max_tokens": None},
    "optimization": {"update_freq": [1]},
    "distributed_training": {"ddp_backend": "pytorch_ddp", "distributed_world_size": None},
    "optimizer": {"_name": None, "fp16_adam_stats": False},
}
# What the parameter count does not know; the model refuses most of it as well.
UNSUPPORTED = (
    "adaptive_input", "adaptive_softmax_cutoff", "character_embeddings", "quant_noise_pq",
    "base_layers", "scale_fc", "decoder_layers_to_keep",
)  # fmt: skip


@dataclass(frozen=True)
class Precision:
    """Bytes of the numbers that training keeps.

    Attributes:
        name: as fairseq's options say it.
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

    @property
    def tokens(self) -> int:
        """T, tokens per GPU and forward pass."""
        return self.batch_size * self.tokens_per_sample

    def replace(self, **changes: Any) -> Settings:
        """A copy with other fields; ``model`` may be a mapping of the model's keys to change."""
        if isinstance(changes.get("model"), Mapping):
            changes["model"] = SimpleNamespace(**{**vars(self.model), **changes["model"]})
        return dataclasses.replace(self, **changes)


def load_config(directory: Path, name: str, overrides: Sequence[str]) -> DictConfig:
    """The YAML file ``name`` of ``directory`` with Hydra-style ``key=value`` overrides.

    Raises:
        ValueError: there is no such file, or an override has no ``=``.
    """
    path = directory / f"{name.removesuffix('.yaml')}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in directory.glob("*.yaml"))) or "none"
        raise ValueError(f"no config {name!r} in {directory} (there are: {known})")
    config = OmegaConf.load(path)
    for override in overrides:
        if override.startswith("~"):
            _delete(config, override.removeprefix("~").partition("=")[0])
            continue
        key, equals, _ = override.partition("=")
        if not equals:
            raise ValueError(f"override {override!r} is not of the form key=value")
        key = key.lstrip("+")
        try:
            value = OmegaConf.from_dotlist([override.lstrip("+")])
            OmegaConf.update(config, key, OmegaConf.select(value, key), merge=True)
        except OmegaConfBaseException as error:
            raise ValueError(f"override {override!r}: {error}") from None
    return config


def _delete(config: DictConfig, key: str) -> None:
    parent, _, name = key.rpartition(".")
    section = OmegaConf.select(config, parent) if parent else config
    if section is None or name not in section:
        raise ValueError(f"override '~{key}': the config has no {key}")
    del section[name]


def read_settings(
    config: DictConfig, name: str, *, gpus: int | None = None, vocabulary: int | None = None
) -> Settings:
    """Settings of a config for a number of GPUs.

    Args:
        config: of :func:`load_config`.
        name: for titles.
        gpus: W; the config's world size, or one GPU per expert, if None.
        vocabulary: in place of the task's.

    Raises:
        ValueError: the config leaves out what the planner needs, or holds what it cannot count.
    """
    model = _section(config, "model")
    if model._name != ARCH:
        raise ValueError(f"model._name is {model._name!r}: the planner knows {ARCH} only")
    _check_model(model)
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
    check_divisible(num_experts, settings.gpus)
    routing = MoEConfig(
        num_experts=num_experts,
        router=str(model.moe_router),
        router_options=ROUTERS.options_of_flags(str(model.moe_router), model),
        **resolve_capacity(
            top1_expert=model.moe_top1_expert,
            top_k=model.moe_top_k,
            capacity_factor=model.moe_capacity_factor,
            eval_capacity_factor=model.moe_eval_capacity_factor,
            eval_capacity_token_fraction=model.moe_eval_capacity_token_fraction,
        ),
    )
    return settings.replace(routing=routing, model={"moe_expert_count": num_experts})


def _section(config: DictConfig, name: str) -> SimpleNamespace:
    """A section with the defaults of what it does not say."""
    given = {}
    section = config.get(name) or {}
    defaults = {"_name": None, **DEFAULTS[name]}
    if name == "model":
        defaults |= {flag: field.default for flag, field in ROUTERS.all_flags().items()}
    for key in defaults:
        if key in section:
            given[key] = section[key]
    return SimpleNamespace(**{**defaults, **given})


def _check_model(model: SimpleNamespace) -> None:
    for key in UNSUPPORTED:
        if getattr(model, key):
            raise ValueError(f"model.{key}={getattr(model, key)}: the planner cannot count this")
    if model.decoder_embed_dim % model.decoder_attention_heads:
        raise ValueError(
            f"model.decoder_embed_dim={model.decoder_embed_dim} is not a multiple of "
            f"model.decoder_attention_heads={model.decoder_attention_heads}"
        )
    if model.moe_freq > model.decoder_layers:
        raise ValueError(
            f"model.moe_freq={model.moe_freq} makes no MoE layer among "
            f"model.decoder_layers={model.decoder_layers}"
        )


def _fill_sizes(model: SimpleNamespace) -> None:
    model.decoder_input_dim = model.decoder_input_dim or model.decoder_embed_dim
    model.decoder_output_dim = model.decoder_output_dim or model.decoder_embed_dim
    model.moe_expert_ffn_dim = model.moe_expert_ffn_dim or model.decoder_ffn_embed_dim
    model.checkpoint_activations |= bool(model.offload_activations)


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
        raise ValueError(f"optimizer._name is {optimizer._name!r}: the planner knows adam only")
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
