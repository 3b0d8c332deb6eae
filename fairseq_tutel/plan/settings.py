"""Settings of a run that the planner needs, read from its composed configuration."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fairseq.data.data_utils import infer_language_pair
from fairseq.models import ARCH_MODEL_NAME_REGISTRY
from omegaconf import DictConfig, OmegaConf

from ..config import ExchangeConfig, MoEConfig, exchange_size
from ..integrations.fairseq.models import ARCHITECTURES, AnyMoEOptions
from ..integrations.fairseq.models.transformer_fields import fill_decoder_sizes, fill_sizes
from ..integrations.fairseq.options.benchmark import benchmark_of
from ..integrations.fairseq.options.fields import TUNED
from ..integrations.fairseq.options.options import (
    exchange_config,
    moe_config,
    moe_frequencies,
    run_options,
)
from ..moe import ActivationMemory

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Precision:
    """Bytes of the numbers that training keeps."""

    name: str  # as in fairseq's options
    element: int  # of a weight, a gradient and an activation
    master_copies: bool  # whether fp32 copies of weights and gradients exist beside them
    statistic: int  # of each of Adam's two statistics


@dataclass(frozen=True)
class Stack:
    """One stack of layers: a language model, an encoder or a decoder."""

    side: str  # "encoder" or "decoder", the prefix of its options
    layers: int
    dim: int
    heads: int
    attentions: int  # per layer: 1 to the stack's own tokens, 2 with the encoder's
    expert_dim: int  # hidden units of an expert
    conditional: int  # width of the dense FFN beside the experts in conditional routing, or 0
    sparse: range  # numbers, from 1, of the layers with experts
    dense_widths: tuple[int, ...]  # hidden width of every dense FFN

    @property
    def wide_option(self) -> str:
        """Option of the model for dense FFNs in place of experts."""
        return _WIDE[self.side]


@dataclass(frozen=True)
class Run:
    """One training run, of a model of any architecture."""

    name: str  # name of the config, for titles
    model: SimpleNamespace  # sizes and switches by fairseq's names, defaults filled in
    precision: Precision
    gpus: int  # W, ranks
    update_freq: int  # forward passes per update
    ddp_backend: str
    zero_sharding: bool  # each dense parameter's statistics are on one GPU
    routing: MoEConfig | None  # options of the MoE layers; None for a dense model

    def replace(self, **changes: Any) -> Self:
        """Return a copy with changed fields; ``model`` may map names of model options to values."""
        if isinstance(changes.get("model"), Mapping):
            changes["model"] = SimpleNamespace(**{**vars(self.model), **changes["model"]})
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Settings(Run):
    """A run of one of this package's architectures, whose sizes the planner's formulas read."""

    vocabulary: int  # size of the dictionary with special symbols and padding
    batch_size: int  # sequences per GPU and forward pass
    tokens_per_sample: int  # in an encoder-decoder: tokens of each source and target sentence

    @property
    def exchange(self) -> ExchangeConfig:
        """Exchange options of the model."""
        return exchange_config(self.model)

    @property
    def activation_memory(self) -> ActivationMemory:
        """Choice of what experts keep for the backward pass."""
        model = self.model
        return ActivationMemory(model.moe_activation_memory, model.moe_activation_storage)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The model's stacks of layers, in the order in which they are computed."""
        return stacks_of(self.model)

    @property
    def placement(self) -> str:
        """``replicated`` or ``sliced``: what each of the GPUs that share an expert holds."""
        return str(self.model.moe_expert_placement)

    def with_placement(self, placement: str | None = None, r: int = 1) -> Settings:
        """Return the run with another placement of experts and another r."""
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
        """T, tokens per GPU and forward pass; in an encoder-decoder, tokens of each stack."""
        return self.batch_size * self.tokens_per_sample


