"""The real commands of fairseq and of this package, run as a user would, each with a time limit."""

from __future__ import annotations

import pathlib
import re
import sys

from helpers.commands import SMALL_LM

BIN = pathlib.Path(sys.executable).parent
_TRAIN = f"""{SMALL_LM}
    --task language_modeling --decoder-embed-dim 32 --decoder-ffn-embed-dim 64
    --decoder-attention-heads 4 --moe-expert-count 4 --no-epoch-checkpoints
"""
# README.moe.md's single-node command on text, at a small size and on a CPU
_META = """
    --user-dir fairseq_tutel --cpu --ddp-backend fully_sharded --memory-efficient-fp16
    --checkpoint-activations --task language_modeling --tokens-per-sample 64
    --arch transformer_lm_gpt_moe --share-decoder-input-output-embed --decoder-layers 4
    --decoder-embed-dim 64 --decoder-ffn-embed-dim 128 --decoder-attention-heads 4
    --moe-expert-count 4 --moe-freq 2 --moe-gating-use-fp32 --moe-second-expert-policy all
    --moe-normalize-expert-grad sqrt_world_size --moe-eval-capacity-token-fraction -1.0
    --max-sentences-valid 1 --num-workers-valid 0 --num-workers 0 --criterion moe_cross_entropy
    --moe-gate-loss-wt 0.01 --moe-gate-loss-combine-method sum --optimizer adam --fp16-adam-stats
    --clip-norm 0.0 --lr 0.0005 --warmup-updates 10 --dropout 0.1 --attention-dropout 0.1
    --batch-size 4 --update-freq 1 --disable-validation --required-batch-size-multiple 1
    --log-format json --log-interval 1
"""


def launched(ranks: int, program: str, *args: str) -> list[str]:
    launcher = [sys.executable, "-m", "fairseq_tutel.launch", "--nproc-per-node", str(ranks)]
    return [*launcher, "--bind", "none", "--", str(BIN / program), *args]


def forked(programs, ranks: int, program: str, *args: str, expect: int = 0, **extra) -> str:
    """Output of ``launched(...)``, without the launcher and without the seconds of imports."""
    done = programs.run([program, *args], ranks=ranks, timeout=120, **extra)
    assert (done.status == 0) == (expect == 0), f"{args}\n{done.text[-6000:]}"
    return done.text


def perplexity(output: str) -> float:
    """What fairseq-eval-lm reports, from the loss, which has more digits."""
    return 2 ** float(re.findall(r"Loss \(base 2\): ([\d.]+)", output)[-1])


def train_words(data: pathlib.Path, save_dir: pathlib.Path, *extra: str) -> list[str]:
    return [str(data), *_TRAIN.split(), "--save-dir", str(save_dir), *extra]


def meta_command(data: pathlib.Path, save_dir: pathlib.Path, *extra: str) -> list[str]:
    betas = ("--adam-betas", "(0.9, 0.98)")
    return [str(data), *_META.split(), *betas, "--save-dir", str(save_dir), *extra]
