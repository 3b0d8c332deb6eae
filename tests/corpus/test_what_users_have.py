"""What users have at e821d35 keeps working: checkpoints, exports, configs, commands, own code.

``files.tar.xz`` has the files, ``expected.json`` what each entry gave when ``make.py`` recorded it.
Whatever was recorded has to be there still, and equal: floats to a relative error, the rest to the
bit. New names and options are welcome. The entries of one number of ranks share one start.
"""

import contextlib
import functools
import importlib.util
import io
import json
import math
import re
import tarfile
import traceback
from collections.abc import Callable
from fnmatch import fnmatch
from typing import NamedTuple

import pytest
import readers
import surface
from forms import CHANGED, EXCHANGES, HERE, LAYERS, LOOPS, RUNS, USERS
from helpers.commands import ROOT
from helpers.distributed import run_ranks
from helpers.seeds import seed_all

# Decided removals: pattern of entries, or of their parts (entry/key/...) -> words that CHANGELOG.md
# has, and that are in the message where an entry fails.
REMOVED: dict[str, str] = {
    "config tiny_cpu/model/moe_load_bias": "moe_preset: balanced",
    "config tiny_cpu/criterion/moe_gate_loss_wt": "moe_preset: balanced",
    "names fairseq_tutel.moe*/Expert*/chunk*": "ExpertBank.chunk",
    "names fairseq_tutel.moe*/Expert*/without_output_bias()": "without_output_bias",
    "names fairseq_tutel.moe*/Expert*/compute_in()": "ExpertBank.compute_in",
    "names fairseq_tutel.moe*/Expert*/keep()": "`keep`",
    "names fairseq_tutel.moe*/*/prepare_to_move()": "prepare_to_move",
    **{
        f"names fairseq_tutel.moe*/*/{name}()": name
        for name in ("compute_lean", "compute_tokens", "gathers_tokens", "compute_int8")
    },
    "names fairseq_tutel.moe*/*/lean_chunk*()": "lean_chunk",
    "names fairseq_tutel.moe*/LoRAExperts/factor_gradients()/gradient": "factor_gradients",
    "names fairseq_tutel.ops/lean_ffn": "ops.lean_ffn",
    "names fairseq_tutel.ops/token_ffn": "ops.token_ffn",
    "names fairseq_tutel.training/AuxLosses/add()/aux": "AuxLosses.add",
    # updates in the backward pass
    "names fairseq_tutel.training/BackwardUpdates": "BackwardUpdates",
    "names fairseq_tutel.training/update_in_backward": "training.update_in_backward",
    "resume lm_in_backward on*": "--moe-update-in-backward",
    "options table/--moe-update-in-backward": "--moe-update-in-backward",
    "config */model/moe_update_in_backward": "--moe-update-in-backward",
    # bf16 as a format of kept values
    "layer lean-bf16": "activation_storage",
    "options table/--moe-activation-storage": "--moe-activation-storage bf16",
    # switches for measurements
    **{
        f"options table/--{flag}": f"--{flag}"
        for flag in ("moe-force-load", "moe-simulate-world-size", "dummy-a2a")
    },
    "options table/--record-a2a-perf-stats": "--record-a2a-perf-stats",
    "options table/--moe-benchmark": "--moe-benchmark",
    "config */model/moe_benchmark": "--moe-benchmark",
    **{f"slurm ladder/{number}": "--moe-benchmark" for number in range(3, 28, 4)},
    # the ramp of growth
    "names fairseq_tutel.checkpoint.growth/Growth": "`Growth`",
    "names fairseq_tutel.checkpoint.growth/grow/ramp": "grow(ramp=)",
    "names fairseq_tutel.checkpoint.growth/held_back": "held_back",
    "names fairseq_tutel.checkpoint.growth/history_of": "history_of",
    "names fairseq_tutel.checkpoint.growth/why_inexact": "why_inexact",
    "names fairseq_tutel.moe*/Router/update_load_bias()/held_back_E": "held_back",
    "names fairseq_tutel.training/update_load_bias/held_back": "update_load_bias(held_back=)",
    "names fairseq_tutel.training/update_load_biases": "update_load_biases",
    "options checkpoint/grow/--exact": "grow --exact",
    "tools lm*/grow-exact": "grow --exact",
    "set lm_grown_exact/report/growth": "held back",
    "resume lm_grown_exact on 1/1": "held back",
    "options checkpoint/grow/--moe-growth-updates": "--moe-growth-updates",
    "options table/--moe-growth-updates": "--moe-growth-updates",
    "config */model/moe_growth_updates": "--moe-growth-updates",
    "page fairseq_tutel/checkpoint/GROWTH.md#1": "held_back",
    # the redo log of a save
    "names fairseq_tutel.checkpoint/final_path": "final_path",
    "names fairseq_tutel.checkpoint/recover_directory": "recover_directory",
    "set */report/unfinished_save": "unfinished_save",
    # the launcher's own supervision
    "launch one": "--output",
    **{
        f"options launch/{flag}": flag
        for flag in ("--output", "--grace-seconds", "--agree-seconds")
    },
}
# runs and configs that are also tried without --long; every set is read, and its content compared
QUICK = {
    *("lm on 1", "lm on 2", "lm_adam16 on 1", "lm_fp16 on 1", "lm_zero on 2", "lm_sliced on 1"),
    *("lm_sliced on 2", "lm_lora on 1", "lm_swiglu on 1", "lm_in_backward on 2", "lm_users on 1"),
    *("lm_users on 2", "mt on 1", "lm_upcycled on 1", "tiny_cpu", "old_keys", "translation"),
}
EVALUATED = (
    "lm",
    "lm_swiglu",
    "lm_cosine",
    "lm_in_backward",
    "lm_merged",
    "dense",
    "mt",
    "mt_nllb",
)