def read_settings(
    config: DictConfig,
    name: str,
    *,
    gpus: int | None = None,
    vocabulary: int | None = None,
    sentence: int | None = None,
) -> Settings:
    """Read the settings from a config of :mod:`.compose`.

    Args:
        config: the composed config.
        name: name of the config, for titles.
        gpus: W (default None: the config's world size, or one GPU per expert).
        vocabulary: size of the dictionary (default None: the task's).
        sentence: tokens per sentence of an encoder-decoder (default None: the longest it takes).

    Raises:
        ValueError: the config lacks an option, contradicts itself, or has an option that the
            planner cannot count.
    """
    model, dataset = _section(config, "model"), _section(config, "dataset")
    run_options(model, ARCHITECTURES[ARCH_MODEL_NAME_REGISTRY[model._name]].config)
    _fill_sizes(model)
    if not (dataset.batch_size or dataset.max_tokens):
        raise ValueError("neither dataset.batch_size nor dataset.max_tokens is set")
    run = _run_of(config, name, model, gpus, lambda: any(s.sparse for s in stacks_of(model)))
    _check_positive(model, dataset)
    length = _tokens_per_sample(config, model, dataset, sentence)
    return Settings(
        **vars(run),
        vocabulary=vocabulary or _vocabulary(config, is_encoder_decoder(model)),
        batch_size=int(dataset.batch_size or max(1, int(dataset.max_tokens) // length)),
        tokens_per_sample=length,
    )


def read_run(config: DictConfig, name: str, gpus: int | None = None) -> Run:
    """Read what a run of any ``NAME_moe`` needs that does not depend on its dense architecture.

    Raises:
        ValueError: see :func:`read_settings`.
    """
    model = SimpleNamespace(**vars(_section(config, "model")))
    run_options(model, AnyMoEOptions, any_model=True)
    _start_tuner(model)
    return _run_of(config, name, model, gpus, lambda: bool(model.moe_freq or model.moe_blocks))


def _run_of(
    config: DictConfig,
    name: str,
    model: SimpleNamespace,
    gpus: int | None,
    is_sparse: Callable[[], bool],
) -> Run:
    distributed = _section(config, "distributed_training")
    passes = _section(config, "optimization").update_freq
    passes = passes if isinstance(passes, int) else passes[-1]
    _check_size("update_freq", passes)
    world = benchmark_of(model).simulate_world_size or distributed.distributed_world_size
    gpus = gpus or world or model.moe_expert_count or 1
    if getattr(model, "moe_lora_rank", 0):
        raise ValueError(
            f"--moe-lora-rank {model.moe_lora_rank}: the planner counts training of all weights, "
            "which needs more; plan without it"
        )
    routing = None
    if is_sparse():
        model.moe_expert_count = model.moe_expert_count or gpus  # as the model reads 0
        exchange_size(model.moe_expert_count, gpus, model.moe_expert_parallel_size)  # raises
        routing = moe_config(model, model.moe_expert_count)
    return Run(
        name=name,
        model=model,
        precision=_precision(config),
        gpus=gpus,
        update_freq=int(passes),
        ddp_backend=str(distributed.ddp_backend),
        zero_sharding=str(distributed.zero_sharding) == "os",
        routing=routing,
    )


def _check_positive(model: SimpleNamespace, dataset: SimpleNamespace) -> None:
    """Raise ValueError for a size below 1, naming the option."""
    for side in ("encoder", "decoder") if is_encoder_decoder(model) else ("decoder",):
        for size in ("layers", "embed_dim", "ffn_embed_dim", "attention_heads"):
            _check_size(f"{side}_{size}", getattr(model, f"{side}_{size}"))
    for name in ("batch_size", "max_tokens"):
        _check_size(name, getattr(dataset, name) or 1)  # None and 0: no limit


def _check_size(name: str, value: float) -> None:
    if value < 1:
        raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")


def is_encoder_decoder(model: Any) -> bool:
    """Return whether a model with these options has two stacks."""
    return hasattr(model, "encoder_layers")


_WIDE = {"encoder": "alternate_ffn_embed_dim", "decoder": "alternate_decoder_ffn_embed_dim"}


def stacks_of(model: Any) -> tuple[Stack, ...]:
    """Return the stacks of layers of a model with these options."""
    both = is_encoder_decoder(model)
    return tuple(_stack(model, side, both) for side in ("encoder",) * both + ("decoder",))


def _stack(model: Any, side: str, both: bool) -> Stack:
    layers, width = getattr(model, f"{side}_layers"), getattr(model, f"{side}_ffn_embed_dim")
    freq, wide = moe_frequencies(model)[side == "decoder"], getattr(model, _WIDE[side])
    replaced = range(freq, layers + 1, freq) if freq else range(0)
    wider = [wide] * len(replaced) if wide > 0 else []
    return Stack(
        side=side,
        layers=layers,
        dim=getattr(model, f"{side}_embed_dim"),
        heads=getattr(model, f"{side}_attention_heads"),
        attentions=2 if both and side == "decoder" else 1,
        expert_dim=model.moe_expert_ffn_dim or width,
        conditional=width if getattr(model, "moe_cmr", False) else 0,
        sparse=range(0) if wider else replaced,
        dense_widths=(*wider, *[width] * (layers - len(replaced))),
    )


def _tokens_per_sample(
    config: DictConfig, model: SimpleNamespace, dataset: SimpleNamespace, sentence: int | None
) -> int:
    if not is_encoder_decoder(model):
        if sentence:
            raise ValueError("sentence=N is for encoder-decoders; this is a language model")
        length = OmegaConf.select(config, "task.tokens_per_sample")
        if not length:
            raise ValueError("task.tokens_per_sample is not set: activations depend on it")
        _check_size("tokens_per_sample", length)
        return length
    most = min(model.max_source_positions, model.max_target_positions)
    if dataset.max_tokens:
        most = min(most, int(dataset.max_tokens))
    if sentence and sentence > most:
        raise ValueError(f"sentence={sentence}: the run takes sentences of at most {most} tokens")
    return sentence or most


def _section(config: DictConfig, name: str) -> SimpleNamespace:
    """Return a section as plain values, with interpolations resolved."""
    section = config[name]
    if isinstance(section, Namespace):  # of a class without a dataclass
        return SimpleNamespace(**{"_name": None, **vars(section)})
    values = OmegaConf.to_container(section, resolve=True, enum_to_str=True)
    return SimpleNamespace(**{"_name": None, **values})


def _fill_sizes(model: SimpleNamespace) -> None:
    if model.adaptive_softmax_cutoff:
        raise ValueError(
            f"model.adaptive_softmax_cutoff={model.adaptive_softmax_cutoff}: the planner cannot "
            "count the memory of its output"
        )
    if is_encoder_decoder(model):
        fill_sizes(model)
    else:
        fill_decoder_sizes(model)
    _start_tuner(model)


def _start_tuner(model: SimpleNamespace) -> None:
    """Give what a tuner chooses the values that it starts with."""
    for field, flag in TUNED.items():
        if str(getattr(model, flag)) == "auto":
            setattr(model, flag, getattr(ExchangeConfig, field))
    model.moe_tune_file = None


def _vocabulary(config: DictConfig, translates: bool) -> int:
    """Return the size of the dictionary: a dummy task's, or that of the data-bin's dict.txt.

    A translation has the dictionaries of both languages.
    """

    def of_task(name: str) -> Any:
        if isinstance(config.task, DictConfig):
            return OmegaConf.select(config, f"task.{name}", throw_on_missing=False)
        return getattr(config.task, name, None)  # of tasks without a dataclass of options

    if str(of_task("_name")).startswith("dummy_"):
        words = of_task("dict_size")
        words = 49996 if words is None else words
        return -(-(words + 4) // 8) * 8  # <s> <pad> </s> <unk>, padded to a multiple of 8
    # other tasks add their own symbols
    data = of_task("data")
    folder = Path(str(data).split(":")[0])
    languages = [of_task("source_lang"), of_task("target_lang")]
    if translates and None in languages and folder.is_dir():
        languages = infer_language_pair(str(folder))  # as the task does
    both = translates and of_task("_name") == "translation" and all(languages)
    names = [f"dict.{language}.txt" for language in languages] if both else ["dict.txt"]
    files = [folder / name for name in names]
    if translates and not both:
        raise ValueError("the size of a translation's dictionary is unknown: give vocabulary=N")
    if not data or not all(file.is_file() for file in files):
        raise ValueError(
            f"the size of the dictionary is unknown: task.data={data} has no "
            f"{' and '.join(names)} here; give vocabulary=N"
        )
    sizes = [_count_symbols(file) for file in files]
    if len(set(sizes)) > 1:
        raise ValueError(f"dictionaries of {sizes[0]} and {sizes[1]} symbols: give vocabulary=N")
    return sizes[0]


def _count_symbols(dictionary: Path) -> int:
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
