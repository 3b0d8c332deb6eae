"""Fine-tune the quickstart's model on other text: all weights, or low-rank updates of the experts.

    python scripts/quickstart/main.py --updates 160 --out runs/base
    python scripts/bench/study_lora.py --quickstart runs/base --output lora.json

The other text is the C++ headers that come with torch, cut by the quickstart's tokenizer.
"""

import argparse
import hashlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import sentencepiece
import torch
from record import describe_run, write_json

BREAK = "↵"
TRAIN = """fairseq-train {data} --user-dir fairseq_tutel --task language_modeling
    --required-batch-size-multiple 1 --arch transformer_lm_gpt_moe
    --decoder-layers 4 --decoder-attention-heads 4 --decoder-embed-dim 256
    --decoder-ffn-embed-dim 1024 --dropout 0.0 --attention-dropout 0.0
    --moe-freq 2 --moe-top-k 2 --moe-second-expert-policy all --moe-expert-count 8
    --criterion moe_cross_entropy --moe-gate-loss-wt 0.05 --moe-gate-loss-combine-method sum
    --tokens-per-sample 128 --batch-size 16 --optimizer adam --adam-betas '(0.9, 0.98)'
    --clip-norm 1.0 --lr {lr} --lr-scheduler cosine --warmup-updates 5 --warmup-init-lr 0
    --lr-period-updates {period} --max-update {updates} --validate-interval 1000000
    --save-interval 1000000 --save-dir {save} --no-epoch-checkpoints --cpu --num-workers 0
    --log-format simple --log-interval 10 --seed 1 --finetune-from-model {base}"""
EVAL = """fairseq-eval-lm {data} --user-dir fairseq_tutel --task language_modeling
    --required-batch-size-multiple 1 --path {path} --gen-subset valid --tokens-per-sample 128
    --batch-size 16 --cpu"""
# name -> learning rate, more options
WAYS = {
    "all weights": (5e-4, ""),
    "LoRA, r=8": (5e-3, "--moe-lora-rank 8"),
    "LoRA, r=8, frozen experts in int8": (5e-3, "--moe-lora-rank 8 --moe-expert-dtype int8"),
    "LoRA, r=32": (5e-3, "--moe-lora-rank 32"),
}


def run(command: str, log: Path) -> tuple[str, int]:
    """Return the output, and the largest resident memory in KiB."""
    with log.open("w") as file:
        process = subprocess.Popen(shlex.split(command), stdout=file, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} failed: see {log}")
    return log.read_text(), usage.ru_maxrss


def prepare(base: Path, folder: Path) -> Path:
    """Make a data-bin of torch's headers."""
    include = Path(torch.__file__).parent / "include" / "ATen"
    model = sentencepiece.SentencePieceProcessor(
        model_file=str(base / "tokenizer" / "sentencepiece.model")
    )
    sides: dict[str, list[str]] = {"train": [], "valid": []}
    for path in sorted([*include.glob("*.h"), *include.glob("native/*.h")]):
        if path.stat().st_size > 100_000:  # generated
            continue
        is_valid = int(hashlib.sha256(path.name.encode()).hexdigest(), 16) % 16 == 0
        blocks = re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))
        lines = [block.replace("\n", BREAK)[:4000] for block in blocks if block.strip()]
        pieces = (" ".join(each) for each in model.encode(lines, out_type=str))
        sides["valid" if is_valid else "train"] += pieces
    folder.mkdir(parents=True)
    for side, lines in sides.items():
        (folder / f"{side}.txt").write_text("".join(f"{line}\n" for line in lines[:20000]))
    run(f"fairseq-preprocess --only-source --trainpref {folder}/train.txt "
        f"--validpref {folder}/valid.txt --destdir {folder}/data "
        f"--srcdict {base}/data/dict.txt", folder / "preprocess.log")  # fmt: skip
    return folder / "data"


def bits(text: str) -> float:
    """Return the held-out loss per token in bits."""
    return float(re.findall(r"Loss \(base 2\): ([\d.]+)", text)[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quickstart", type=Path, required=True, help="a folder of the quickstart")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--ways", default=",".join(map(str, range(len(WAYS)))), help="numbers")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    base, folder = args.quickstart.resolve(), args.quickstart.resolve() / "lora"
    data = folder / "data" if folder.exists() else prepare(base, folder)
    start = base / "checkpoints" / "checkpoint_last.pt"
    found = {**describe_run("lora-study", torch.device("cpu")), "table": []}
    if args.output.exists():
        found = json.loads(args.output.read_text())
    if not found["table"]:
        loss = bits(run(EVAL.format(data=data, path=start), folder / "eval.log")[0])
        found["table"].append({"way": "before", "validation_bits_per_token": loss})
    for name in [list(WAYS)[int(number)] for number in args.ways.split(",")]:
        lr, more = WAYS[name]
        save = folder / re.sub(r"\W+", "-", name)
        how = {"data": data, "lr": lr, "period": args.updates - 4, "updates": args.updates}
        command = TRAIN.format(save=save, base=start, **how) + f" {more}"
        text, peak = run(command, folder / f"{save.name}.log")
        state = torch.load(save / "checkpoint_last-shared.pt", mmap=True, weights_only=False)
        experts = torch.load(save / "checkpoint_last-rank-0.pt", mmap=True, weights_only=False)
        named = [s for part in (state, experts)
                 for s in part["last_optimizer_state"]["named_state"].values()]  # fmt: skip
        moments = sum(v.nbytes for s in named for v in s.values() if torch.is_tensor(v))
        counts = re.findall(r"num\. trained: ([\d,]+)", text)  # dense, experts
        trained = sum(int(count.replace(",", "")) for count in counts)
        speed = float(re.findall(r"train_inner .* wps=([\d.]+)", text)[-1])
        path = save / "checkpoint_last.pt"
        loss = bits(run(EVAL.format(data=data, path=path), folder / f"{save.name}-eval.log")[0])
        found["table"].append({
            "way": name, "lr": lr, "options": more, "numbers_trained": trained,
            "optimizer_state_bytes": moments,
            "files_bytes": sum(f.stat().st_size for f in save.glob("checkpoint_last*.pt")),
            "peak_resident_kib": peak, "tokens_per_second": speed,
            "validation_bits_per_token": loss,
        })  # fmt: skip
        write_json(found, args.output)
        print(json.dumps(found["table"][-1]), flush=True)
    assert all(math.isfinite(row["validation_bits_per_token"]) for row in found["table"])


if __name__ == "__main__":
    sys.exit(main())
