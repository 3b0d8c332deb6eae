"""Common parts of the quickstarts: a folder, commands kept with their logs, errors."""

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import sentencepiece
import torch

from fairseq_tutel import picture

ROOT = Path(__file__).resolve().parents[2]
GPUS = torch.cuda.device_count()
RANKS = GPUS or 2
# 8 experts, or as many more as it takes for every rank to hold equally many
EXPERTS = -(-max(8, RANKS) // RANKS) * RANKS


class QuickstartError(Exception):
    """Reason that ends a run, in a line or with the last lines of a log."""


def say(text: str = "") -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)


class Commands:
    """One run of a quickstart: its folder, its commands and its steps."""

    def __init__(self, folder: Path, updates: int):
        self.folder, self.updates = folder, updates

    def follow(self, steps: Sequence[tuple]) -> None:
        """Say and call each step: (title, method, its arguments)."""
        self.begin = time.monotonic()
        for title, step, *arguments in steps:
            say(f"\n[{time.monotonic() - self.begin:3.0f} s] {title}")
            step(*arguments)

    def cut_into_pieces(self, texts: dict[str, list[str]], train: Sequence[str], **options):
        """Write lines of text by file name to corpus/, and their pieces to pieces/.

        Args:
            train: files that the sentencepiece model is trained on.

        Returns:
            the model, which is in tokenizer/sentencepiece.model, too.
        """
        for name in ("corpus", "tokenizer", "pieces"):
            (self.folder / name).mkdir()
        self._write("corpus", texts)
        model = self.folder / "tokenizer" / "sentencepiece.model"
        sentencepiece.SentencePieceTrainer.train(
            input=[str(self.folder / "corpus" / name) for name in train],
            model_prefix=str(model.with_suffix("")), model_type="bpe", hard_vocab_limit=False,
            num_threads=2, minloglevel=2, **options,
        )  # fmt: skip
        processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
        for name, lines in texts.items():
            pieces = processor.encode(lines, out_type=str)
            self._write("pieces", {name: [" ".join(each) for each in pieces]})
        return processor

    def _write(self, folder: str, texts: dict[str, list[str]]) -> None:
        for name, lines in texts.items():
            text = "".join(f"{line}\n" for line in lines)
            (self.folder / folder / name).write_text(text, encoding="utf-8")

    def train_up_to(
        self,
        update: int,
        options: str,
        warmup: int,
        validations: int,
        lines: int,
        loss="loss",
        run: str = "",
        seed: int = 1,
    ) -> list[str]:
        """Train from the last checkpoint if there is one, and return the log.

        ``lines``: of the log, in a whole run; ``run``: ending of the names of checkpoints and log.
        """  # fmt: skip
        warmup = min(warmup, self.updates // 4)
        period = self.updates - warmup + 1  # with one less the schedule would begin again
        # only updates count: a small text has many epochs
        command = f"""python -m fairseq_tutel.launch --nproc-per-node {RANKS} -- fairseq-train data
            {options} --moe-expert-count {EXPERTS} --optimizer adam --adam-betas '(0.9, 0.98)'
            --clip-norm 1.0 --lr 0.002 --lr-scheduler cosine --warmup-updates {warmup}
            --warmup-init-lr 0 --lr-period-updates {period} --max-update {update}
            --validate-interval-updates {max(1, self.updates // validations)}
            --validate-interval 1000000 --save-interval 1000000 --save-dir checkpoints{run}
            --no-epoch-checkpoints --log-format simple --num-workers 0 --seed {seed}
            --log-interval {max(1, self.updates // lines)}"""
        return self.run(f"train{run}", command, lambda line: show_progress(line, loss))

    def run_together(self, *commands: tuple[str, str]) -> list[list[str]]:
        """Run (name, command) two at a time, each on half of the cores: most of it is imports."""
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // 2))
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda each: self.run(*each, OMP_NUM_THREADS=threads), commands))

    def run(self, name: str, command: str, on_line=lambda line: None, **env: str) -> list[str]:
        """Lines of a command's output, which goes to ``logs/NAME.log``; all are in commands.sh.

        Raises:
            QuickstartError: it ended with another exit code than 0.
        """
        log, lines = self.folder / "logs" / f"{name}.log", []
        with (self.folder / "commands.sh").open("a") as file:
            file.write(f"# {name}\n{' '.join(command.split())}\n")
        pipes = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }
        text = {"encoding": "utf-8", "errors": "replace"}
        how = {"cwd": self.folder, "env": {**os.environ, **env}, **pipes, **text}
        process = subprocess.Popen(shlex.split(command), **how)
        with process, log.open("a", buffering=1, encoding="utf-8") as file:
            for line in process.stdout:
                file.write(line)
                lines.append(line.rstrip("\n"))
                on_line(line)
        if process.returncode:
            tail = "\n".join(f"  {line[:300]}" for line in lines[-15:])
            raise QuickstartError(f"{name} failed; the last lines of {log}:\n{tail}")
        return lines


def show_progress(line: str, loss: str = "loss") -> None:
    """Print the progress that a line of a training log reports."""
    kind, values = picture.read_metrics(line) or ("", {})
    if (update := picture.resumed_at(line)) is not None:
        say(f"      resumed from the checkpoint of update {update}")
    elif kind == "valid" and loss in values:
        name = re.search(r"valid on '(.*?)' subset", line)
        say(f"      {name[1] if name else 'valid'} perplexity at update "
            f"{values['num_updates']:.0f}: {values['ppl']:,.4g}")  # fmt: skip
    elif kind == "train_inner":
        names = ("num_updates", loss, "ppl", "wps", "moe_drop", "lr")
        say("      " + ", ".join(f"{n}={values[n]:.4g}" for n in names if n in values))


def prepare(folder: Path) -> None:
    """Make an empty folder, in place of an earlier run's."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / "commands.sh").exists():
            raise QuickstartError(f"{folder} is not empty and no folder of the quickstart")
        say(f"Removing the earlier run in {folder}.")
        shutil.rmtree(folder)
    (folder / "logs").mkdir(parents=True)
    (folder / "commands.sh").touch()
