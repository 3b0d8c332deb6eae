"""Models and training steps that the planner's figures are held against."""

from pathlib import Path
from types import SimpleNamespace

import torch
from omegaconf import OmegaConf

from fairseq_tutel.criterions.moe_cross_entropy import MoECrossEntropyCriterion
from fairseq_tutel.plan import load_config, read_settings

CONFIGS = Path(__file__).parents[2] / "configs"
# meta_1.1t made small, in fp32; dropout masks of the CPU differ from those of a GPU
SMALL = [
    "model.decoder_layers=4", "model.decoder_embed_dim=64", "model.decoder_ffn_embed_dim=256",
    "model.decoder_attention_heads=4", "model.moe_expert_count=8", "task.tokens_per_sample=64",
    "dataset.batch_size=4", "task.dict_size=596", "model.dropout=0.0", "common.fp16=false",
    "common.memory_efficient_fp16=false",
]  # fmt: skip


def settings_of(name="meta_1.1t", overrides=(), **options):
    """Settings of a shipped config."""
    return read_settings(load_config(CONFIGS, name, overrides), name, **options)


def small(*overrides, gpus=4):
    """Settings of a small model on simulated ranks."""
    # ++: whether the config file states it or not
    forced = [f"++{o}" if o.startswith("model.") else o for o in overrides]
    return settings_of(overrides=[*SMALL, *forced], gpus=gpus)


def training_loss(settings, model):
    """A function that runs the model and criterion once and returns the loss."""
    task = SimpleNamespace(
        target_dictionary=model.decoder.dictionary, source_dictionary=model.decoder.dictionary
    )
    criterion = MoECrossEntropyCriterion(task, sentence_avg=False)
    shape = (settings.batch_size, settings.tokens_per_sample)
    tokens = torch.randint(4, settings.vocabulary, shape)
    lengths = torch.full(shape[:1], shape[1])
    sample = {
        "net_input": {"src_tokens": tokens, "src_lengths": lengths},
        "target": tokens,
        "ntokens": tokens.numel(),
    }
    return lambda: criterion(model, sample)[0]


def shipped_configs():
    """Names of the shipped configs of MoE models."""
    found = []
    for path in sorted(CONFIGS.glob("*.yaml")):
        if OmegaConf.select(OmegaConf.load(path), "model._name") == "transformer_lm_gpt_moe":
            found.append(path.stem)
    return found
