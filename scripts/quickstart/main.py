"""From text to a trained, evaluated and generating MoE language model, on this machine.

Called by scripts/quickstart.sh, which sees to the environment; see ``--help``.
"""

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import commands
import completions
import metrics
import pictures
import summary
import tokenizer
from commands import Folder, Machine
from corpus import CorpusError, build_corpus
from shell import CommandFailed, LiveLine, run, say

ROOT = Path(__file__).resolve().parents[2]
REQUIRED_FALL = 10


class UsageError(Exception):
    """Options that cannot be followed; its message is the one line to show."""


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Options of the quickstart."""
    parser = argparse.ArgumentParser(
        prog="scripts/quickstart.sh",
        description="Train a small mixture-of-experts language model with fairseq, evaluate it, "
        "let it write, and draw what happened. Everything goes to runs/quickstart.",
    )
    parser.add_argument(
        "text",
        nargs="*",
        type=Path,
        help="text files (UTF-8), or folders of them; default: sources and documentation of the "
        "Python library",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with a run that was interrupted (default: remove it and start anew)",
    )
    parser.add_argument(
        "--updates",
        type=int,
        default=commands.UPDATES,
        metavar="N",
        help="updates to train (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "runs" / "quickstart",
        metavar="FOLDER",
        help="where the files go (default: runs/quickstart)",
    )
    args = parser.parse_args(argv)
    if args.updates < 8:
        parser.error(f"--updates {args.updates}: at least 8 are needed, to stop and resume halfway")
    args.text = [path.absolute() for path in args.text]
    args.out = args.out.absolute()
    return args


class Run:
    """One run of the quickstart: its folder, what is done already, and its steps.

    ``state.json`` in the folder lists the finished steps; it also marks the folder as one that
    a new run may remove.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.machine = Machine.detect()
        self.text = build_corpus(args.text)  # before an earlier run is removed, as it may fail
        self.folder = Folder(_shorter(args.out))
        self.settings = {"text": [str(path) for path in args.text], "updates": args.updates}
        self.state = {"settings": self.settings, "done": [], "seconds": {}, "facts": {}}
        self._open_folder()

    @property
    def _state_file(self) -> Path:
        return self.folder.root / "state.json"

    def _open_folder(self) -> None:
        root, resume = self.folder.root, self.args.resume
        if root.exists() and any(root.iterdir()) and not self._state_file.exists():
            raise UsageError(f"{root} is not empty and no folder of the quickstart: choose another")
        if resume and self._state_file.exists():
            found = json.loads(self._state_file.read_text(encoding="utf-8"))
            if found["settings"] != self.settings:
                raise UsageError(
                    f"--resume: {root} was begun with other options ({found['settings']}); give "
                    "the same ones, or leave out --resume to start anew"
                )
            self.state = found
            say(f"Going on with the run in {root}; done already: {', '.join(found['done'])}.")
        elif root.exists():
            say(f"Removing the earlier run in {root} (--resume would go on with it).")
            shutil.rmtree(root)
        elif resume:
            say(f"Nothing to resume in {root}; starting anew.")
        (root / "logs").mkdir(parents=True, exist_ok=True)
        self._save_state()

    def _save_state(self) -> None:
        text = json.dumps(self.state, indent=2)
        new = self._state_file.with_suffix(".new")
        new.write_text(text, encoding="utf-8")
        new.replace(self._state_file)

    def step(self, name: str, title: str, work: Callable[[], None]) -> None:
        """Do a step unless it is done, time it, and remember that it is done."""
        number = len(self.state["done"]) + 1
        if name in self.state["done"]:
            return
        say(f"\n[{number}/{len(STEPS)}] {title}")
        start = time.monotonic()
        work()
        self.state["seconds"][name] = round(time.monotonic() - start, 1)
        self.state["done"].append(name)
        self._save_state()

    def _command(self, step: str, command: list[str], **options) -> list[str]:
        """Run a command of a step and keep it, as a line to copy, in commands.sh."""
        with (self.folder.root / "commands.sh").open("a", encoding="utf-8") as file:
            file.write(f"# {step}\n{shlex.join(command)}\n")
        return run(command, self.folder.log(step), **options)

    # the steps, in their order

    def corpus(self) -> None:
        self.text.write(self.folder.text)
        splits = self.text.splits
        say(f"      from {self.text.source}")
        for name, split in splits.items():
            say(f"      {name:<5} {split.documents:>5} documents, {split.chars:>9,} characters")
        self.state["facts"]["corpus"] = {
            "source": self.text.source,
            "characters": {name: split.chars for name, split in splits.items()},
        }

    def tokenizer(self) -> None:
        self.folder.tokenizer.parent.mkdir(exist_ok=True)
        self.folder.pieces.mkdir(exist_ok=True)
        tokenizer.train(self.folder.text / "train.txt", self.folder.tokenizer)
        names = [f"{side}.txt" for side in ("train", "valid", "test")]
        texts = {self.folder.text / name: self.folder.pieces / name for name in names}
        counts = tokenizer.encode(self.folder.tokenizer, texts)
        say("      " + ", ".join(f"{name} {count:,} pieces" for name, count in counts.items()))
        self.state["facts"]["pieces"] = counts

    def preprocess(self) -> None:
        # a half-finished earlier attempt would make fairseq-preprocess refuse
        shutil.rmtree(self.folder.data, ignore_errors=True)
        lines = self._command("preprocess", commands.preprocess(self.folder))
        types = next(int(m[1]) for m in (re.search(r"(\d+) types", x) for x in lines) if m)
        say(f"      dictionary of {types:,} pieces")

    def untrained(self) -> None:
        say("      (the learning rate starts at 0: after update 1 the weights are as they were)")
        self._train(1)

    def train(self) -> None:
        self._train(self.args.updates // 2)

    def resume(self) -> None:
        self._train(self.args.updates)

    def _train(self, stop_at: int) -> None:
        live = LiveLine()

        def on_line(line: str) -> None:
            if (update := metrics.resumed_at(line)) is not None:
                live.close()
                say(f"      resumed from the checkpoint of update {update}")
            elif (values := metrics.valid_values(line)) is not None:
                live.close()
                update, perplexity = int(values["num_updates"]), values["ppl"]
                say(f"      valid perplexity at update {update}: {perplexity:,.1f}")
            elif (text := metrics.progress(line)) is not None:
                live.update(f"      {text}")

        command = commands.train(self.folder, self.machine, stop_at, self.args.updates)
        try:
            self._command("train", command, on_line=on_line)
        finally:
            live.close()

    def evaluate(self) -> None:
        for side in ("valid", "test"):
            lines = self._command("eval-lm", commands.eval_lm(self.folder, side))
            found = [m for m in (re.search(r"Perplexity: ([\d.]+)", line) for line in lines) if m]
            perplexity = float(found[-1][1])
            say(f"      {side} perplexity {perplexity:,.1f}")
            self.state["facts"][f"eval_lm_{side}"] = perplexity

    def complete(self) -> None:
        library = not self.args.text
        prompts = completions.choose_prompts(self.folder.text / "test.txt", library)
        file = self.folder.root / "prompts.txt"
        file.write_text("".join(f"{prompt}\n" for prompt in prompts), encoding="utf-8")
        command = commands.interactive(self.folder, file, len(prompts))
        texts = completions.parse(self._command("interactive", command))
        for prompt, text in zip(prompts, texts, strict=True):
            say(f"      prompt: {prompt}")
            say("".join(f"      | {line}\n" for line in text.rstrip().split("\n")))
        self.state["facts"]["completions"] = texts

    def report(self) -> None:
        curves = metrics.read_curves(self.folder.log("train"))
        updates, loads = metrics.read_expert_load(self.folder.expert_load)
        pictures.draw_loss(curves, self.folder.root / "loss.png")
        independent = commands.independent_utilisation(self.machine)
        picture = self.folder.root / "experts.png"
        pictures.draw_experts(updates, loads, picture, curves.used, independent)
        self.state["facts"]["utilisation"] = {
            "late": metrics.late_utilisation(curves),
            "independent": independent,
        }
        self.state["facts"]["curves"] = {
            "start": curves.valid[min(curves.valid)][1],
            "end": curves.valid[max(curves.valid)][1],
            "resumed_at": [update for update in curves.resumed if update > 1],
            "tokens_per_second": round(statistics.median(w for _, w in curves.train.values())),
            "moe_layers": len(loads),
        }

    def summarise(self) -> dict:
        """Collect and write summary.json."""
        facts, machine = self.state["facts"], self.machine
        curves = facts["curves"]
        result = {
            "valid_perplexity": {
                "start": curves["start"],
                "end": curves["end"],
                "fall": round(curves["start"] / curves["end"], 1),
                "eval_lm": facts["eval_lm_valid"],
            },
            "test_perplexity": {"eval_lm": facts["eval_lm_test"]},
            "training": {
                "updates": self.args.updates,
                "resumed_at": curves["resumed_at"],
                "tokens_per_second": curves["tokens_per_second"],
                "world_size": machine.ranks,
                "ranks": f"{machine.ranks} {machine.kind.upper()} rank{'s' * (machine.ranks > 1)}",
            },
            "model": {
                "experts": machine.experts,
                "experts_per_rank": machine.experts // machine.ranks,
                "moe_layers": curves["moe_layers"],
            },
            "utilisation": facts["utilisation"],
            "corpus": {**facts["corpus"], "pieces": facts["pieces"]},
            "completions": facts["completions"],
            "seconds": self.state["seconds"],
        }
        file = self.folder.root / "summary.json"
        file.touch()
        result["files"] = summary.list_files(self.folder.root)
        summary.write(result, file)
        return result


STEPS = {
    "corpus": "Collect the text",
    "tokenizer": "Train a sentencepiece model",
    "preprocess": "fairseq-preprocess",
    "untrained": "Start training; validate the untrained model",
    "train": "Train the first half, then stop",
    "resume": "Resume from the checkpoint and train the second half",
    "evaluate": "fairseq-eval-lm",
    "complete": "Complete three prompts with fairseq-interactive",
    "report": "Draw the pictures",
}


def quickstart(argv: list[str]) -> None:
    """Do all steps and print the table.

    Raises:
        UsageError, CorpusError, CommandFailed: what went wrong, for the user.
    """
    args = parse_arguments(argv)
    os.chdir(ROOT)  # so that `--user-dir fairseq_tutel` is found
    quick = Run(args)
    for name, title in STEPS.items():
        quick.step(name, title, getattr(quick, name))
    result = quick.summarise()
    say(f"\n{summary.table(result)}\nMore in {quick.folder.root / 'summary.json'}")
    fall = result["valid_perplexity"]["fall"]
    enough = args.updates >= commands.UPDATES and not args.text
    if enough and not (math.isfinite(fall) and fall >= REQUIRED_FALL):
        raise CommandFailed(f"perplexity fell only {fall} times, not {REQUIRED_FALL}")


def _shorter(path: Path) -> Path:
    """Relative to the repository where it is inside: the commands are easier to read then."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def _interrupt(*_) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """The exit code."""
    # as Ctrl-C: the commands that run are ended, too
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        quickstart(sys.argv[1:])
    except (UsageError, CorpusError, CommandFailed) as error:
        say(f"quickstart: error: {error}")
        return 1
    except KeyboardInterrupt:
        say("\nquickstart: interrupted; --resume goes on from the last finished step")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
