"""Readers of the surface: configs, commands, programs of pages, names and their defaults."""

import argparse
import ast
import contextlib
import dataclasses
import enum
import importlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch

from fairseq_tutel.config import PRESETS, ExpertConfig
from fairseq_tutel.moe import MoELayer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GOLDEN = HERE.parent / "golden"
# ``main`` of the commands of this package
MAINS = {"checkpoint": "checkpoint.__main__", "export": "export.__main__", "launch": "launch.cli",
         "picture": "picture", "plan": "plan.cli"}  # fmt: skip


def numbers(value: torch.Tensor) -> list[float]:
    """Return the norm, and the norm after an addition that tells signs and order."""
    flat = value.detach().double().flatten()
    shift = torch.arange(1, len(flat) + 1).double().cos() * flat.square().mean().sqrt()
    return [flat.norm().item(), (flat + shift).norm().item()]


def scratch(files, name) -> str:
    return os.path.join(tempfile.mkdtemp(dir=files.parent), name)


def run_main(room, *words) -> str:
    """Standard output of a command of this package that succeeds, run here."""
    main = importlib.import_module(f"fairseq_tutel.{MAINS[room]}").main
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert not main(list(words)), out.getvalue()
    return out.getvalue()


def configs(files, folder, name):
    """A composed config: keys that the file sets, and all options of this package."""
    import yaml

    from fairseq_tutel.plan.compose import load_config

    composed = load_config(ROOT / folder, name, [])
    found = {}
    for section, keys in yaml.safe_load((ROOT / folder / f"{name}.yaml").read_text()).items():
        if section != "hydra":
            own = [key for key in composed[section] if re.match("moe|cmr|use_moe", key)]
            found[section] = {key: plain(composed[section][key]) for key in sorted({*keys, *own})}
    preset = PRESETS[str(composed.model.moe_preset)]
    for name in ("second_expert_policy", "load_bias"):  # None: what the preset says
        if found["model"][f"moe_{name}"] is None:
            found["model"][f"moe_{name}"] = preset[name]
    return found


def plain(value):
    """Return a value as JSON has it, an enum by its value."""
    return json.loads(json.dumps(value, default=lambda v: str(getattr(v, "value", v))))


def table(files):
    """Rows of ``python -m fairseq_tutel table``, and options without one: choices and default."""
    from fairseq_tutel.__main__ import main
    from fairseq_tutel.integrations.fairseq.models import ARCHITECTURES
    from fairseq_tutel.integrations.fairseq.options import bundles, help

    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["table"])
    rows = re.findall(r"^\| `(--[\w-]+)(.*?)` \| (.*?) \|", out.getvalue(), re.MULTILINE)
    meta = re.findall(r"`(--[^`]+)`", out.getvalue().rpartition("**")[2])
    fields = ARCHITECTURES["transformer_moe"].schema.__dataclass_fields__
    for name in (*bundles.members(), "moe_top1_expert"):
        (flag, default, _), *_ = help.rows([help.every_option().get(name, fields[name])])
        flag, brace, choices = flag.partition(" {")
        rows.append((flag, brace + choices, default))
    # what a preset sets in place of a default stands behind it
    cut = "; --moe-preset "
    return {
        flag: [choices, default.partition(cut)[0]] for flag, choices, default in rows
    } | dict.fromkeys(meta)


def commands(files, room):
    """Options of a command of this package, with defaults and choices."""
    seen = []

    def parse(self, *words, **_):
        seen.append(self)
        raise SystemExit

    both = dict.fromkeys(("parse_args", "parse_known_args"), parse)
    with mock.patch.multiple(argparse.ArgumentParser, **both), contextlib.suppress(SystemExit):
        run_main(room)
    return options_of(seen[0])


def options_of(parser):
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {name: options_of(each) for name, each in action.choices.items()}
        elif action.dest != "help":
            name = " ".join(action.option_strings) or action.dest
            found[name] = [plain(action.default), plain(action.choices)]
    return found


