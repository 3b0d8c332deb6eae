"""The command of the ranks, read once into one frozen value, and what each rank adds to it.

Stock fairseq cannot start several ranks on a CPU: with torchrun's variables it divides by the
number of GPUs, unless the init method and the rank are stated.
"""

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from glob import escape, glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..command_line.hydra import find_config, override_name, with_overrides

# fairseq's console scripts: their main() makes a process group, only takes a share of the data by
# world size and rank, or reads standard input; Hydra's has key=value overrides instead of flags
_KINDS = {
    **dict.fromkeys(("fairseq-train", "fairseq-validate", "fairseq-eval-lm"), "grouped"),
    **{"fairseq-generate": "sharded", "fairseq-interactive": "single"},
    "fairseq-hydra-train": "hydra",
}
TRAINING = ("fairseq-train", "fairseq-hydra-train")
_BARE = ("cpu", "distributed_no_spawn")  # flags without a value, of those that matter here
# words by which a user of Hydra's chooses where to run
_ELSEWHERE = {"hydra.run.dir", "hydra.job.chdir", "-m", "--multirun"}


@dataclass(frozen=True)
class Command:
    """A command as the user gave it."""

    name: str | None  # fairseq's console script, or None for any other program
    program: tuple[str, ...]  # the words that start it
    arguments: tuple[str, ...]  # the user's, untouched
    # option -> the user's last value for it, "true" for a bare flag; of fairseq's programs only
    given: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)  # Hydra's primary config file

    @property
    def kind(self) -> str:
        return _KINDS.get(self.name or "", "script")

    def spelled(self, key: str) -> str:
        """Return the option ``key`` as a user of this command writes it."""
        if self.kind == "hydra":
            return f"{'common' if key == 'cpu' else 'distributed_training'}.{key}"
        return "--" + key.replace("_", "-")

    def in_file(self, *keys: str) -> str | None:
        """Return what the config file states for nested ``keys``; None if nothing."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return None if value is None else str(value)

    def number(self, key: str) -> int | None:
        """Return a value as a number; None if there is none, or one that only Hydra can resolve."""
        text = self.given.get(key)
        if text is None or "${" in text or text in ("null", "None"):
            return None
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{self.spelled(key)} {text}: not a number") from None


def _console_script(word: str) -> str | None:
    """Return the console script of its path, fairseq_cli.X or .../fairseq_cli/X.py, else None."""
    match = re.search(r"(?:^|/)fairseq_cli(?:/(\w+)\.py|\.(\w+))$", word)
    module = match and (match[1] or match[2])
    name = f"fairseq-{module.replace('_', '-')}" if module else os.path.basename(word)
    return name if name in _KINDS else None


def parse_command(words: Sequence[str], path: str | None = None) -> Command:
    """Read the words after ``--``; ``path`` replaces $PATH. ValueError if no program is found."""
    if not words:
        raise ValueError("no command given; put it after --, as in: -- fairseq-train DATA ...")
    name, start, i = _console_script(words[0]), 1, 1
    if re.fullmatch(r"(python|pypy)[\d.]*", os.path.basename(words[0])):
        while i < len(words) and words[i].startswith("-") and words[i] not in ("-m", "-c"):
            i += 2 if words[i] in ("-W", "-X") else 1
        i += words[i : i + 1] == ["-m"]
        name = _console_script(words[i]) if i < len(words) else None
        start = i + 1 if name else 1
    # also beside the interpreter: a virtual environment may not be activated
    path = os.pathsep.join((path or os.environ.get("PATH", ""), os.path.dirname(sys.executable)))
    if found := shutil.which(words[0], path=path):
        program = (found, *words[1:start])
    elif words[0].endswith(".py") and os.path.isfile(words[0]):
        program = (sys.executable, *words[:start])
    else:
        raise ValueError(f"cannot find the command {words[0]!r} (not on PATH, nor executable)")
    if name != "fairseq-hydra-train":
        return Command(name, program, tuple(words[start:]), _flags(words[start:]) if name else {})
    arguments, file = find_config(words[start:])
    config = _read_yaml(file) if file else {}
    return Command(name, program, tuple(arguments), _overrides(arguments), config)


def _read_yaml(file: Path) -> dict[str, Any]:
    import yaml  # it is where Hydra is; other commands do without

    try:
        return yaml.safe_load(file.read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: {' '.join(str(error).split())}") from None


def _overrides(words: Sequence[str]) -> dict[str, str]:
    """Read ``[+]section.key=value`` of the sections that matter here as key -> value."""
    named = [(override_name(word).rpartition("."), word.partition("=")[2]) for word in words]
    return {
        key: value.strip("'\"")
        for (section, _, key), value in named
        if value and section == ("common" if key == "cpu" else "distributed_training")
    }


def _flags(words: Sequence[str]) -> dict[str, str]:
    """Read ``--some-flag value`` and ``--some-flag=value`` as some_flag -> value."""
    found = {}
    for word, follower in zip(words, [*words[1:], "--"], strict=False):
        name, equals, text = word.removeprefix("--").partition("=")
        key = "device_id" if name == "local_rank" else name.replace("-", "_")
        if word.startswith("--"):
            bare = key in _BARE or follower.startswith("--")
            found[key] = text if equals else "true" if bare else follower
    return found


def _stay_here(command: Command) -> list[str]:
    """Return overrides that keep the command in its directory, unless the user chooses another.

    Hydra makes a folder for every process: no rank would find checkpoints in a relative save_dir.
    """
    given = {override_name(word) for word in command.arguments}
    chosen = command.in_file("hydra", "run", "dir") or command.in_file("hydra", "job", "chdir")
    if chosen or given & _ELSEWHERE:
        return []
    wanted = ["hydra.run.dir=.", "hydra.output_subdir=null"]
    if "hydra/job_logging" not in f"{command.config.get('defaults')} {given}":
        wanted.append("hydra.job_logging.handlers.file.filename=/dev/null")
    return [each for each in wanted if override_name(each) not in given]


def use_cpu(command: Command, num_gpus: int) -> bool:
    """Return whether there is no GPU, or options or config file choose the CPU."""
    user = command.given.get("cpu") or num_gpus and command.in_file("common", "cpu") or ""
    if num_gpus == 0 and user.lower() in ("false", "0", "no", "off"):
        raise ValueError(f"{command.spelled('cpu')}={user}, but this machine has no usable GPU")
    return num_gpus == 0 or user.lower() in ("true", "1", "yes", "on")


def check_user_dir(command: Command) -> None:
    """Raise ValueError if fairseq would not find the command's user dir, or needs one."""
    if command.kind in ("script", "hydra"):
        return
    user_dir, arch = command.given.get("user_dir"), command.given.get("arch", "")
    if user_dir is None:
        if "_moe" in arch:  # no arch of fairseq's own
            raise ValueError(f"--arch {arch} is not fairseq's own: add --user-dir fairseq_tutel")
        for path in command.given.get("path", "").split(os.pathsep):
            members = [f"{path[:-3]}-shared.pt", *glob(f"{escape(path)}.*-shared.pt")]
            if path.endswith(".pt") and any(map(os.path.exists, members)):
                raise ValueError(f"--path {path} has experts: add --user-dir fairseq_tutel")
        return
    fairseq = find_spec("fairseq")  # which is not imported for this
    beside = [Path(folder) for folder in (fairseq and fairseq.submodule_search_locations) or ()]
    folders = [Path(), *beside, *(folder.parent for folder in beside)]
    # an interpreter of the ranks' own, too, may have a package of that name
    is_package = user_dir.isidentifier() and find_spec(user_dir) is not None
    if not is_package and not any((folder / user_dir).exists() for folder in folders):
        raise ValueError(f"--user-dir {user_dir}: there is no such folder, here or beside fairseq")


