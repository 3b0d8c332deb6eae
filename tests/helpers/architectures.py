"""Tiny generated data and a command for every model class of fairseq with feed-forward blocks."""

from __future__ import annotations

import logging
import random
import sys
import types
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from fairseq import options, tasks, utils
from fairseq.data import Dictionary, indexed_dataset
from fairseq.trainer import Trainer

from fairseq_tutel.distributed import process_world

from .training import convert

WORDS = [f"w{i}" for i in range(16)]
SENTENCES = 24
COMMON = """
    --cpu --seed 3 --no-save --optimizer sgd --lr 0.05 --clip-norm 0.1 --batch-size 2
    --ddp-backend legacy_ddp --moe-expert-count 4 --moe-second-expert-policy all
    --moe-capacity-factor 0 --moe-gate-loss-wt 0.1 --moe-gate-loss-over unpadded
"""
ENCODER = """
    --encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 24
    --encoder-attention-heads 2
"""
DECODER = """
    --decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 24
    --decoder-attention-heads 2
"""
QUIET = " --dropout 0 --attention-dropout 0 --activation-dropout 0"
PAIR = ENCODER + DECODER + QUIET
SPEECH = " --criterion label_smoothed_cross_entropy --max-tokens 4000"


class Row(NamedTuple):
    """One model class: how it is trained, and which stacks get experts."""

    arch: str
    data: str  # folder of the generated data
    options: str
    stacks: tuple[str, ...] = ("encoder.layers", "decoder.layers")


ROWS = {
    "transformer_lm": Row(
        "transformer_lm_big", "text", "--task language_modeling --criterion cross_entropy "
        "--tokens-per-sample 8" + DECODER + QUIET, ("decoder.layers",)),
    "masked_lm": Row(
        "roberta_base", "text", "--task masked_lm --criterion masked_lm --tokens-per-sample 12"
        + ENCODER + QUIET, ("encoder.sentence_encoder.layers",)),
    "bart": Row(
        "bart_base", "text", "--task denoising --criterion cross_entropy --tokens-per-sample 12 "
        "--mask 0.3 --mask-length span-poisson --replace-length 1 --share-all-embeddings" + PAIR),
    "transformer": Row(
        "transformer_iwslt_de_en", "pairs",
        "--task translation --criterion moe_label_smoothed_cross_entropy" + PAIR),
    "transformer_align": Row(
        "transformer_align", "pairs", "--task translation --criterion cross_entropy" + PAIR),
    **{
        name: Row(
            name, "pairs", "--task translation_lev --criterion nat_loss "
            "--share-all-embeddings --apply-bert-init" + more + PAIR)
        for name, more in {
            "nonautoregressive_transformer": " --noise full_mask "
            "--pred-length-offset --length-loss-factor 0.1",
            "nacrf_transformer": " --noise full_mask --pred-length-offset --length-loss-factor 0.1 "
            "--word-ins-loss-factor 0.5 --crf-lowrank-approx 8 --crf-beam-approx 4",
            "iterative_nonautoregressive_transformer": " --noise full_mask --pred-length-offset "
            "--length-loss-factor 0.1 --train-step 2",
            "cmlm_transformer": " --noise full_mask --length-loss-factor 0.1",
            "levenshtein_transformer": " --noise random_delete",
            "insertion_transformer": " --noise random_delete",
        }.items()
    },
    "s2t_transformer": Row(
        "s2t_transformer_s", "speech", "--task speech_to_text" + SPEECH + PAIR,
        ("encoder.transformer_layers", "decoder.layers")),
}  # fmt: skip


def make_data(folder: Path) -> None:
    """Write all data sets: sentences of 16 words, filter banks, waves."""
    draw = random.Random(1)
    sentences = [draw.choices(WORDS, k=draw.randint(3, 7)) for _ in range(SENTENCES)]
    dictionary = Dictionary()
    for sentence in sentences:
        for word in sentence:
            dictionary.add_symbol(word)
    for name in ("text", "pairs", "speech"):
        (folder / name).mkdir()
        dictionary.save(str(folder / name / "dict.txt"))
    for side in "ab":
        dictionary.save(str(folder / "pairs" / f"dict.{side}.txt"))
        lines = sentences if side == "a" else [line[::-1] for line in sentences]
        for split in ("train", "valid"):
            _write(folder / "pairs" / f"{split}.a-b.{side}", lines, dictionary)
    for split in ("train", "valid"):
        _write(folder / "text" / split, sentences, dictionary)
    _make_speech(folder / "speech", sentences)