@contextlib.contextmanager
def inside(folder):
    """Work in a folder for a while."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def launched(files, words):
    """Environment and words of the ranks that the launcher would start."""
    env = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    given = ["--dry-run", "--bind", "none", "--master-port", "29500", *words.split()]
    with mock.patch.dict(os.environ, env, clear=True), inside(ROOT):
        said = run_main("launch", *given)
    return re.sub(
        r"PYTHONPATH=\S+ |(?<= )/\S*/(?=python)|" + re.escape(f"{ROOT}/"), "", said
    ).splitlines()


def slurm(files, words):
    """Words that a batch script gives to srun, or that the ladder gives to sbatch."""
    folder = Path(scratch(files, "bin"))
    folder.mkdir()
    (folder / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (folder / "srun").chmod(0o755)
    job = "SLURM_JOB_ID=17 SLURM_JOB_NUM_NODES=2 SLURM_CPUS_ON_NODE=96 SLURM_JOB_NAME=trial"
    env = dict(word.split("=") for word in job.split()) | {"ENV_SETUP": os.devnull}
    env |= {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT)}
    command = f"bash scripts/slurm/{words}"
    done = subprocess.run(
        command.split(), env=env, cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def snippet(files, name, whole=True):
    """Run a program of a page; or only its imports, if it needs data or another library."""
    text = (HERE / "snippets.txt").read_text(encoding="utf-8")
    text = text.partition(f"=== {name}\n")[2].partition("\n=== ")[0]
    tree = ast.parse(text.replace("range(100)", "range(3)"))
    if not whole:
        ours = [n for n in tree.body if isinstance(n, ast.ImportFrom | ast.Import)]
        tree.body = [node for node in ours if "fairseq_tutel" in ast.unparse(node)]
    found: dict = {"__name__": "__main__"}
    with inside(os.path.dirname(scratch(files, ""))), contextlib.redirect_stdout(io.StringIO()):
        exec(compile(tree, name, "exec"), found)
    tensors = {n: numbers(v) for n, v in found.items() if n in ("loss", "y") and torch.is_tensor(v)}
    return {**tensors, "names": sorted(n for n in found if not n.startswith("_"))}


def names(files, room):
    """Names that a room exports: parameters with defaults of functions, fields of options."""
    module = importlib.import_module(f"fairseq_tutel{room}")
    return {name: describe(getattr(module, name)) for name in module.__all__}


def describe(value):
    """Return parameters and defaults of a function, those of a class and of its public methods."""
    if not callable(value):
        text = json.dumps(value, default=str) if isinstance(value, str | int | tuple) else "null"
        return json.loads(re.sub(" at 0x[0-9a-f]+", "", text))
    if isinstance(value, enum.EnumMeta):
        return {each.name: each.value for each in value}
    given = []
    with contextlib.suppress(ValueError):  # of errors and types
        given = inspect.signature(value).parameters.values()
    found = {p.name: re.sub("<.*>", "object", repr(p.default)) for p in given}
    if value is MoELayer:  # options of experts that it also takes singly
        short = {each.name: repr(each.default) for each in dataclasses.fields(ExpertConfig)}
        found = {**short, "expert_fn": "None", "routing": found.get("options"), **found}
    if inspect.isclass(value) and not issubclass(value, tuple):
        own = {n: f for n, f in vars(value).items() if inspect.isfunction(f) and n[0] != "_"}
        found |= {f"{n}()": describe(f) for n, f in own.items()}
    return found


def program(files, words):
    """Losses that a program logs."""
    from helpers.commands import logged, run

    words = words.format(files=files, golden=GOLDEN, out=scratch(files, "out"))
    said = run([sys.executable, *words.split()])
    losses = [row["loss"] for what in ("train_inner", "test") for row in logged(said, what)]
    return losses or [
        float(text) for text in re.findall(r"[Ll]oss(?: \(base 2\):)? ([\d.]+)", said)
    ]
