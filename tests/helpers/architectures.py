"""Tiny generated data and a command for every model class of fairseq with feed-forward blocks."""

from __future__ import annotations

import copy
import json
import logging
import random
import sys
import types
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from fairseq import criterions, models, options, tasks, utils
from fairseq.criterions import FairseqCriterion
from fairseq.data import Dictionary, indexed_dataset
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from omegaconf import DictConfig

import fairseq_tutel
from fairseq_tutel.distributed import process_world

from .architecture_rows import ROWS, Row
from .training import convert

WORDS = [f"w{i}" for i in range(16)]
SENTENCES = 24
COMMON = """
    --cpu --seed 3 --no-save --optimizer sgd --lr 0.05 --clip-norm 0.1 --batch-size 2
    --ddp-backend legacy_ddp
"""
SPARSE = """
    --moe-expert-count 4 --moe-second-expert-policy all --moe-capacity-factor 0
    --moe-gate-loss-wt 0.1 --moe-gate-loss-over unpadded
"""


def make_data(folder: Path) -> None:
    """Write all data sets: sentences of 16 words, filter banks, waves."""
    draw = random.Random(1)
    sentences = [draw.choices(WORDS, k=draw.randint(3, 7)) for _ in range(SENTENCES)]
    backwards = [words[::-1] for words in sentences]
    dictionary, labels = _dictionary(WORDS), _dictionary("01")
    _write_split(folder / "text", "", sentences, dictionary)
    _write_split(folder / "languages" / "en_XX", "", sentences, dictionary)
    dictionary.save(str(folder / "languages" / "dict.txt"))
    for side, lines in (("a", sentences), ("b", backwards)):
        _write_split(folder / "pairs", f".a-b.{side}", lines, dictionary)
        _write_split(folder / "channels", f".{side}", lines, dictionary)
        for each in ("pairs", "channels"):
            dictionary.save(str(folder / each / f"dict.{side}.txt"))
    _write_split(folder / "labelled" / "input0", "", sentences, dictionary)
    kinds = [[str(number % 2)] for number in range(SENTENCES)]
    _write_split(folder / "labelled" / "label", "", kinds, labels, append_eos=False)
    _make_speech(folder, sentences, dictionary)
    _make_waves(folder / "waves", sentences, dictionary)
    _make_codes(folder / "codes", sentences)
    _make_pretrained(folder)


def _dictionary(words) -> Dictionary:
    found = Dictionary()
    for word in words:
        found.add_symbol(word)
    return found


def _write_split(folder: Path, ending: str, lines, dictionary: Dictionary, **how) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    dictionary.save(str(folder / "dict.txt"))
    for split in ("train", "valid"):
        path = folder / f"{split}{ending}"
        builder = indexed_dataset.make_builder(f"{path}.bin", "mmap", len(dictionary))
        for line in lines:
            ids = dictionary.encode_line(" ".join(line), add_if_not_exist=False, **how)
            builder.add_item(ids.long())
        builder.finalize(f"{path}.idx")


def _make_speech(folder: Path, sentences: list[list[str]], dictionary: Dictionary) -> None:
    """Each word is 6 frames of filter banks with one bright channel, or 10 ms of a tone."""
    banks = folder / "banks"
    banks.mkdir()
    lengths = []
    for number, words in enumerate(sentences):
        frames = np.random.RandomState(number).randn(6 * len(words), 16).astype(np.float32) / 10
        for place, word in enumerate(words):
            frames[6 * place : 6 * place + 6, WORDS.index(word)] += 1
        np.save(banks / f"{number}.npy", frames)
        lengths.append(len(frames))
    texts = [" ".join(words) for words in sentences]
    codes = [" ".join(str(WORDS.index(word)) for word in words) for words in sentences]
    counts = [len(words) for words in sentences]
    names = [f"{number}.npy" for number in range(SENTENCES)]
    waves = [f"../waves/{number}.wav" for number in range(SENTENCES)]
    banked = {"audio": names, "n_frames": lengths, "tgt_text": texts}
    banked["speaker"] = ["one"] * SENTENCES
    pairs = {"src_audio": names, "src_n_frames": lengths}
    tables = {
        "speech": banked,
        "voices": {**banked, "src_text": texts},
        "units": {**pairs, "tgt_audio": codes, "tgt_n_frames": counts},
        "spectra": {**pairs, "tgt_audio": names, "tgt_n_frames": lengths},
        "sound": {**banked, "audio": waves, "n_frames": [160 * count for count in counts]},
    }
    for name, columns in tables.items():
        _write_table(folder / name, columns, banks, dictionary, use_audio=name == "sound")


