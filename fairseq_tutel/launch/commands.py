"""The command of the ranks, read once into one frozen value, and what each rank adds to it.

Stock fairseq cannot start several ranks on a CPU: with torchrun's variables set it computes
``rank % torch.cuda.device_count()``, a division by zero. Stating the init method and the rank
avoids that path.
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

from ..config import exchange_size
from .hydra import find_config, override_name, value_in, with_overrides, working_directory

# fairseq's console scripts, by how they make (or do not make) a process group.
#   grouped: main() runs under call_main(), which makes a process group
#   sharded: main() only reads world size and rank, to take its share of the data
#   single: one process that reads standard input
#   hydra: grouped, with key=value overrides instead of flags
_KINDS = {
    "fairseq-train": "grouped",
    "fairseq-validate": "grouped",
    "fairseq-eval-lm": "grouped",
    "fairseq-hydra-train": "hydra",
    "fairseq-generate": "sharded",
    "fairseq-interactive": "single",
}
TRAINING = ("fairseq-train", "fairseq-hydra-train")
# sections of Hydra's config; others are in distributed_training
_SECTION = {
    "cpu": "common",
    "moe_expert_count": "model",
    "moe_expert_parallel_size": "model",
    "moe_freq": "model",
}
_ALIASES = {"local_rank": "device_id"}
_FALSE, _TRUE = ("false", "0", "no", "off"), ("true", "1", "yes", "on")


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
            return f"{_SECTION.get(key, 'distributed_training')}.{key}"
        return "--" + key.replace("_", "-")

    def stated(self, key: str) -> str | None:
        """Return the given value, or the config file's; None if there is neither."""
        section = _SECTION.get(key, "distributed_training")
        return self.given.get(key, value_in(self.config, section, key))

    def number(self, key: str, *, in_file: bool = False) -> int | None:
        """Return a value as a number; None if there is none, or one that only Hydra can resolve."""
        text = self.stated(key) if in_file else self.given.get(key)
        if text is None or "${" in text or text in ("null", "None"):
            return None
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{self.spelled(key)} {text}: not a number") from None


def _console_script(word: str) -> str | None:
    """Return the console script of fairseq_cli.X or .../fairseq_cli/X.py, None for other words."""
    match = re.search(r"(?:^|/)fairseq_cli(?:/(\w+)\.py|\.(\w+))$", word)
    name = match and "fairseq-" + (match[1] or match[2]).replace("_", "-")
    return name if name in _KINDS else None


def _after_interpreter(words: Sequence[str]) -> tuple[str | None, int]:
    """Return the script of ``python [flags] -m fairseq_cli.X``, and how many words start it."""
    i = 1
    while i < len(words) and words[i].startswith("-") and words[i] not in ("-m", "-c"):
        i += 2 if words[i] in ("-W", "-X") else 1
    i += words[i : i + 1] == ["-m"]
    name = _console_script(words[i]) if i < len(words) else None
    return (name, i + 1) if name else (None, 1)


def _find_program(word: str, path: str | None) -> tuple[str, ...]:
    """Return the words that start ``word`` on this machine."""
    found = shutil.which(word, path=path)
    if found:
        return (found,)
    if os.sep not in word:
        beside = Path(sys.executable).with_name(word)  # a virtual environment not activated
        if os.access(beside, os.X_OK):
            return (str(beside),)
    if word.endswith(".py") and os.path.isfile(word):
        return (sys.executable, word)
    raise ValueError(f"cannot find the command {word!r} (not on PATH, not an executable file)")


def parse_command(words: Sequence[str], path: str | None = None) -> Command:
    """Read the words after ``--``; ``path`` replaces $PATH. ValueError if no program is found."""
    if not words:
        raise ValueError("no command given; put it after --, as in: -- fairseq-train DATA ...")
    base = os.path.basename(words[0])
    name, start = base if base in _KINDS else _console_script(words[0]), 1
    if re.fullmatch(r"(python|pypy)[\d.]*", base):
        name, start = _after_interpreter(words)
    program = _find_program(words[0], path) + tuple(words[1:start])
    arguments = words[start:]
    if name is None:
        return Command(None, program, tuple(arguments))
    if _KINDS[name] != "hydra":
        return Command(name, program, tuple(arguments), _flags(arguments))
    arguments, config = find_config(arguments)
    return Command(name, program, tuple(arguments), _overrides(arguments), config)


def _flags(words: Sequence[str]) -> dict[str, str]:
    """Read ``--some-flag value`` and ``--some-flag=value`` as some_flag -> value."""
    found = {}
    for i, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, text = word[2:].partition("=")
        follower = words[i + 1] if i + 1 < len(words) else "--"
        value = text if equals else ("true" if follower.startswith("--") else follower)
        key = name.replace("-", "_")
        found[_ALIASES.get(key, key)] = value
    return found


