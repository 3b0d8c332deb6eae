"""Recognises fairseq's commands and gives each rank the options it needs.

Stock fairseq cannot start several ranks on a CPU: with torchrun's variables set it computes
``rank % torch.cuda.device_count()``, a division by zero (fairseq/distributed/utils.py,
_infer_torch_distributed_launch_init). Stating the init method and the rank avoids that path.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .hydra import (
    config_file,
    override_name,
    value_in_file,
    with_overrides,
    with_shipped_configs,
    working_directory,
)

# fairseq's console scripts, by how they make (or do not make) a process group.
#   grouped: main() runs under call_main(), which makes a process group
#   sharded: main() only reads world size and rank, to take its share of the data
#   single: one process that reads standard input
#   hydra: grouped, with key=value overrides instead of flags
_COMMANDS = {
    "fairseq-train": "grouped",
    "fairseq-validate": "grouped",
    "fairseq-eval-lm": "grouped",
    "fairseq-hydra-train": "hydra",
    "fairseq-generate": "sharded",
    "fairseq-interactive": "single",
}
TRAINING = ("fairseq-train", "fairseq-hydra-train")
_SECTION = {
    "cpu": "common",
    "user_dir": "common",
    "moe_expert_count": "model",
    "moe_expert_parallel_size": "model",
    "moe_freq": "model",
    "moe_overlap_degree": "model",
}
_PACKAGE = __name__.partition(".")[0]
_FLAG_ALIASES = {"device_id": ("--device-id", "--local_rank")}


@dataclass(frozen=True)
class Command:
    """name: fairseq's console script, or None for any other script; program: the words that
    start it; arguments: the user's, untouched."""

    name: str | None
    program: tuple[str, ...]
    arguments: tuple[str, ...]

    @property
    def kind(self) -> str:
        return _COMMANDS.get(self.name or "", "script")

    @property
    def imports_this_package(self) -> bool:
        """Whether the command or its config file names this package as --user-dir."""
        given = self.given("user_dir")
        if given is None:
            given, _ = _from_config_file(self, "user_dir") or ("", "")
        return Path(given).name == _PACKAGE

    def spelled(self, key: str) -> str:
        """How a user of this command writes the option ``key``."""
        if self.kind == "hydra":
            return f"{_SECTION.get(key, 'distributed_training')}.{key}"
        return _FLAG_ALIASES.get(key, ("--" + key.replace("_", "-"),))[0]

    def stated(self, key: str) -> str | None:
        """What is given, or what the Hydra config file states; None if neither does."""
        value = self.given(key)
        if value is None and (found := _from_config_file(self, key)):
            value = found[0]
        return value

    def given(self, key: str) -> str | None:
        """The user's last value for ``key``: "true" for a bare flag, None if not given."""
        if self.kind == "script":
            return None
        return self._given_override(key) if self.kind == "hydra" else self._given_flag(key)

    def _given_override(self, key: str) -> str | None:
        value = None
        for word in self.arguments:
            _, equals, text = word.partition("=")
            if equals and override_name(word) == self.spelled(key):
                value = text.strip("'\"")
        return value

    def _given_flag(self, key: str) -> str | None:
        flags, value = _FLAG_ALIASES.get(key, (self.spelled(key),)), None
        for i, word in enumerate(self.arguments):
            name, equals, text = word.partition("=")
            if name not in flags:
                continue
            follower = self.arguments[i + 1] if i + 1 < len(self.arguments) else "--"
            value = text if equals else ("true" if follower.startswith("--") else follower)
        return value

    def integer(self, key: str) -> int | None:
        """``given`` as a number; None also for an interpolation (``${...}``), which only Hydra
        can resolve. Raises ValueError for anything else."""
        text = self.given(key)
        if text is None or "${" in text or text in ("null", "None"):
            return None
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{self.spelled(key)} {text}: not a number") from None


def _module_of(path: str) -> str | None:
    parts = Path(path).parts
    if len(parts) >= 2 and parts[-2] == "fairseq_cli" and parts[-1].endswith(".py"):
        return parts[-1][:-3]
    return None


def _console_script(module: str) -> str | None:
    name = "fairseq-" + module.replace("_", "-")
    return name if name in _COMMANDS else None


