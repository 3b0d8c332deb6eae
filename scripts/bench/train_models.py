"""Trainers for the end-to-end benchmark: fairseq's own, over the registered task, model, criterion
and optimizer, from one config with overrides.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dense_reference import DenseMoE, memory_need
from fairseq import tasks, utils
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.initialize import add_defaults
from fairseq.dataclass.utils import omegaconf_no_object_check
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from measure import free_memory
from omegaconf import DictConfig, OmegaConf
from presets import LayerShape
from ranks import Ranks
from record import ROOT

import fairseq_tutel

fairseq_tutel.register()

VARIANTS = {
    "moe": "this plugin",
    "dense": "the same model, dense S x E x C formulation",
    "flop-matched": "FLOP-matched dense model",
}


@dataclass(frozen=True)
class TrainPreset:
    """A training run to measure: a file of configs/ with ``key=value`` over it.

    Attributes:
        goals: (variant, bound): this plugin's tokens/s over the variant's.
        simulated: what is simulated, for titles.
        one_by_one: whether its models do not fit into a device together.
        own_model: whether the overrides state the whole model, in place of the config's.
    """

    about: str
    config: str
    overrides: tuple[str, ...]
    variants: tuple[str, ...] = tuple(VARIANTS)
    goals: tuple[tuple[str, float], ...] = ()
    simulated: str = ""
    one_by_one: bool = False
    own_model: bool = False


_FP32 = """common.fp16=false common.memory_efficient_fp16=false optimizer.fp16_adam_stats=false"""
# Without dropout, as in the golden runs: with it fairseq's attention is computed step by step on a
# CPU, and drawing its masks takes a third of the time of every variant.
_SMALL = f"""{_FP32} task.dict_size=4996 distributed_training.distributed_world_size=1
    model.decoder_layers=4 model.decoder_embed_dim=256 model.decoder_ffn_embed_dim=1024
    model.decoder_attention_heads=4 model.moe_expert_count=8 model.checkpoint_activations=false
    model.moe_normalize_expert_grad=world_size model.dropout=0.0 model.attention_dropout=0.0"""
_STACKS = " ".join(
    f"model.{side}_{size}"
    for side in ("encoder", "decoder")
    for size in ("layers=6", "embed_dim=512", "ffn_embed_dim=2048", "attention_heads=8",
                 "normalize_before=true")
)  # fmt: skip
_TRANSLATION = f"""{_FP32} model._name=transformer_moe {_STACKS} model.share_all_embeddings=true
    model.max_source_positions=128 model.max_target_positions=128 task.tokens_per_sample=128
    dataset.batch_size=32 task.dict_size=4996 distributed_training.distributed_world_size=1
    model.moe_freq=2 model.moe_expert_count=8 model.moe_second_expert_policy=all
    model.dropout=0.0 model.attention_dropout=0.0"""
# Over any of the presets, to rehearse a benchmark on a CPU; a simulated rank is then one of 4.
_TINY = f"""{_FP32} task.dict_size=60 task.tokens_per_sample=16 dataset.batch_size=2
    model.decoder_layers=2 model.decoder_embed_dim=16 model.decoder_ffn_embed_dim=32
    model.decoder_attention_heads=2 model.moe_expert_count=4"""
_TINY_ENCODER = """model.encoder_layers=2 model.encoder_embed_dim=16
    model.encoder_ffn_embed_dim=32 model.encoder_attention_heads=2 model.max_source_positions=16
    model.max_target_positions=16"""


def _small(batch: int, times_dense: float) -> TrainPreset:
    about = f"4 layers 256/1024, 8 experts, top-2, 1024 tokens x {batch}, vocabulary 5000, fp32"
    overrides = (*_SMALL.split(), f"dataset.batch_size={batch}")
    goals = (("flop-matched", 0.90), ("dense", times_dense))
    return TrainPreset(f"{about}, no dropout", "meta_1.1t", overrides, goals=goals)


def _rank(ranks: int, about: str, *overrides: str, **options) -> TrainPreset:
    """One simulated rank of the 1.1T model with one expert per rank."""
    simulated = (
        "distributed_training.distributed_world_size=1",
        f"model.moe_expert_count={ranks}",
        f"model.moe_simulate_world_size={ranks}",
    )
    name = f"SIMULATED rank of {ranks}"
    return TrainPreset(about, "meta_1.1t", (*simulated, *overrides), simulated=name, **options)


PRESETS = {
    "x4": _small(4, times_dense=1.8),
    "x8": _small(8, times_dense=2.5),
    "translation": TrainPreset(
        "encoder-decoder, 6 + 6 layers 512/2048, 8 experts, top-2, in every second layer of both "
        "stacks, 128 + 128 tokens x 32, vocabulary 5000, fp32, no dropout",
        "meta_1.1t",
        tuple(_TRANSLATION.split()),
        goals=(("flop-matched", 0.90), ("dense", 1.8)),
        own_model=True,
    ),
    "meta-1.1t-rank": _rank(
        512, "one rank of 512 of the 1.1T model, all-to-alls replaced by copies", variants=("moe",)
    ),
    "meta-8gpu-rank": _rank(
        8,
        "one rank of 8 of the same model with 8 experts, all-to-alls replaced by copies",
        variants=("moe", "dense"),
        one_by_one=True,
    ),
    "meta-half-rank": _rank(
        8,
        "the same rank of 8 with half of the layers: what the model is compared with fits, too",
        "model.decoder_layers=16",
        one_by_one=True,
    ),
}


def tiny_overrides(preset: TrainPreset, world_size: int = 1) -> tuple[str, ...]:
    """``key=value`` that cut a preset down to milliseconds on a CPU."""
    simulated = 4 if preset.simulated and world_size == 1 else 0
    encoder = _TINY_ENCODER.split() if preset.own_model else ()
    return (*_TINY.split(), *encoder, f"model.moe_simulate_world_size={simulated}")


def load_config(preset: TrainPreset, overrides: Sequence[str], ranks: Ranks) -> DictConfig:
    """The whole config as fairseq's trainer takes it.

    On several ranks nothing is simulated: a preset of one simulated rank becomes one with as many
    experts as there are ranks.
    """
    given = OmegaConf.load(ROOT / "configs" / f"{preset.config}.yaml")
    for key in ("defaults", "hydra"):  # for Hydra itself
        given.pop(key, None)
    if preset.own_model:
        given.pop("model")
    on_gpu, world_size = ranks.device.type == "cuda", ranks.world_size
    changes = [*preset.overrides, f"common.cpu={str(not on_gpu).lower()}", "common.user_dir=null"]
    if world_size > 1:
        changes += [
            f"distributed_training.distributed_world_size={world_size}",
            f"distributed_training.distributed_rank={ranks.rank}",
            f"distributed_training.device_id={ranks.device.index or 0}",
            f"distributed_training.distributed_backend={ranks.backend}",
            "distributed_training.distributed_init_method=env://",
            "model.moe_simulate_world_size=0",
        ]
        if preset.simulated:
            changes.append(f"model.moe_expert_count={world_size}")
    changes += overrides
    given = OmegaConf.merge(given, OmegaConf.from_dotlist(changes))
    config = OmegaConf.merge(OmegaConf.structured(FairseqConfig), given)
    add_defaults(config)
    with omegaconf_no_object_check():
        config = OmegaConf.create(OmegaConf.to_container(config, resolve=True, enum_to_str=True))
    OmegaConf.set_struct(config, True)
    return config


def flop_matched(config: DictConfig) -> DictConfig:
    """The config with dense layers, K times as wide, in place of the MoE layers."""
    config = config.copy()
    top_k = 1 if config.model.moe_top1_expert else config.model.moe_top_k or 2
    for side, option in (("encoder", "alternate_ffn"), ("decoder", "alternate_decoder_ffn")):
        width = config.model.moe_expert_ffn_dim or config.model.get(f"{side}_ffn_embed_dim")
        if f"{option}_embed_dim" in config.model:
            config.model[f"{option}_embed_dim"] = top_k * width
    config.model.moe_simulate_world_size = 0
    return config


def dense_masks(config: DictConfig) -> int:
    """Bytes of the S x E x C tensors of one MoE layer in the dense formulation, a lower bound."""
    model, common = config.model, config.common
    layer = LayerShape(
        config.dataset.batch_size * config.task.tokens_per_sample,
        model.decoder_embed_dim,
        model.decoder_ffn_embed_dim,
        experts=model.moe_expert_count,
        top_k=1 if model.moe_top1_expert else model.moe_top_k or 2,
        capacity_factor=model.get("moe_capacity_factor") or 1.0,
    )
    size = 2 if common.fp16 or common.bf16 else 4
    return memory_need(layer.tokens, layer.experts, layer.capacity, size)


class Run:
    """One model in training, one update at a time.

    Args:
        build_on: device that draws the initial weights, the CPU if None. For billions of them a CPU
            needs minutes; equal ones on several ranks it alone promises.
    """

    def __init__(self, variant: str, config: DictConfig, build_on: torch.device | None = None):
        if variant == "flop-matched":
            config = flop_matched(config)
        self.variant, self.config = variant, config
        utils.set_torch_seed(config.common.seed)
        self.task = tasks.setup_task(config.task)
        with contextlib.nullcontext() if build_on is None else build_on:
            model = self.task.build_model(config.model)
        if variant == "dense":
            for layer in model.moe_layers.values():
                layer.forward = DenseMoE(layer).forward
        criterion = self.task.build_criterion(config.criterion)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.trainer = Trainer(config, self.task, model, criterion)
        self.trainer.begin_epoch(1)
        if build_on is not None:
            free_memory(build_on)  # of the fp32 weights, which the trainer made half of

    def update(self, sample: dict[str, Any]) -> dict[str, float]:
        """Forward, backward, clipping and optimizer step on one batch; what fairseq logs of it."""
        with metrics.aggregate(new_root=True) as logged:
            self.trainer.train_step([sample], raise_oom=True)  # else it is skipped like an overflow
        return logged.get_smoothed_values()

    def close(self) -> None:
        """Give the memory back."""
        del self.trainer


def random_samples(config: DictConfig, vocabulary: int, count: int, seed: int) -> list[dict]:
    """Batches of a language model, or of pairs of sentences, with random tokens.

    dummy_lm's own batches repeat one sequence, whose tokens all choose the same experts at the same
    positions.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, length = config.dataset.batch_size, config.task.tokens_per_sample

    def sample():
        # symbols below 4 are <s>, <pad>, </s> and <unk>
        tokens = torch.randint(4, vocabulary, (batch, length + 1), generator=generator)
        lengths = torch.full((batch,), length)
        # an encoder-decoder reads as many others
        inputs = {"src_tokens": tokens[:, :-1].contiguous(), "src_lengths": lengths}
        if "encoder_layers" in config.model:
            inputs["prev_output_tokens"] = inputs["src_tokens"]
            inputs["src_tokens"] = torch.randint(
                4, vocabulary, (batch, length), generator=generator
            )
        return {
            "id": torch.arange(batch),
            "nsentences": batch,
            "ntokens": batch * length,
            "net_input": inputs,
            "target": tokens[:, 1:].contiguous(),
        }

    return [sample() for _ in range(count)]