def _require(command: Command, key: str, ours: str, why: str) -> None:
    user = command.given.get(key, ours)
    if "${" not in user and user.lower() != ours and (user.lstrip("0") or "0") != ours:
        raise ValueError(f"{command.spelled(key)}={user} contradicts {why} ({ours})")


def rank_options(
    command: Command, *, rank: int, world_size: int, device: int, shared_node: bool, cpu: bool
) -> dict[str, str | None]:
    """Return the options that a rank needs and the user did not give, by key; None: a bare flag."""
    kind, several = command.kind, world_size > 1
    if kind == "script":
        return {}
    if kind == "single" and several:
        raise ValueError(f"{command.name} runs in one process: use --nproc-per-node 1")
    if kind == "sharded" and several and (results := command.given.get("results_path")):
        why = f"--results-path {results} is one file, which each of {world_size} ranks would write"
        raise ValueError(f"{why}: use --nproc-per-node 1, or leave it out")
    _require(command, "distributed_world_size", str(world_size), "the number of ranks started")
    if several:
        _require(command, "distributed_rank", str(rank), "the rank of this process")
    wanted: dict[str, str | None] = {"distributed_world_size": str(world_size)}
    if kind == "sharded":
        wanted["distributed_rank"] = str(rank)
    elif kind != "single":
        if shared_node and not cpu:
            _require(command, "device_id", str(device), "the GPU of this rank")
        _require(command, "distributed_no_spawn", "true", "that the launcher starts the ranks")
        wanted["device_id"] = str(device)
        if several or "distributed_init_method" in command.given:
            wanted |= {"distributed_init_method": "env://", "distributed_rank": str(rank)}
            wanted |= {"distributed_no_spawn": None, "distributed_backend": "nccl"}
    if cpu:
        wanted["cpu"] = None
        if kind != "sharded":
            # fairseq 0.12.2 makes a group, by default of nccl, also of a single rank
            wanted["distributed_backend"] = "gloo"
    return {key: value for key, value in wanted.items() if key not in command.given}


def with_options(command: Command, options: Mapping[str, str | None]) -> list[str]:
    """Return the full command line: the user's words with ``options`` added."""
    words = list(command.arguments)
    if command.kind == "hydra":
        added = [f"{command.spelled(k)}={'true' if v is None else v}" for k, v in options.items()]
        return [*command.program, *with_overrides(words, added + _stay_here(command))]
    for key, value in options.items():
        words += [command.spelled(key)] + ([] if value is None else [value])
    return [*command.program, *words]