def _write_table(folder: Path, columns: dict, banks: Path, dictionary, use_audio: bool) -> None:
    folder.mkdir()
    dictionary.save(str(folder / "dict.txt"))
    settings = {
        "audio_root": str(banks), "vocab_filename": "dict.txt", "input_channels": 1,
        "input_feat_per_channel": 16, "use_audio_input": str(use_audio).lower(),
    }  # fmt: skip
    settings["features"] = "{win_len_t: 0.025, hop_len_t: 0.01, sample_rate: 16000}"
    (folder / "config.yaml").write_text("".join(f"{k}: {v}\n" for k, v in settings.items()))
    columns = {"id": list(range(SENTENCES)), **columns}
    rows = [columns, *zip(*columns.values(), strict=True)]
    _write_lines(folder, "tsv", ["\t".join(map(str, row)) for row in rows])


def _write_lines(folder: Path, ending: str, lines: list[str]) -> None:
    for split in ("train", "valid"):
        (folder / f"{split}.{ending}").write_text("\n".join(lines) + "\n")


def _make_waves(folder: Path, sentences: list[list[str]], dictionary: Dictionary) -> None:
    folder.mkdir()
    rows = [str(folder)]
    for number, words in enumerate(sentences):
        time = np.arange(160)
        tones = [np.sin(time * (1 + WORDS.index(word)) / 10) for word in words]
        samples = (np.concatenate(tones) * 2**13).astype(np.int16)
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, len(samples), "NONE", ""))
            file.writeframes(samples.tobytes())
        rows.append(f"{number}.wav\t{len(samples)}")
    texts = {
        "ltr": [" ".join(words[:3]) for words in sentences],
        "km": [" ".join(word for word in words for _ in range(8)) for words in sentences],
        "lang": [words[0] for words in sentences],
    }
    _write_lines(folder, "tsv", rows)
    for ending, lines in texts.items():
        _write_lines(folder, ending, lines)
        dictionary.save(str(folder / f"dict.{ending}.txt"))


def _make_codes(folder: Path, sentences: list[list[str]]) -> None:
    """Units of speech, with their durations and pitches."""
    folder.mkdir()
    manifest = folder / "train"
    codes = np.array([WORDS.index(word) for words in sentences for word in words])
    for ending, values in (("code", codes), ("dur", 1 + codes % 3), ("pitch", codes % 4)):
        np.save(f"{manifest}.{ending}.npy", values)
    counts = "".join(f"{len(words)}\n" for words in sentences)
    Path(f"{manifest}.leng.txt").write_text(counts)
    Path(f"{manifest}.path.txt").write_text(counts)
    settings = {
        "manifests": {"train": str(manifest)}, "n_units": 16, "f0_vq_n_units": 4,
        "code_hop_size": 320, "sampling_rate": 16000, "f0_vq_type": "precomp",
        "f0_vq_name": "pitch", "multispkr": None, "f0_stats": None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))


def _make_pretrained(folder: Path) -> None:
    """Dense models for the rows that begin with one."""
    for name in ("wav2vec2", "hubert"):
        trainer = make_trainer(ROWS[name], str(folder), "--optimizer", "adam", dense=True)
        position = {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}, "val_loss": None}
        trainer.consolidate_optimizer()
        trainer.save_checkpoint(str(folder / f"{name}.pt"), position)