def _write(path: Path, lines: list[list[str]], dictionary: Dictionary) -> None:
    builder = indexed_dataset.make_builder(f"{path}.bin", "mmap", len(dictionary))
    for line in lines:
        builder.add_item(dictionary.encode_line(" ".join(line), add_if_not_exist=False).long())
    builder.finalize(f"{path}.idx")


def _make_speech(folder: Path, sentences: list[list[str]]) -> None:
    """Each word is 6 frames of filter banks with one bright channel."""
    (folder / "config.yaml").write_text(
        f"audio_root: {folder}\nvocab_filename: dict.txt\n"
        "input_channels: 1\ninput_feat_per_channel: 16\n"
    )
    rows = ["id\taudio\tn_frames\ttgt_text\tspeaker"]
    for number, words in enumerate(sentences):
        generator = np.random.RandomState(number)
        frames = generator.randn(6 * len(words), 16).astype(np.float32) / 10
        for place, word in enumerate(words):
            frames[6 * place : 6 * place + 6, WORDS.index(word)] += 1
        np.save(folder / f"{number}.npy", frames)
        rows.append(f"{number}\t{number}.npy\t{len(frames)}\t{' '.join(words)}\tone")
    for split in ("train", "valid"):
        (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n")


def stand_in() -> None:
    """Let fairseq read waves by the standard library, and find the numpy of its day.

    It asks for soundfile, and for a name that numpy has had until 1.23.
    """
    vars(np)["float"] = float
    module = types.ModuleType("soundfile")

    def read(file, dtype="float64", **_):
        with wave.open(str(file)) as opened:
            samples = np.frombuffer(opened.readframes(opened.getnframes()), np.int16)
        return samples.astype(dtype) / 2**15, opened.getframerate()

    vars(module)["read"] = read
    sys.modules["soundfile"] = module


def make_trainer(row: Row, folder: str, *more: str) -> Trainer:
    """What fairseq-train builds for a row, with its data loaded. Collective on several ranks."""
    for name in ("fairseq", "fairseq_tutel"):
        logging.getLogger(name).setLevel(logging.ERROR)
    words = [f"{folder}/{row.data}", "--arch", f"{row.arch}_moe", *row.options.split()]
    words += [*COMMON.split(), *more]
    cfg = convert(options.parse_args_and_arch(options.get_training_parser(), input_args=words))
    distributed = cfg.distributed_training
    distributed.distributed_rank, distributed.distributed_world_size = process_world()
    task = tasks.setup_task(cfg.task)
    utils.set_torch_seed(cfg.common.seed)
    model, criterion = task.build_model(cfg.model), task.build_criterion(cfg.criterion)
    task.load_dataset("train")
    trainer = Trainer(cfg, task, model, criterion)
    trainer.begin_epoch(1)
    _seed_each_batch(task)
    return trainer


def _seed_each_batch(task) -> None:
    """Let a batch draw the same masks whichever rank has it."""
    stock = task.train_step

    def train_step(sample, *args, **kwargs):
        _seed_all(sample.pop("seed"))
        return stock(sample, *args, **kwargs)

    task.train_step = train_step


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def batches(trainer: Trainer, updates: int, total: int = 2) -> Iterator[list[dict]]:
    """Yield this rank's batches of every update; ``total`` is of all ranks."""
    dataset = trainer.task.dataset("train")
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(1)
    rank, world_size = process_world()
    share = total // world_size
    for update in range(updates):
        mine = []
        for number in range(update * total + rank * share, update * total + (rank + 1) * share):
            _seed_all(number)
            batch = dataset.collater([dataset[(2 * number + i) % len(dataset)] for i in range(2)])
            mine.append({**batch, "seed": number})
        yield mine
