"""Stand-ins for tasks and trained models, to build a model on the meta device without data."""

import argparse
import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import models
from fairseq.data.legacy.masked_lm_dictionary import MaskedLMDictionary
from fairseq.tasks.multilingual_translation import MultilingualTranslationTask
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError
from torch.overrides import TorchFunctionMode

# options that come from a task or a command
OPTIONS = {
    "max_source_positions": 512, "max_target_positions": 512, "max_positions": 512,
    "tokens_per_sample": 512, "input_feat_per_channel": 80, "input_channels": 1,
    "n_frames_per_step": 1, "target_speaker_embed": False,
    "lang_pairs": ["a-b"], "encoder_langtok": None, "decoder_langtok": False, "cpu": True,
    "criterion": "cross_entropy", "normalize": False, "speaker_to_id": None, "seed": 1,
    "w2v_path": None, "autoregressive": True, "pitch_min": 0, "pitch_max": 1, "energy_min": 0,
    "energy_max": 1, "fp16": False, "model_parallel_size": 1, "discrete_duration": True,
    "discrete_f0": True, "ignore_duration_input": False, "ignore_f0_input": False,
    "data": "", "load_ema": False, "freeze_regex": None, "main_and_cross_weights": "1,0",
}  # fmt: skip
_UNKNOWN = (None, False, 1, 1.0, "")  # an option of the task, which may have any type


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Build models of fairseq on the meta device inside the block."""
    with torch.device("meta"), _StayOnMeta():
        yield


class _StayOnMeta(TorchFunctionMode):
    """Leave out the copies to the CPU that fairseq's initial draws make."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.cpu, torch.Tensor.to) and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def trained_config(name: str) -> Any:
    """Return the config of a trained model of audio, with default sizes."""
    kind = "hubert" if name == "hubert" else "audio"
    task = {"_name": f"{kind}_pretraining", "data": "", "normalize": False}
    if kind == "hubert":
        task["labels"] = []
    model = config_of(models.MODEL_DATACLASS_REGISTRY[name], {"_name": name})
    return OmegaConf.create({"model": model, "task": task})


def config_of(schema: type, given: dict[str, Any]) -> Any:
    """Return a config of a dataclass; what a task would give is taken from ``OPTIONS``."""
    cfg: Any = OmegaConf.structured(schema())
    for name in list(cfg):
        if name in given:
            cfg[name] = given[name]
        elif OmegaConf.is_missing(cfg, name):
            cfg[name] = ""
        elif OmegaConf.is_interpolation(cfg, name):
            for value in (OPTIONS.get(name), *_UNKNOWN):
                try:
                    cfg[name] = value
                    break
                except ValidationError:  # another type
                    continue
    return cfg


class _PairsTask(SimpleNamespace, MultilingualTranslationTask):
    """Stand-in for a class that trains several pairs of languages, and asks for this task."""


def stand_in_task(arch: str, words: Any = None) -> Any:
    """Return a stand-in for a task, with the attributes that models of an architecture read.

    ``words`` is its dictionary (default None: one of special symbols alone).
    """
    two_passes = any(each in arch for each in ("unity", "translatotron", "spect2", "_t2"))
    words = MaskedLMDictionary() if words is None else words
    channels = {"a": words, "b": words}
    names = (
        *("source_dictionary", "target_dictionary", "dictionary", "output_dictionary"),
        *("src_dict", "tgt_dict", "target_dictionary_mt"),
        *("source_duration_dictionary", "target_duration_dictionary"),
        *("source_f0_dictionary", "target_f0_dictionary"),
    )
    of_speech = {"sample_rate": 16000, "label_rate": 50.0, "fine_tuning": False}
    args = SimpleNamespace(**OPTIONS, **of_speech, target_is_code="spect" not in arch)
    decoder = SimpleNamespace(
        is_first_pass_decoder=True,
        target_dictionary=words,
        args=SimpleNamespace(
            decoder_type="transformer", input_from="encoder", input_layer=-1,
            decoder_args=argparse.Namespace(),
        ),
    )  # fmt: skip
    kind = _PairsTask if "multilingual" in arch else SimpleNamespace
    return kind(
        **dict.fromkeys(names, words),
        dictionaries=[words],
        dicts=channels,
        output_dicts=channels,
        source_dictionaries=channels,
        target_dictionaries=channels,
        langs=["a", "b"],
        lang_pairs=["a-b"],
        model_lang_pairs=["a-b"],
        channels=["a", "b"],
        targets=["next"],
        channel_sizes=[len(words), 1, 1],
        channel_names=["token", "duration", "f0"],
        state_dict=dict,
        multitask_tasks={"text": decoder} if two_passes else {},
        speaker_to_id=None,
        get_speaker_embeddings=lambda args: None,
        args=args,
        cfg=args,
    )
