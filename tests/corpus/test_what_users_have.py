"""What users have at e821d35 keeps working: checkpoints, exports, configs, commands, own code.

``files.tar.xz`` has the files, ``entries.json`` the forms: a reader with its arguments, the ranks
that read (default 1; 0: this process), a process (entries of one name share it; ``users`` imports
the user dir), a mark, the relative error of floats (default 1e-5), and the value that ``make.py``
recorded. Whatever was recorded has to be there still, and equal: floats to the error, the rest to
the bit. New names and options are welcome.
"""

import contextlib
import importlib.util
import io
import json
import math
import re
import tarfile
import traceback
from fnmatch import fnmatch
from typing import NamedTuple

import pytest
import readers
import surface
from helpers.commands import ROOT
from helpers.distributed import run_ranks
from helpers.seeds import seed_all
from surface import HERE

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
ENTRIES = json.loads((HERE / "entries.json").read_text())


class Failure(NamedTuple):
    text: str


def read_all(files, names) -> dict:
    """Values, or failures, of entries of one kind; runs on each of their ranks."""
    found = {}
    for name in names:
        seed_all(name)
        entry = ENTRIES[name]
        if entry.get("process") == "users":
            readers.register_users()
        read = getattr(readers, entry["read"], None) or getattr(surface, entry["read"])
        with contextlib.redirect_stderr(io.StringIO()) as said:  # argparse explains itself there
            try:
                found[name] = json.loads(json.dumps(read(files, *entry.get("args", ()))))
            except (Exception, SystemExit) as error:
                text = "".join(traceback.format_exception(error)[-6:])
                found[name] = Failure(f"{error}\n{text}{said.getvalue()[-2000:]}")
    return found


def kind(name):
    return ENTRIES[name].get("ranks", 1), ENTRIES[name].get("process")


def read(files, name, names) -> dict:
    """Values of all entries that share ``name``'s processes: by rank, one if the ranks agree."""
    names = [each for each in names if kind(each) == kind(name)]
    ranks, _ = kind(name)
    if not ranks:
        return read_all(files, names)
    results = run_ranks(read_all, ranks, files, names, timeout=240)
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


def unpack(folder):
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


MARKED = {
    name: [getattr(pytest.mark, m) for m in (e.get("mark"),) if m] for name, e in ENTRIES.items()
}


@pytest.mark.parametrize("entry", [pytest.param(n, marks=marks) for n, marks in MARKED.items()])
def test_it_is_read_as_it_was(entry, found):
    if ENTRIES[entry].get("mark") == "extras" and not importlib.util.find_spec("transformers"):
        pytest.skip("transformers is not installed")
    want, got, words = ENTRIES[entry]["value"], found(entry), removal(entry)
    if isinstance(got, Failure):
        assert words and words in got.text, got.text
    else:
        assert words is None, "it is not removed"
        assert not list(differences(got, want, ENTRIES[entry].get("close", 1e-5), entry))


def test_removals_are_announced_and_all_is_recorded():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert not [words for words in REMOVED.values() if words not in changes]
    assert all("value" in entry for entry in ENTRIES.values())