def _after_interpreter(words: Sequence[str]) -> tuple[str, int] | None:
    """For ``python [flags] -m fairseq_cli.X`` or ``python [flags] .../fairseq_cli/X.py``: the
    console script's name and how many words start it."""
    i = 1
    while i < len(words):
        word = words[i]
        if word == "-m":
            module = words[i + 1] if i + 1 < len(words) else ""
            package, _, last = module.rpartition(".")
            name = _console_script(last) if package == "fairseq_cli" else None
            return (name, i + 2) if name else None
        if word == "-c":
            return None
        if not word.startswith("-"):
            module = _module_of(word)
            name = module and _console_script(module)
            return (name, i + 1) if name else None
        i += 2 if word in ("-W", "-X") else 1
    return None


def _find_program(word: str, path: str | None) -> tuple[str, ...]:
    """The words that start ``word`` on this machine."""
    found = shutil.which(word, path=path)
    if found:
        return (found,)
    base = os.path.basename(word)
    if os.sep not in word:
        beside = Path(sys.executable).with_name(word)  # a virtual environment not activated
        if os.access(beside, os.X_OK):
            return (str(beside),)
        if base in _COMMANDS:
            # not -m: what a plugin replaces in fairseq_cli.X must be what runs, not a __main__ copy
            module = "fairseq_cli." + base[8:].replace("-", "_")
            return (sys.executable, "-c", f"from {module} import cli_main; cli_main()")
    if word.endswith(".py") and os.path.isfile(word):
        return (sys.executable, word)
    raise ValueError(f"cannot find the command {word!r} (not on PATH, not an executable file)")


def parse_command(words: Sequence[str], path: str | None = None) -> Command:
    """What stands after ``--``. ``path`` replaces $PATH. Raises ValueError if it cannot be run."""
    if not words:
        raise ValueError("no command given; put it after --, as in: -- fairseq-train DATA ...")
    base = os.path.basename(words[0])
    if re.fullmatch(r"(python|pypy)[\d.]*", base):
        found = _after_interpreter(words)
        start = found[1] if found else 1
        program = _find_program(words[0], path) + tuple(words[1:start])
        return _command(found[0] if found else None, program, words[start:])
    module = _module_of(words[0])
    name = base if base in _COMMANDS else (_console_script(module) if module else None)
    return _command(name, _find_program(words[0], path), words[1:])


def _command(name: str | None, program: tuple[str, ...], arguments: Sequence[str]) -> Command:
    hydra = _COMMANDS.get(name or "") == "hydra"
    return Command(name, program, tuple(with_shipped_configs(arguments) if hydra else arguments))


def _same(user: str, ours: str) -> bool:
    if user.lstrip("-").isdigit() and ours.isdigit():
        return int(user) == int(ours)
    return user.lower() == ours.lower()


def _require(command: Command, key: str, ours: str, why: str) -> None:
    user = command.given(key)
    if user is not None and "${" not in user and not _same(user, ours):
        raise ValueError(f"{command.spelled(key)}={user} contradicts {why} ({ours})")


def _from_config_file(command: Command, key: str) -> tuple[str, str] | None:
    """What the Hydra config file itself states for ``key`` in its section, and the file's name."""
    path = config_file(command.arguments) if command.kind == "hydra" else None
    value = value_in_file(path, _SECTION[key], key) if path else None
    return (value, str(path)) if value is not None else None


def use_cpu(command: Command, num_gpus: int) -> bool:
    """Whether the ranks run on the CPU: without a GPU, and where the user's options or config file
    choose it. Raises ValueError for options that this machine cannot satisfy.
    """
    user = command.given("cpu")
    from_file = _from_config_file(command, "cpu") if num_gpus and user is None else None
    user = (from_file[0] if from_file else user or "").lower()
    if num_gpus == 0 and user in ("false", "0", "no", "off"):
        raise ValueError(f"{command.spelled('cpu')}={user}, but this machine has no usable GPU")
    cpu = num_gpus == 0 or user in ("true", "1", "yes", "on")
    backend = command.given("distributed_backend")
    if cpu and backend == "nccl":
        reason = "this machine has no usable GPU" if num_gpus == 0 else command.spelled("cpu")
        raise ValueError(
            f"{command.spelled('distributed_backend')}=nccl contradicts {reason}; use gloo"
        )
    return cpu


