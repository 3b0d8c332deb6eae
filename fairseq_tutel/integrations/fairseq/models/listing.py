"""List the names of ``--arch`` with experts, for ``python -m fairseq_tutel architectures``.

One model of each class is built on the meta device, without data, with a stand-in for the task and
for trained models (``--w2v-path``). A class that needs a library is listed with what it asks for.
"""

import argparse
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import models
from fairseq.data.legacy.masked_lm_dictionary import MaskedLMDictionary
from fairseq.tasks.multilingual_translation import MultilingualTranslationTask
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
    "data": "", "load_ema": False, "freeze_regex": None, "main_and_cross_weights": "1,0",
}  # fmt: skip
# model classes that test_architectures_on_ranks.py trains on two ranks as on one
TRAINED = frozenset(
    """bart cmlm_transformer convtransformer hubert hubert_seq2seq insertion_transformer
    iterative_nonautoregressive_transformer levenshtein_transformer masked_lm
    multilingual_transformer nacrf_transformer nonautoregressive_transformer roberta roberta_enc_dec
    s2spect_conformer s2spect_transformer s2t_conformer s2t_transformer s2ut_conformer
    s2ut_transformer speech_dlm transformer transformer_align transformer_lm transformer_ulm
    tts_transformer wav2vec2 wav2vec2_laser wav2vec_classification wav2vec_ctc wav2vec_seq2seq
    xm_transformer xmod""".split()  # noqa: SIM905
)
_UNKNOWN = (None, False, 1, 1.0, "")  # an option of the task, which may have any type


def listing(word: str = "") -> str:
    """Return a row for each model class whose name, or one of whose architectures, has the word."""
    classes: dict[str, list[str]] = {}
    for arch, kind in models.ARCH_MODEL_REGISTRY.items():
        ours = any(row.model is kind for row in ARCHITECTURES.values())
        if not ours and not issubclass(kind, WithExperts):
            classes.setdefault(models.ARCH_MODEL_NAME_REGISTRY[arch], []).append(arch)
    rows = ["| names | model class | verdict | layers that can get experts |", "|---|---|---|---|"]
    for name, archs in classes.items():
        if any(word in each for each in (name, *archs)):
            names = ", ".join(f"`{arch}{ENDING}`" for arch in archs)
            verdict, layers = _verdict(archs)
            verdict = "trains" if name in TRAINED else verdict
            rows.append(f"| {names} | {name} | {verdict} | {layers} |")
    return "\n".join(rows) + "\n"


def _verdict(archs: list[str]) -> tuple[str, str]:
    """Return whether a class has layers for experts, and its stacks, or why there are none."""
    arch = min(archs, key=len)
    try:
        model = _built(arch)
    except (Exception, SystemExit) as error:
        text = str(error).strip().partition("\n")[0][:100] or type(error).__name__
        return "not looked at", f"{arch} needs more than its options ({text})"
    stacks: dict[str, set[int]] = {}
    for name in layers_with_ffn(model):
        stack, number = stack_of(name)
        stacks.setdefault(stack, set()).add(number)
    found = [f"{stack} ({len(numbers)})" for stack, numbers in stacks.items()]
    if not found:
        return "refused", "it has no layer whose feed-forward block is known"
    return "layers", ", ".join(found)


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
    two_passes = any(each in arch for each in ("unity", "translatotron", "spect2", "_t2"))
    task = _task("multilingual" in arch, two_passes, target_is_code="spect" not in arch)
    cfg = args if schema is None else _config(schema, {"pooling": "mean", **vars(args)})
    if "w2v_path" in cfg:  # it holds one that is trained
        cfg.w2v_args = _trained("hubert" if "hubert" in arch else "wav2vec2")
    with torch.device("meta"), _StayOnMeta():
        return kind.build_model(cfg, task)


def _trained(name: str) -> Any:
    """Return the config of a trained model of audio, with default sizes."""
    kind = "hubert" if name == "hubert" else "audio"
    task = {"_name": f"{kind}_pretraining", "data": "", "normalize": False}
    if kind == "hubert":
        task["labels"] = []
    model = _config(models.MODEL_DATACLASS_REGISTRY[name], {"_name": name})
    return OmegaConf.create({"model": model, "task": task})


def _config(schema: type, given: dict[str, Any]) -> Any:
    cfg: Any = OmegaConf.structured(schema())
    for name in list(cfg):
        if name in given:
            cfg[name] = given[name]
        elif OmegaConf.is_missing(cfg, name):
            cfg[name] = ""
        elif OmegaConf.is_interpolation(cfg, name):
            for value in (_OPTIONS.get(name), *_UNKNOWN):
                try:
                    cfg[name] = value
                    break
                except ValidationError:  # another type
                    continue
    return cfg


class _PairsTask(SimpleNamespace, MultilingualTranslationTask):
    """Stand-in for a class that trains several pairs of languages, and asks for this task."""


def _task(of_pairs: bool, two_passes: bool, **options: Any) -> Any:
    """Return a stand-in with the attributes that models read."""
    words = MaskedLMDictionary()
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
    decoder = SimpleNamespace(
        is_first_pass_decoder=True,
        target_dictionary=words,
        args=SimpleNamespace(
            decoder_type="transformer", input_from="encoder", input_layer=-1,
            decoder_args=argparse.Namespace(),
        ),
    )  # fmt: skip
    kind = _PairsTask if of_pairs else SimpleNamespace
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