def _overrides(words: Sequence[str]) -> dict[str, str]:
    """Read ``[+]section.key=value`` of the sections that matter here as key -> value."""
    found = {}
    for word in words:
        section, dot, key = override_name(word).rpartition(".")
        if "=" in word and dot and section == _SECTION.get(key, "distributed_training"):
            found[key] = word.partition("=")[2].strip("'\"")
    return found


def _require(command: Command, key: str, ours: str, why: str) -> None:
    user = command.given.get(key)
    if user is None or "${" in user or user.lower() == ours.lower():
        return
    if not (user.lstrip("-").isdigit() and ours.isdigit() and int(user) == int(ours)):
        raise ValueError(f"{command.spelled(key)}={user} contradicts {why} ({ours})")


def use_cpu(command: Command, num_gpus: int) -> bool:
    """Return whether there is no GPU, or options or config file choose the CPU."""
    user = (command.stated("cpu") if num_gpus else command.given.get("cpu")) or ""
    if num_gpus == 0 and user.lower() in _FALSE:
        raise ValueError(f"{command.spelled('cpu')}={user}, but this machine has no usable GPU")
    return num_gpus == 0 or user.lower() in _TRUE


def check_experts(command: Command, world_size: int) -> None:
    """Raise ValueError if the command or its config file states experts that do not fit."""
    keys = ("moe_freq", "moe_expert_count", "moe_expert_parallel_size")
    if command.name in TRAINING:
        freq, experts, size = (command.number(key, in_file=True) for key in keys)
        if freq != 0:
            exchange_size(experts or world_size, world_size, size or 0)


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
    beside = [Path(folder) for folder in fairseq.submodule_search_locations] if fairseq else []
    folders = [Path(), *beside, *(folder.parent for folder in beside)]
    # an interpreter of the ranks' own, too, may have a package of that name
    is_package = user_dir.isidentifier() and find_spec(user_dir) is not None
    if not is_package and not any((folder / user_dir).exists() for folder in folders):
        raise ValueError(f"--user-dir {user_dir}: there is no such folder, here or beside fairseq")


def rank_options(
    command: Command, *, rank: int, world_size: int, device: int, shared_node: bool, cpu: bool
) -> dict[str, str | None]:
    """Return the options that a rank needs and the user did not give, by key; None: a bare flag."""
    if command.kind == "script":
        return {}
    if command.kind == "single" and world_size > 1:
        raise ValueError(f"{command.name} runs in one process: use --nproc-per-node 1")
    results = command.given.get("results_path")
    if command.kind == "sharded" and results is not None and world_size > 1:
        raise ValueError(
            f"--results-path {results} is one file, which each of {world_size} ranks would "
            "overwrite: use --nproc-per-node 1, or leave it out"
        )
    wanted: dict[str, str | None] = {"distributed_world_size": str(world_size)}
    _require(command, "distributed_world_size", str(world_size), "the number of ranks started")
    if world_size > 1:
        _require(command, "distributed_rank", str(rank), "the rank of this process")
    if command.kind == "sharded":
        wanted["distributed_rank"] = str(rank)
    elif command.kind in ("grouped", "hydra"):
        if shared_node and not cpu:
            _require(command, "device_id", str(device), "the GPU of this rank")
        _require(command, "distributed_no_spawn", "true", "that the launcher starts the ranks")
        wanted["device_id"] = str(device)
        if world_size > 1 or "distributed_init_method" in command.given:
            wanted["distributed_init_method"] = "env://"
            wanted["distributed_rank"] = str(rank)
            wanted["distributed_no_spawn"] = None
            wanted["distributed_backend"] = "gloo" if cpu else "nccl"
    if cpu:
        wanted["cpu"] = None
        if command.kind != "sharded":
            # fairseq 0.12.2 makes a group, by default of nccl, also of a single rank
            wanted["distributed_backend"] = "gloo"
    return {key: value for key, value in wanted.items() if key not in command.given}


def with_options(command: Command, options: Mapping[str, str | None]) -> list[str]:
    """Return the full command line: the user's words with ``options`` added."""
    words = list(command.arguments)
    if command.kind == "hydra":
        added = [f"{command.spelled(k)}={'true' if v is None else v}" for k, v in options.items()]
        added += working_directory(words, command.config)
        return [*command.program, *with_overrides(words, added)]
    added = []
    for key, value in options.items():
        added += [command.spelled(key)] + ([] if value is None else [value])
    return [*command.program, *words, *added]