def add_names() -> None:
    """Register what a user dir might: small sizes where there are no options, and a criterion."""
    if "roberta_enc_dec_tiny" in models.ARCH_MODEL_REGISTRY:
        return
    each = {"layers": 2, "embed_dim": 16, "ffn_embed_dim": 24, "attention_heads": 2}
    sizes = {f"{side}_{n}": v for side in ("encoder", "decoder") for n, v in each.items()}
    sizes |= {"dropout": 0.0, "attention_dropout": 0.0, "max_positions": 64}
    sizes |= {"max_source_positions": 64, "max_target_positions": 64}
    more = {
        "roberta_enc_dec": sizes,
        # stock has no such options, and its wav2vec encoder reads them
        "xm_transformer": {"load_ema": False, "freeze_regex": None, "encoder_embed_dim": 16},
    }
    for name, values in more.items():
        defaults = models.ARCH_CONFIG_REGISTRY[name]

        def tiny(args, values=values, defaults=defaults):
            vars(args).update(values)
            defaults(args)

        models.register_model_architecture(name, f"{name}_tiny")(tiny)
    criterions.register_criterion("squared_output")(SquaredOutput)
    fairseq_tutel.register()


class SquaredOutput(FairseqCriterion):
    """Loss of models whose criterion is not a part of fairseq."""

    def __init__(self, task):
        torch.nn.Module.__init__(self)
        self.task = task

    def forward(self, model, sample, reduce=True):
        output = model(**sample["net_input"])
        output = output["encoder_out"] if isinstance(output, dict) else output
        output = output[0] if isinstance(output, tuple) else output
        loss, size = output.float().square().mean() * 2, 2
        log = {"loss": loss.data, "ntokens": size, "nsentences": size, "sample_size": size}
        return loss, size, log

    @staticmethod
    def reduce_metrics(logging_outputs):
        metrics.log_scalar("loss", sum(float(log["loss"]) for log in logging_outputs))

    @staticmethod
    def logging_outputs_can_be_summed():
        return False


_STOCK_RNG = np.random.default_rng  # by which wav2vec and HuBERT draw masks


def _seeded_rng(seed=None):
    return _STOCK_RNG(np.random.randint(2**31) if seed is None else seed)


def _read_wave(file, dtype="float64", always_2d=False, **_):
    with wave.open(str(file)) as opened:
        samples = np.frombuffer(opened.readframes(opened.getnframes()), np.int16)
    samples = samples.astype(dtype) / 2**15
    return samples[:, None] if always_2d else samples, opened.getframerate()


def stand_in() -> None:
    """Let fairseq read waves by the standard library, find the numpy of its day, and draw by seed.

    It asks for soundfile, for torchaudio without a use for it, and for an old name in numpy.
    """
    vars(np)["float"] = float
    np.random.default_rng = _seeded_rng
    sys.modules["soundfile"] = types.ModuleType("soundfile")
    vars(sys.modules["soundfile"])["read"] = _read_wave
    for name in ("torchaudio", "torchaudio.sox_effects"):
        sys.modules.setdefault(name, types.ModuleType(name))


def take_back() -> None:
    """Forget the modules of :func:`stand_in`, of which other tests ask whether they are there."""
    for name in ("soundfile", "torchaudio", "torchaudio.sox_effects"):
        sys.modules.pop(name, None)


def make_trainer(row: Row, folder: str, *more: str, dense: bool = False) -> Trainer:
    """What fairseq-train builds for a row, with its data loaded. Collective on several ranks."""
    return trainer_of(make_config(row, folder, *more, dense=dense))


def make_config(row: Row, folder: str, *more: str, dense: bool = False) -> DictConfig:
    """fairseq's config for a row, with experts or ``dense``."""
    add_names()
    words = [f"{folder}/{row.data}", *row.options.format(folder=folder).split(), *COMMON.split()]
    words += ["--arch", row.arch] if dense else ["--arch", f"{row.arch}_moe", *SPARSE.split()]
    words += more
    cfg = convert(options.parse_args_and_arch(options.get_training_parser(), input_args=words))
    return copy.deepcopy(cfg)  # Hydra's store gives the namespace of a legacy model to the next one


def trainer_of(cfg: DictConfig) -> Trainer:
    """What fairseq-train builds before its loop."""
    for name in ("fairseq", "fairseq_tutel"):
        logging.getLogger(name).setLevel(logging.ERROR)
    add_names()
    stand_in()
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
    _seed_all(0)
    dataset.ordered_indices()  # some datasets draw them
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