class Entry(NamedTuple):
    """A form: its reader with arguments, the ranks that read it, and what it needs."""

    read: Callable
    args: tuple = ()
    ranks: int = 1
    process: str = ""  # entries of one name share a process: those that register names
    mark: str = ""
    close: float = 1e-5  # relative error of floats


class Failure(NamedTuple):
    text: str


def _entries():
    """Yield the name and the entry of each form."""
    runs = {name: run[1] for name, run in RUNS.items()} | dict.fromkeys(CHANGED, (1,))
    for name, resume_on in runs.items():
        yield f"set {name}", Entry(readers.stored_set, (name,))
        own, close = "users" * (name == "lm_users"), 2e-3 if name == "lm_fp16" else 1e-5
        for ranks in resume_on:
            mark = "long" * (f"{name} on {ranks}" not in QUICK)
            entry = Entry(readers.resumed, (name,), ranks, own, mark, close)
            yield f"resume {name} on {ranks}", entry
    for name in EVALUATED:
        yield f"evaluate {name}", Entry(readers.evaluated, (name,))
    for run, data, step in readers.META:
        yield f"meta {run}", Entry(readers.meta, (run, data, step))
    for name in readers.TOOLS:
        yield f"tools {name}", Entry(readers.tools, (name,))
    for name in ("lm_swiglu", "mt"):
        yield f"export {name}", Entry(readers.exported, (name,))
        yield f"transformers {name}", Entry(readers.in_transformers, (name,), 0, "", "extras", 1e-4)
    yield "export description", Entry(readers.described)
    for kind, (*_, saved) in LOOPS.items():
        if kind != "dcp":
            yield f"set {kind}", Entry(readers.stored_set, (kind,))
        for ranks in (1, 2, 4):
            if ranks == 1 or ranks == saved or (ranks == 4 and kind in ("sliced", "dcp")):
                mark = "long" if ranks == 4 else ""
                yield f"loop {kind} on {ranks}", Entry(readers.loop, (kind,), ranks, "", mark)
    for kind in ("lora", "lora_int8"):
        for ranks in (1, 2):
            yield f"adapter {kind} on {ranks}", Entry(readers.adapter, (kind,), ranks)
    for ranks in (1, 2):
        yield f"full state on {ranks}", Entry(readers.full_state, (), ranks)
    for name in LAYERS:
        yield f"layer {name}", Entry(readers.layer, ("layers", name))
    for name in EXCHANGES:
        yield f"exchange {name}", Entry(readers.layer, ("exchanges", name), 2)
    for name, (_, exchange) in USERS.items():
        for ranks in (1, 2) if not exchange else (2,):
            args = ("users", name)
            yield f"user's {name} on {ranks}", Entry(readers.layer, args, ranks, "users")
    yield "replace_ffn", Entry(readers.replaced)
    for name in ("exchange.json", "exchange_open.json"):
        yield f"tuner {name}", Entry(readers.tuner, (name,), 2)
    for folder, name in surface.CONFIGS:
        mark = "long" * (name not in QUICK)
        yield f"config {name}", Entry(surface.configs, (folder, name), 1, "", mark)
    for name, words in surface.LAUNCHES.items():
        yield f"launch {name}", Entry(surface.launched, (words,))
    for name, words in surface.SCRIPTS.items():
        yield f"slurm {name}", Entry(surface.slurm, (words,))
    for name in surface.snippets():
        whole, mark = surface.needs(name)
        yield f"page {name}", Entry(surface.snippet, (name, whole), 1, "", mark, 1e-4)
    for room in surface.ROOMS:
        yield f"names fairseq_tutel{room}", Entry(surface.names, (room,))
    yield "options table", Entry(surface.table)
    for room in surface.MAINS:
        yield f"options {room}", Entry(surface.commands, (room,))
    for name, words in surface.PROGRAMS.items():
        yield f"program {name}", Entry(surface.program, (words,), 0, "", "long", 1e-3)


