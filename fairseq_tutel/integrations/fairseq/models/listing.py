"""List the names of ``--arch`` with experts, for ``python -m fairseq_tutel architectures``.

One model of each class is built on the meta device, without data, with a stand-in for the task. A
class that needs files (a trained model, a library) is listed with what it asks for.
"""

import argparse
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import models
from fairseq.data import Dictionary
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError
from torch.overrides import TorchFunctionMode

from ....moe import layers_with_ffn
from .any_architecture import ENDING, WithExperts, stack_of
from .architectures import ARCHITECTURES

# options that come from a task or a command
_OPTIONS = {
    "max_source_positions": 512, "max_target_positions": 512, "max_positions": 512,
    "tokens_per_sample": 512, "input_feat_per_channel": 80, "input_channels": 1,
    "n_frames_per_step": 1, "target_speaker_embed": False,
    "lang_pairs": ["a-b"], "encoder_langtok": None, "decoder_langtok": False, "cpu": True,
    "criterion": "cross_entropy", "normalize": False, "speaker_to_id": None, "seed": 1,
    "w2v_path": None, "autoregressive": True, "pitch_min": 0, "pitch_max": 1, "energy_min": 0,
    "energy_max": 1, "fp16": False, "model_parallel_size": 1, "discrete_duration": True,
    "discrete_f0": True, "ignore_duration_input": False, "ignore_f0_input": False,
}  # fmt: skip
_UNKNOWN = (None, False, 1, 1.0, "")  # an option of the task, which may have any type


def listing(word: str = "") -> str:
    """Return a row for each model class whose name, or one of whose architectures, has the word."""
    classes: dict[str, list[str]] = {}
    for arch, kind in models.ARCH_MODEL_REGISTRY.items():
        ours = any(row.model is kind for row in ARCHITECTURES.values())
        if not ours and not issubclass(kind, WithExperts):
            classes.setdefault(models.ARCH_MODEL_NAME_REGISTRY[arch], []).append(arch)
    rows = ["| names | model class | layers that can get experts |", "|---|---|---|"]
    for name, archs in classes.items():
        if any(word in each for each in (name, *archs)):
            names = ", ".join(f"`{arch}{ENDING}`" for arch in archs)
            rows.append(f"| {names} | {name} | {_verdict(archs)} |")
    return "\n".join(rows) + "\n"


def _verdict(archs: list[str]) -> str:
    """Return the stacks of a class, or why there are none."""
    arch = min(archs, key=len)
    try:
        model = _built(arch)
    except (Exception, SystemExit) as error:
        text = str(error).strip().partition("\n")[0][:100] or type(error).__name__
        return f"not looked at: {arch} needs more than its options ({text})"
    stacks: dict[str, set[int]] = {}
    for name in layers_with_ffn(model):
        stack, number = stack_of(name)
        stacks.setdefault(stack, set()).add(number)
    found = [f"{stack} ({len(numbers)})" for stack, numbers in stacks.items()]
    return ", ".join(found) or "refused: it has no layer whose feed-forward block is known"


class _StayOnMeta(TorchFunctionMode):
    """Leave out the copies to the CPU that fairseq's initial draws make."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.cpu, torch.Tensor.to) and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def _built(arch: str) -> Any:
    """Build a model on the meta device with its architecture's defaults."""
    kind = models.ARCH_MODEL_REGISTRY[arch]
    schema = getattr(kind, "__dataclass", None)
    args = argparse.Namespace()
    if schema is None:
        parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
        kind.add_args(parser)
        args = parser.parse_args([], argparse.Namespace(**_OPTIONS))
    models.ARCH_CONFIG_REGISTRY[arch](args)
    task = _task(target_is_code="spect" not in arch)
    with torch.device("meta"), _StayOnMeta():
        return kind.build_model(args if schema is None else _config(schema, vars(args)), task)


def _config(schema: type, given: dict[str, Any]) -> Any:
    cfg: Any = OmegaConf.structured(schema())
    for name in list(cfg):
        if name in given:
            cfg[name] = given[name]
        elif OmegaConf.is_interpolation(cfg, name):
            for value in (_OPTIONS.get(name), *_UNKNOWN):
                try:
                    cfg[name] = value
                    break
                except ValidationError:  # another type
                    continue
    return cfg


def _task(**options: Any) -> Any:
    """Return a stand-in with the attributes that models read."""
    words = Dictionary()
    channels = {"a": words, "b": words}
    names = (
        *("source_dictionary", "target_dictionary", "dictionary", "output_dictionary"),
        *("src_dict", "tgt_dict", "target_dictionary_mt"),
        *(
            f"{side}_{kind}_dictionary"
            for side in ("source", "target")
            for kind in ("duration", "f0")
        ),
    )
    of_speech = {"sample_rate": 16000, "label_rate": 50.0, "fine_tuning": False}
    args = SimpleNamespace(**_OPTIONS, **of_speech, **options)
    return SimpleNamespace(
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
        multitask_tasks={},
        speaker_to_id=None,
        get_speaker_embeddings=lambda args: None,
        args=args,
        cfg=args,
    )
