"""Common parts of the quickstarts: a folder, commands kept with their logs, errors."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

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
    """Runs commands in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def run(self, name: str, command: str, on_line=lambda line: None) -> list[str]:
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
        process = subprocess.Popen(shlex.split(command), cwd=self.folder, **pipes, **text)
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
