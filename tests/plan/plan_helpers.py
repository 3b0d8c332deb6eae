"""Models and training steps that the planner's figures are held against."""

import copy
import functools
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from fairseq_tutel.distributed import possible_r
from fairseq_tutel.plan.compose import load_command, load_config
from fairseq_tutel.plan.gpu_memory import count_memory, make_layers
from fairseq_tutel.plan.hardware import load_hardware
from fairseq_tutel.plan.parameters import count_parameters
from fairseq_tutel.plan.settings import read_settings
from fairseq_tutel.plan.work import count_traffic, count_work

CONFIGS = Path(__file__).parents[2] / "configs"
A100 = load_hardware(CONFIGS, "a100-80g")
# meta_1.1t made small, in fp32; dropout masks of the CPU differ from those of a GPU
SMALL = [
    "model.decoder_layers=4", "model.decoder_embed_dim=64", "model.decoder_ffn_embed_dim=256",
    "model.decoder_attention_heads=4", "model.moe_expert_count=8", "task.tokens_per_sample=64",
    "dataset.batch_size=4", "task.dict_size=596", "model.dropout=0.0", "common.fp16=false",
    "common.memory_efficient_fp16=false",
]  # fmt: skip


@functools.cache
def _composed(name):
    return load_config(CONFIGS, name, [])


def settings_of(name="meta_1.1t", overrides=(), **options):
    """Settings of a shipped config, composed once, and changed."""
    config = copy.deepcopy(_composed(name))
    for word in overrides:
        key, _, value = word.partition("=")
        OmegaConf.update(config, key, yaml.safe_load(value))
    return read_settings(config, name, **options)


def small(*overrides, gpus=4):
    """Settings of a small model on simulated ranks."""
    return settings_of(overrides=[*SMALL, *overrides], gpus=gpus)


def pairs(words="", gpus=1, **options):
    """Settings of a small encoder-decoder, as the command line of a plan makes them."""
    base = """fairseq-train --task dummy_mt --dict-size 596 --arch transformer_moe
        --encoder-layers 4 --decoder-layers 4 --encoder-embed-dim 64 --encoder-ffn-embed-dim 256
        --encoder-attention-heads 4 --decoder-attention-heads 4 --moe-expert-count 8 --dropout 0
        --encoder-normalize-before --decoder-normalize-before --share-all-embeddings
        --criterion moe_label_smoothed_cross_entropy --optimizer adam --batch-size 4 """
    name, config = load_command((base + words).split())
    return read_settings(config, name, gpus=gpus, **{"sentence": 32, **options})


def possible_r_of(settings):
    """Every r of the settings' placement, the least change first."""
    none, *some = possible_r(count_parameters(settings).groups)
    return [*some, none]


def memory_of(settings, parameters=None):
    """Memory of one GPU of a run."""
    parameters = parameters or count_parameters(settings)
    stack = make_layers(settings, parameters, count_traffic(settings, parameters))
    return count_memory(settings, parameters, stack)


def work_of(settings, parameters=None):
    """Operations and traffic of a run."""
    parameters = parameters or count_parameters(settings)
    return count_work(settings, parameters, count_traffic(settings, parameters))
