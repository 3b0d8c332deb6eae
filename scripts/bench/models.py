"""fairseq models, trainers and configs for bench_train.py and bench_generate.py."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from dense_reference import DenseMoE
from fairseq import tasks, utils
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from harness import free_memory
from layers import LayerShape
from omegaconf import DictConfig, OmegaConf
from program import Ranks
from record import ROOT

from fairseq_tutel.plan import compose

# this plugin, the same model in the dense S x E x C formulation, FLOP-matched dense model
VARIANTS = ("moe", "dense", "flop-matched")


@dataclass(frozen=True)
class TrainPreset:
    """One preset of train_presets.yaml, which says what its fields mean."""

    about: str
    parts: str = ""
    overrides: str = ""
    variants: str = "moe dense flop-matched"
    goals: dict[str, float] = field(default_factory=dict)
    simulated: bool = False
    one_by_one: bool = False

    def changes(self) -> list[str]:
        """Return all KEY=VALUE over the config."""
        return " ".join([*(PARTS[part] for part in self.parts.split()), self.overrides]).split()

    def tiny(self, world_size: int = 1) -> list[str]:
        """Return KEY=VALUE that cut it down to milliseconds; a simulated rank is then one of 4."""
        simulated = "'simulate_world_size=4'" if self.simulated and world_size == 1 else "null"
        encoder = PARTS["tiny_encoder"] if "translation" in self.parts else ""
        words = f"{PARTS['fp32']} {PARTS['tiny']} {encoder}".split()
        return [*words, f"model.moe_benchmark={simulated}"]


_FILE = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("train_presets.yaml")))
PARTS = _FILE["parts"]
PRESETS = {name: TrainPreset(**given) for name, given in _FILE["presets"].items()}


def load_config(preset: TrainPreset, overrides: Sequence[str], ranks: Ranks) -> DictConfig:
    """Build the whole config as fairseq's trainer takes it.

    On several ranks a preset of one simulated rank becomes one with as many experts as ranks.
    """
    on_gpu, world_size = ranks.device.type == "cuda", ranks.world_size
    changes = [*preset.changes(), f"common.cpu={str(not on_gpu).lower()}", "common.user_dir=null"]
    changes.append(f"distributed_training.distributed_world_size={world_size}")
    if world_size > 1:
        changes += [
            f"distributed_training.distributed_rank={ranks.rank}",
            f"distributed_training.device_id={ranks.device.index or 0}",
            f"distributed_training.distributed_backend={ranks.backend}",
            "distributed_training.distributed_init_method=env://",
            "model.moe_benchmark=null",
            *[f"model.moe_expert_count={world_size}"][: preset.simulated],
        ]
    overrides = [f"++{change}" for change in (*changes, *overrides)]
    return compose.load_config(ROOT / "configs", "meta_1.1t", overrides)


def config_of(variant: str, config: DictConfig) -> DictConfig:
    """Return the config of one of VARIANTS.

    The FLOP-matched model has dense layers, K times as wide, in place of the MoE layers.
    """
    config = config.copy()
    if variant != "flop-matched":
        return config
    top_k = layer_shape(config).top_k
    for side, option in (("encoder", "alternate_ffn"), ("decoder", "alternate_decoder_ffn")):
        width = config.model.moe_expert_ffn_dim or config.model.get(f"{side}_ffn_embed_dim")
        if f"{option}_embed_dim" in config.model:
            config.model[f"{option}_embed_dim"] = top_k * width
    config.model.moe_benchmark = None
    return config


def layer_shape(config: DictConfig) -> LayerShape:
    """Return the shape of the decoder's MoE layers."""
    model, common = config.model, config.common
    return LayerShape(
        config.dataset.batch_size * config.task.tokens_per_sample,
        model.decoder_embed_dim,
        model.decoder_ffn_embed_dim,
        experts=model.moe_expert_count,
        top_k=1 if model.moe_top1_expert else model.moe_top_k or 2,
        capacity_factor=model.get("moe_capacity_factor") or 1.0,
        dtype="float16" if common.fp16 or common.bf16 else "float32",
    )


def build_model(config: DictConfig):
    """Return (task, model)."""
    utils.set_torch_seed(config.common.seed)
    task = tasks.setup_task(config.task)
    return task, task.build_model(config.model)


class Run:
    """One model in training, one update at a time.

    Args:
        build_on: device that draws the initial weights, the CPU if None. A CPU needs minutes for
            billions of them; only a CPU promises equal ones on several ranks.
    """

    def __init__(self, variant: str, config: DictConfig, build_on: torch.device | None = None):
        config = config_of(variant, config)
        with contextlib.nullcontext() if build_on is None else build_on:
            task, model = build_model(config)
        if variant == "dense":
            for layer in model.moe_layers.values():
                layer.forward = DenseMoE(layer).forward
        self.parameters = sum(p.numel() for p in model.parameters())
        self.trainer = Trainer(config, task, model, task.build_criterion(config.criterion))
        self.trainer.begin_epoch(1)
        if build_on is not None:
            free_memory(build_on)  # of the fp32 weights, which the trainer made half of
        if self.trainer.cuda:  # a peak is of training, not of building
            torch.cuda.reset_peak_memory_stats()

    def update(self, sample: dict[str, Any]) -> dict[str, float]:
        """Run one update, forward pass to optimizer step; return what fairseq logs of it."""
        with metrics.aggregate(new_root=True) as logged:
            self.trainer.train_step([sample], raise_oom=True)  # else it is skipped like an overflow
        return logged.get_smoothed_values()


def random_samples(config: DictConfig, count: int, seed: int) -> list[dict]:
    """Return batches of a language model, or of pairs of sentences, with random tokens.

    dummy_lm's own batches repeat one sequence, whose tokens all choose the same experts at the same
    positions.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, length = config.dataset.batch_size, config.task.tokens_per_sample
    vocabulary = config.task.dict_size + 4  # symbols below 4 are <s>, <pad>, </s> and <unk>

    def draw(*size):
        return torch.randint(4, vocabulary, size, generator=generator)

    def sample():
        tokens = draw(batch, length + 1)
        inputs = {"src_tokens": tokens[:, :-1].contiguous()}
        inputs["src_lengths"] = torch.full((batch,), length)
        if "encoder_layers" in config.model:  # an encoder reads as many others
            inputs["prev_output_tokens"] = inputs["src_tokens"]
            inputs["src_tokens"] = draw(batch, length)
        return {
            "id": torch.arange(batch),
            "nsentences": batch,
            "ntokens": batch * length,
            "net_input": inputs,
            "target": tokens[:, 1:].contiguous(),
        }

    return [sample() for _ in range(count)]