def _stated(command: Command, key: str) -> tuple[int, str]:
    """A number of the command or its config file, 0 if there is none, and where it stands."""
    value, where = command.integer(key), command.spelled(key)
    if command.given(key) is None:
        text, file = _from_config_file(command, key) or ("", "")
        value, where = int(text) if text.isdigit() else None, f"{where} in {file}"
    return max(value or 0, 0), where


def check_experts(command: Command, world_size: int) -> None:
    """Checks the number of experts where the command or its config file states it.

    Raises ValueError unless the number of experts divides the world size or the other way round;
    or, if it is stated how many ranks hold all experts, unless that divides both.
    """
    if command.name not in TRAINING or command.integer("moe_freq") == 0:
        return
    experts, where = _stated(command, "moe_expert_count")
    size, where_size = _stated(command, "moe_expert_parallel_size")
    if size:
        experts, where = (experts, where) if experts else (world_size, "as many experts")
        if world_size % size or experts % size:
            raise ValueError(
                f"{where_size}={size} must divide the world size of {world_size} and "
                f"{where}={experts}: so many ranks hold all experts together"
            )
    elif experts and experts % world_size and world_size % experts:
        raise ValueError(
            f"{where}={experts} and a world size of {world_size}: neither divides the other, so "
            "the experts cannot be spread evenly over the ranks"
        )


def rank_options(
    command: Command, *, rank: int, world_size: int, device: int, shared_node: bool, cpu: bool
) -> dict[str, str | None]:
    """The options that rank ``rank`` needs and the user did not give, by key; None: a bare flag.

    device: the GPU's number on this node. shared_node: whether other ranks run on this node too.
    Raises ValueError naming both sides where the user's options contradict the rank.
    """
    if command.kind == "script":
        return {}
    if command.kind == "single" and world_size > 1:
        raise ValueError(
            f"{command.name} reads standard input in one process, but {world_size} ranks were "
            "asked for; use --nproc-per-node 1"
        )
    wanted: dict[str, str | None] = {"distributed_world_size": str(world_size)}
    _require(command, "distributed_world_size", str(world_size), "the number of ranks started")
    if world_size > 1:
        _require(command, "distributed_rank", str(rank), "the rank of this process")
    if command.kind == "sharded":
        results = command.given("results_path")
        if results is not None and world_size > 1:
            raise ValueError(
                f"--results-path {results} is one file, which each of {world_size} ranks would "
                "overwrite; use --nproc-per-node 1, or leave it out: every rank prints its share"
            )
        wanted["distributed_rank"] = str(rank)
    elif command.kind in ("grouped", "hydra"):
        if shared_node and not cpu:
            _require(command, "device_id", str(device), "the GPU of this rank")
        _require(command, "distributed_no_spawn", "true", "that the launcher starts the ranks")
        wanted["device_id"] = str(device)
        if world_size > 1 or command.given("distributed_init_method") is not None:
            wanted["distributed_init_method"] = "env://"
            wanted["distributed_rank"] = str(rank)
            wanted["distributed_no_spawn"] = None
            wanted["distributed_backend"] = "gloo" if cpu else "nccl"
    if cpu:
        wanted["cpu"] = None
        if command.kind != "sharded":
            # fairseq 0.12.2 makes a group, by default of nccl, also of a single rank
            wanted["distributed_backend"] = "gloo"
    return {key: value for key, value in wanted.items() if command.given(key) is None}


def with_options(command: Command, options: Mapping[str, str | None]) -> list[str]:
    """The full command line: the user's words with ``options`` added."""
    words = list(command.arguments)
    if command.kind == "hydra":
        added = [f"{command.spelled(k)}={'true' if v is None else v}" for k, v in options.items()]
        added += working_directory(words)
        return [*command.program, *with_overrides(words, added)]
    added = []
    for key, value in options.items():
        added += [command.spelled(key)] + ([] if value is None else [value])
    return [*command.program, *words, *added]
