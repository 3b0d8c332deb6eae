"""List the names of ``--arch`` with experts, for ``python -m fairseq_tutel architectures``.

One model of each class is built on the meta device, without data, with a stand-in for the task and
for trained models (``--w2v-path``). A class that needs a library is listed with what it asks for.
"""

import argparse
from typing import Any

from fairseq import models

from ....moe import layers_with_ffn
from .any_architecture import ENDING, WithExperts, stack_of
from .architectures import ARCHITECTURES
from .stand_ins import OPTIONS, config_of, on_meta, stand_in_task, trained_config

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


def listing(word: str = "") -> str:
    """Return a row for each model class whose name, or one of whose architectures, has the word."""
    classes: dict[str, list[str]] = {}
    for arch, kind in models.ARCH_MODEL_REGISTRY.items():
        ours = any(row.model is kind for row in ARCHITECTURES.values())
        if not ours and not issubclass(kind, WithExperts):
            classes.setdefault(models.ARCH_MODEL_NAME_REGISTRY[arch], []).append(arch)
    rows = ["| names | model class | verdict | layers that can get experts |", "|---|---|---|---|"]
    for name, archs in classes.items():
        if any(word in f"{each}{ENDING}" for each in (name, *archs)):
            names = ", ".join(f"`{arch}{ENDING}`" for arch in archs)
            verdict, layers = _verdict(archs)
            verdict = "trains" if name in TRAINED else verdict
            rows.append(f"| {names} | {name} | {verdict} | {layers} |")
    return "\n".join(rows) + "\n" if len(rows) > 2 else ""


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


def _built(arch: str) -> Any:
    """Build a model on the meta device with its architecture's defaults."""
    kind = models.ARCH_MODEL_REGISTRY[arch]
    schema = getattr(kind, "__dataclass", None)
    args = argparse.Namespace()
    if schema is None:
        parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
        kind.add_args(parser)
        args = parser.parse_args([], argparse.Namespace(**OPTIONS))
    models.ARCH_CONFIG_REGISTRY[arch](args)
    cfg = args if schema is None else config_of(schema, {"pooling": "mean", **vars(args)})
    if "w2v_path" in cfg:  # it holds one that is trained
        cfg.w2v_args = trained_config("hubert" if "hubert" in arch else "wav2vec2")
    with on_meta():
        return kind.build_model(cfg, stand_in_task(arch))
