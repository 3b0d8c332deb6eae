"""The fairseq commands of the quickstart and the sizes in them."""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from fairseq_tutel import moe
from fairseq_tutel.config import MoEConfig

# Sized for two CPU cores: about 3 minutes of training in fp32.
UPDATES = 320
WARMUP_UPDATES = 30
TOKENS_PER_SAMPLE = 128
SAMPLES_PER_UPDATE = 16
EXPERTS = 8
TOP_K = 2
PLUGIN = "--user-dir fairseq_tutel --task language_modeling"
# fairseq's default, 8, leaves out the last batch of an epoch when its size is no multiple of 8.
BATCH_MULTIPLE = "--required-batch-size-multiple 1"
# only updates count: a small text has many epochs
TRAIN = f"""
    {PLUGIN} --arch transformer_lm_gpt_moe
    --decoder-layers 4 --decoder-attention-heads 4
    --decoder-embed-dim 256 --decoder-ffn-embed-dim 1024 --dropout 0.0 --attention-dropout 0.0
    --moe-freq 2 --moe-top-k {TOP_K} --moe-second-expert-policy all --moe-expert-count {{experts}}
    --criterion moe_cross_entropy --moe-gate-loss-wt 0.05 --moe-gate-loss-combine-method sum
    --tokens-per-sample {TOKENS_PER_SAMPLE} --batch-size {{samples}} {BATCH_MULTIPLE}
    --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0
    --lr 0.002 --lr-scheduler cosine --warmup-updates {{warmup}} --warmup-init-lr 0
    --lr-period-updates {{period}} --max-update {{stop_at}}
    --validate-interval-updates {{validate_every}} --validate-interval 1000000
    --save-interval 1000000 --save-dir {{checkpoints}} --no-epoch-checkpoints
    --moe-load-log-interval 5 --log-format simple --log-interval 5 --num-workers 0 --seed 1
"""
SAMPLING = """
    --sampling --sampling-topk 20 --temperature 0.7 --beam 1
    --max-len-a 0 --max-len-b 60 --min-len 20 --seed 3
"""


@dataclass(frozen=True)
class Machine:
    """What the training runs on: ``ranks`` processes on ``kind`` (``gpu`` or ``cpu``)."""

    kind: str
    ranks: int

    @property
    def experts(self) -> int:
        """Experts per layer: 8, or as many more as it takes for every rank to hold equally many."""
        return -(-max(EXPERTS, self.ranks) // self.ranks) * self.ranks

    @property
    def samples_per_rank(self) -> int:
        """Batch size of a rank, so that an update sees about the same tokens everywhere."""
        return max(1, SAMPLES_PER_UPDATE // self.ranks)

    @staticmethod
    def detect() -> "Machine":
        """All GPUs, or 2 ranks on the CPU."""
        gpus = torch.cuda.device_count()
        return Machine("gpu", gpus) if gpus else Machine("cpu", 2)


@dataclass(frozen=True)
class Folder:
    """Where the files of a run are."""

    root: Path

    @property
    def text(self) -> Path:
        """The corpus as text."""
        return self.root / "corpus"

    @property
    def pieces(self) -> Path:
        """The corpus in sentencepiece's pieces."""
        return self.root / "pieces"

    @property
    def tokenizer(self) -> Path:
        """The sentencepiece model."""
        return self.root / "tokenizer" / "sentencepiece.model"

    @property
    def data(self) -> Path:
        """fairseq's binarised data."""
        return self.root / "data"

    @property
    def checkpoints(self) -> Path:
        """The checkpoint set and the loads of the experts."""
        return self.root / "checkpoints"

    @property
    def expert_load(self) -> Path:
        """Written by ``--moe-load-log-interval``."""
        return self.checkpoints / "expert_load.jsonl"

    def log(self, step: str) -> Path:
        """All output of a step's commands."""
        return self.root / "logs" / f"{step}.log"


def independent_utilisation(machine: Machine) -> dict[str, float]:
    """What a router that spreads the tokens evenly, but one by one, reaches with these sizes."""
    tokens = machine.samples_per_rank * TOKENS_PER_SAMPLE
    config = MoEConfig(machine.experts, top_k=TOP_K)
    used = moe.independent_utilisation(
        tokens,
        num_experts=machine.experts,
        top_k=config.top_k,
        num_ranks=machine.ranks,
        capacity=config.capacity(tokens, training=True),
    )
    values = (round(value.item(), 1) for value in used)
    return dict(zip(moe.UTILISATION_NAMES, values, strict=True))


def _tool(name: str) -> str:
    """A console script of the environment that runs this."""
    return str(Path(sys.executable).with_name(name))


def _words(template: str, **values: object) -> list[str]:
    """The words of a command; a name in braces stands for one word, whatever is in it."""
    return [word.format(**values) for word in shlex.split(template)]


def preprocess(folder: Folder) -> list[str]:
    """Binarise the pieces; the dictionary is made from the training side."""
    return _words(
        """{tool} --only-source --trainpref {pieces}/train.txt --validpref {pieces}/valid.txt
        --testpref {pieces}/test.txt --destdir {data} --workers {workers}""",
        tool=_tool("fairseq-preprocess"),
        pieces=folder.pieces,
        data=folder.data,
        workers=min(4, os.cpu_count() or 1),
    )


def train(folder: Folder, machine: Machine, stop_at: int, updates: int) -> list[str]:
    """Train up to update ``stop_at`` of ``updates``, from the last checkpoint if there is one.

    The learning rate starts at 0, so the first update changes no weight: a run that stops there
    validates the untrained model.
    """
    warmup = min(WARMUP_UPDATES, updates // 4)
    return _words(
        "{python} -m fairseq_tutel.launch --nproc-per-node {ranks} -- fairseq-train {data}" + TRAIN,
        python=sys.executable,
        ranks=machine.ranks,
        data=folder.data,
        experts=machine.experts,
        samples=machine.samples_per_rank,
        warmup=warmup,
        period=updates - warmup,
        stop_at=stop_at,
        validate_every=max(1, updates // 8),
        checkpoints=folder.checkpoints,
    )


def eval_lm(folder: Folder, side: str) -> list[str]:
    """Perplexity of the last checkpoint on ``side``, in one process that holds all experts."""
    return _words(
        f"""{{tool}} {{data}} {PLUGIN} --path {{checkpoints}}/checkpoint_last.pt
        --gen-subset {{side}} --tokens-per-sample {TOKENS_PER_SAMPLE}
        --batch-size {SAMPLES_PER_UPDATE} {BATCH_MULTIPLE}""",
        tool=_tool("fairseq-eval-lm"),
        data=folder.data,
        checkpoints=folder.checkpoints,
        side=side,
    )


def interactive(folder: Folder, prompts: Path, count: int) -> list[str]:
    """Complete the prompts of a file, one per line."""
    return _words(
        f"""{{tool}} {{data}} {PLUGIN} --path {{checkpoints}}/checkpoint_last.pt --input {{prompts}}
        --bpe sentencepiece --sentencepiece-model {{tokenizer}} {SAMPLING}
        --buffer-size {{count}} --batch-size {{count}} {BATCH_MULTIPLE}""",
        tool=_tool("fairseq-interactive"),
        data=folder.data,
        checkpoints=folder.checkpoints,
        prompts=prompts,
        tokenizer=folder.tokenizer,
        count=count,
    )
