r"""Do experts pay? Dense and sparse language models of Python sources, with equal operations.

    python scripts/bench/study_experts.py data    # the data-bin: runs/study/data
    python scripts/bench/study_experts.py train   # all runs below, two at a time
    python scripts/bench/time_experts.py          # times and curves: results/experts.json
    python -m fairseq_tutel.picture runs/study/{dense,8-top1}-seed? --out runs/study \
        --seconds-per-update scripts/bench/results/experts.json

``train --updates 8000`` goes on with the runs of several seeds. Training has a fixed number of
updates, so that a busy machine changes no loss. The seconds of an update are measured apart, in
turns, on one thread, from the trained weights. The learning rate follows no horizon: a curve at any
update is that of a run that ends there.
"""

import argparse
import hashlib
import os
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RUNS = Path("runs/study")
COMMON = """--task language_modeling --tokens-per-sample 256 --batch-size 8
 --required-batch-size-multiple 1 --decoder-layers 4 --decoder-embed-dim 128
 --decoder-ffn-embed-dim 512 --decoder-attention-heads 4 --share-decoder-input-output-embed
 --dropout 0 --attention-dropout 0 --optimizer adam --adam-betas (0.9,0.98) --clip-norm 1
 --lr 0.002 --lr-scheduler inverse_sqrt --warmup-updates 250 --cpu --num-workers 0
 --validate-interval-updates 250 --batch-size-valid 8 --no-epoch-checkpoints
 --log-format json --log-interval 50"""
PACKAGES = ("torch", "fairseq", "numpy", "sympy", "setuptools")  # beside the standard library
EXPERTS = """--user-dir fairseq_tutel --arch transformer_lm_gpt_moe --criterion moe_cross_entropy
 --moe-gate-loss-combine-method sum --moe-expert-count"""
BIAS = """--moe-second-expert-policy all --moe-capacity-factor 0 --moe-load-bias quantile
 --moe-gate-loss-wt 0.001"""
META = "--moe-gate-loss-wt 0.01"  # capacity 1, sampled second experts; the weight of README.moe.md
HALF = "--moe-top-k 2 --moe-expert-ffn-dim 256"  # two experts of half the width
# setting -> options, seeds, updates; the first two make the headline
SETTINGS = {
    "dense": ("--arch transformer_lm_gpt --criterion cross_entropy", 3, 2000),
    "8-top1": (f"{EXPERTS} 8 --moe-top-k 1 {BIAS}", 3, 2000),
    "8-top1-meta": (f"{EXPERTS} 8 --moe-top-k 1 {META}", 1, 1200),
    "8-top1-gateloss": (f"{EXPERTS} 8 --moe-top-k 1 --moe-capacity-factor 0 {META}", 1, 1200),
    "8-top2": (f"{EXPERTS} 8 {HALF} {BIAS}", 1, 1200),
    "32-top1": (f"{EXPERTS} 32 --moe-top-k 1 {BIAS}", 1, 1200),
    "32-top2": (f"{EXPERTS} 32 {HALF} {BIAS}", 1, 1200),
    "8-top2-meta": (f"{EXPERTS} 8 {HALF} {META}", 1, 1200),
}
# seed by seed, so that an early end leaves whole pairs
QUEUE = sorted(((s, name) for name, (_, n, _) in SETTINGS.items() for s in range(1, n + 1)),
               key=lambda run: (SETTINGS[run[1]][1] == 1, run[0]))  # fmt: skip


def words(name: str) -> list[str]:
    """Return the options of a setting."""
    return [str(RUNS / "data"), *COMMON.split(), *SETTINGS[name][0].split()]


def write_data() -> None:
    """Write the Python sources of this environment, as bytes, as a data-bin.

    A file is held out by a hash of its name. Validation has 2,048 bytes of each of 49 such files.
    """
    import numpy
    import torch
    from fairseq.data import Dictionary, indexed_dataset

    files: dict[str, Path] = {}
    packages = Path(sysconfig.get_path("purelib"))
    for folder in (Path(sysconfig.get_path("stdlib")), *map(packages.joinpath, PACKAGES)):
        for file in folder.rglob("*.py"):
            if "-packages" not in str(file.relative_to(folder)):  # of another environment
                files[f"{folder.name}/{file.relative_to(folder)}"] = file
    texts = {name: files[name].read_bytes() for name in sorted(files)}
    held_out = {n for n in texts if hashlib.sha256(n.encode()).digest()[0] < 8}
    long = [n for n in texts if n in held_out and len(texts[n]) > 4096]
    valid = [texts[n][1024 : 1024 + 2048] for n in long[:: len(long) // 49][:49]]
    parts = {"train": [t for n, t in texts.items() if n not in held_out and t], "valid": valid}
    symbols = Dictionary()
    for byte in range(256):
        symbols.add_symbol(str(byte), n=256 - byte)
    (RUNS / "data").mkdir(parents=True, exist_ok=True)
    symbols.save(str(RUNS / "data/dict.txt"))
    for part, of_part in parts.items():
        path = str(RUNS / "data" / part)
        builder = indexed_dataset.make_builder(path + ".bin", "mmap", vocab_size=len(symbols))
        for text in of_part:
            numbers = numpy.frombuffer(text, numpy.uint8).astype(numpy.int64) + symbols.nspecial
            builder.add_item(torch.from_numpy(numpy.append(numbers, symbols.eos())))
        builder.finalize(path + ".idx")
        print(f"{part}: {len(of_part)} files, {sum(map(len, of_part)):,} bytes")


def train(updates: int | None) -> None:
    """Run the queue, or with ``updates`` go on with the runs of several seeds."""

    def run(job: tuple[int, str]) -> None:
        seed, name = job
        folder = RUNS / f"{name}-seed{seed}"
        if updates is None and (folder / "checkpoint_last.pt").exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        own = ["--save-dir", folder, "--log-file", folder / "train.log", "--seed", seed]
        own += ["--max-update", updates or SETTINGS[name][2]]
        with (folder / "output").open("a") as output:
            how = {
                "stdout": output,
                "stderr": output,
                "env": {**os.environ, "OMP_NUM_THREADS": "1"},
            }
            subprocess.run(["fairseq-train", *words(name), *map(str, own)], **how, check=False)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, [job for job in QUEUE if updates is None or SETTINGS[job[1]][1] > 1]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("data", "train"))
    parser.add_argument("--updates", type=int)
    given = parser.parse_args()
    write_data() if given.part == "data" else train(given.updates)