ENTRIES = dict(_entries())


def read_all(files, names) -> dict:
    """Values, or failures, of entries of one kind; runs on each of their ranks."""
    found = {}
    for name in names:
        seed_all(name)
        entry = ENTRIES[name]
        with contextlib.redirect_stderr(io.StringIO()) as said:  # argparse explains itself there
            try:
                found[name] = json.loads(json.dumps(entry.read(files, *entry.args)))
            except (Exception, SystemExit) as error:
                text = "".join(traceback.format_exception(error)[-6:])
                found[name] = Failure(f"{error}\n{text}{said.getvalue()[-2000:]}")
    return found


def read(files, name, names) -> dict:
    """Values of all entries that share ``name``'s processes: by rank, one if the ranks agree."""
    kind = ENTRIES[name][2:4]
    names = [each for each in names if ENTRIES[each][2:4] == kind]
    if not kind[0]:
        return read_all(files, names)
    results = run_ranks(read_all, kind[0], files, names, timeout=240)
    return {each: together([result[each] for result in results]) for each in names}


def together(values):
    """Return the value of all ranks: the first one's failure, one if all are equal, or each."""
    failures = [value for value in values if isinstance(value, Failure)]
    if failures or all(value == values[0] for value in values):
        return (failures or values)[0]
    return {str(rank): value for rank, value in enumerate(values)}


def removal(at: str) -> str | None:
    """Return the words of a decided removal, or None."""
    return next((words for place, words in REMOVED.items() if fnmatch(at, place)), None)


def differences(got, want, close, where):
    """Yield the place of each recorded value that is not there, and what is there in its place."""
    if isinstance(want, list) and isinstance(got, list) and len(got) == len(want):
        want, got = dict(enumerate(want)), dict(enumerate(got))
    if isinstance(want, dict) and isinstance(got, dict):
        for key, value in want.items():
            at = f"{where}/{key}"
            found = list(differences(got[key], value, close, at) if key in got else [(at, "gone")])
            if removal(at) is None:
                yield from found
            elif not found:
                yield at, "it is not removed"
    elif isinstance(want, float) and isinstance(got, float):
        if not math.isclose(got, want, rel_tol=close, abs_tol=1e-9):
            yield where, f"{got!r}, not {want!r}"
    elif got != want and not has_choices(got, want):
        yield where, f"{got!r}, not {want!r}"


def has_choices(got, want):
    """Return whether both are an option's choices, such as ``{same,bf16}``, and none is gone."""
    both = [re.fullmatch(r" \{(.+)\}", str(each)) for each in (got, want)]
    return all(both) and {*both[1][1].split(",")} <= {*both[0][1].split(",")}


@functools.cache
def recorded() -> dict:
    return json.loads((HERE / "expected.json").read_text())


def unpack(folder):
    """Unpack the recorded files."""
    for path in HERE.glob("files*.tar.xz"):
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """The folder of the recorded files."""
    folder = tmp_path_factory.mktemp("files")
    unpack(folder)
    return folder


@pytest.fixture(scope="session")
def found(request, files):
    """Read an entry, with all selected ones that share its processes."""
    known: dict = {}
    items = [i for i in request.session.items if i.name.startswith("test_it_is_read_as_it_was[")]
    names = [item.callspec.params["entry"] for item in items]

    def of(name):
        if name not in known:
            known.update(read(files, name, names))
        return known[name]

    return of


MARKED = {name: [getattr(pytest.mark, e.mark)] if e.mark else [] for name, e in ENTRIES.items()}


@pytest.mark.parametrize("entry", [pytest.param(n, marks=marks) for n, marks in MARKED.items()])
def test_it_is_read_as_it_was(entry, found):
    if ENTRIES[entry].mark == "extras" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    want, got, words = recorded()[entry], found(entry), removal(entry)
    if isinstance(got, Failure):
        assert words and words in got.text, got.text
    else:
        assert words is None, "it is not removed"
        assert not list(differences(got, want, ENTRIES[entry].close, entry))


def test_removals_are_announced_and_all_is_recorded():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert not [words for words in REMOVED.values() if words not in changes]
    assert recorded().keys() == ENTRIES.keys()


def test_no_recorded_file_names_a_machine(files):
    paths = [*files.rglob("*"), *HERE.glob("*.json"), HERE / "snippets.txt"]
    for path in filter(lambda path: path.is_file(), paths):
        text = path.read_bytes().replace(b"/tmp/plasma", b"")  # fairseq's default
        assert not re.search(rb"/(work|tmp|root|home)/\w", text), path
