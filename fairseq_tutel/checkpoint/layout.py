"""Names: the files of a checkpoint set, and the experts in the keys of a state dict.

The layout is that of Meta's fairseq branch ``moe``: ``X.pt`` names a set made of ``X-shared.pt``
(dense parameters, the gates among them) and ``X-rank-N.pt`` (the experts of rank N, numbered from 0
in each file). A merged file is one plain ``X.pt`` with global expert numbers.

E global experts; S neighbouring ranks hold them all, min(E, W) of W unless a run chooses fewer:
rank r holds experts [j*E/S, (j+1)*E/S) with j = r % S. The first S ranks write a file each, so a
set has S rank files.

Functions on "entries" take any dict keyed by parameter names, whatever the values: the tensors of
a model, or the optimizer state of each parameter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from .errors import CheckpointError

Value = TypeVar("Value")
Role = str | int  # "merged", "shared", or the number of a rank file

MERGED = "merged"
SHARED = "shared"

EXPERT_KEY = re.compile(r"((?:.*\.)?experts\.)(\d+)(\..*)")
_MEMBER_FILE = re.compile(r"(?P<stem>.+)-(?:shared|rank-(?P<rank>\d+))\.pt")
_SUFFIX = ".pt"


@dataclass(frozen=True)
class CheckpointSet:
    """Where the files of the checkpoint ``directory/stem.pt`` are, whether or not they exist."""

    directory: str
    stem: str

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> CheckpointSet:
        """The set that X.pt, X-shared.pt or X-rank-N.pt belongs to.

        Raises:
            CheckpointError: the name does not end in .pt.
        """
        directory, name = os.path.split(os.fspath(path))
        if not name.endswith(_SUFFIX) or name == _SUFFIX:
            raise CheckpointError(f"not the name of a checkpoint: {path!r} (expected NAME.pt)")
        member = _MEMBER_FILE.fullmatch(name)
        return cls(directory, member["stem"] if member else name[: -len(_SUFFIX)])

    @property
    def path(self) -> str:
        """The canonical name X.pt; also the place of a merged file."""
        return self._in_directory(self.stem + _SUFFIX)

    @property
    def shared_path(self) -> str:
        return self.path_of(SHARED)

    @property
    def commit_path(self) -> str:
        """The redo log of a save that may not have finished; see ``commit.py``."""
        return self.path + ".commit"

    def rank_path(self, rank: int) -> str:
        return self.path_of(rank)

    def name_of(self, role: Role) -> str:
        """File name of a member, without the directory."""
        if role == MERGED:
            return self.stem + _SUFFIX
        return f"{self.stem}-{SHARED if role == SHARED else f'rank-{role}'}{_SUFFIX}"

    def path_of(self, role: Role) -> str:
        return self._in_directory(self.name_of(role))

    def role_of(self, name: str) -> Role | None:
        """What the file ``name`` is to this set; None if it is not a member."""
        if name == self.stem + _SUFFIX:
            return MERGED
        member = _MEMBER_FILE.fullmatch(name)
        if member is None or member["stem"] != self.stem:
            return None
        return SHARED if member["rank"] is None else int(member["rank"])

    def same_place(self, other: CheckpointSet) -> bool:
        """Whether both name the same set, through whatever path."""
        return os.path.realpath(self.directory or ".") == os.path.realpath(
            other.directory or "."
        ) and (self.stem == other.stem)

    def _in_directory(self, name: str) -> str:
        return os.path.join(self.directory, name)


def check_divisible(num_experts: int, world_size: int) -> None:
    """Raises CheckpointError, with both values, unless E experts can live on W ranks."""
    if num_experts < 1 or world_size < 1:
        raise CheckpointError(
            f"need at least one expert and one rank, got {num_experts} experts, {world_size} ranks"
        )
    if num_experts % world_size and world_size % num_experts:
        raise CheckpointError(
            f"{num_experts} experts cannot be placed on {world_size} ranks: "
            "one number must divide the other"
        )


def experts_of_rank(
    rank: int, world_size: int, num_experts: int, expert_parallel_size: int = 0
) -> range:
    """Global numbers of the experts that one rank holds.

    Raises:
        CheckpointError: E, W and S do not divide.
    """
    size = count_rank_files(num_experts, world_size, expert_parallel_size)
    local = num_experts // size
    return range(rank % size * local, (rank % size + 1) * local)


def count_rank_files(num_experts: int, world_size: int, expert_parallel_size: int = 0) -> int:
    """How many rank files a set has, S, since replicas are written once.

    Args:
        num_experts, world_size: E, W.
        expert_parallel_size: S; 0: min(E, W).
    """
    if expert_parallel_size:
        if num_experts % expert_parallel_size or world_size % expert_parallel_size:
            raise CheckpointError(
                f"{num_experts} experts cannot be placed on every {expert_parallel_size} of "
                f"{world_size} ranks: {expert_parallel_size} must divide both"
            )
        return expert_parallel_size
    check_divisible(num_experts, world_size)
    return min(num_experts, world_size)


def split_key(key: str) -> tuple[str, int, str] | None:
    """(prefix up to and with "experts.", expert number, rest), or None for a dense parameter."""
    match = EXPERT_KEY.fullmatch(key)
    return (match[1], int(match[2]), match[3]) if match else None


def split_dense_expert(entries: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, Value]]:
    """The dense entries and the expert entries, each in their order."""
    dense: dict[str, Value] = {}
    expert: dict[str, Value] = {}
    for key, value in entries.items():
        (dense if split_key(key) is None else expert)[key] = value
    return dense, expert


def slice_experts(entries: Mapping[str, Value], *, first: int, wanted: range) -> dict[str, Value]:
    """Keep the ``wanted`` experts, renumbered from 0.

    Args:
        entries: expert entries; number j in a key stands for global expert first + j.
        first: global number of expert 0 of ``entries``.
        wanted: global numbers to keep; wanted.start becomes expert 0.
    """
    kept = {}
    for key, value in entries.items():
        prefix, index, rest = _parse_expert(key)
        if first + index in wanted:
            kept[f"{prefix}{first + index - wanted.start}{rest}"] = value
    return kept


def expert_shapes(entries: Mapping[str, Any], where: str) -> tuple[int, dict[str, str]]:
    """Number of experts in ``entries``, and the shape of each parameter of an expert.

    Args:
        entries: expert tensors, any numbering from 0.
        where: names the file in errors.

    Returns:
        (E, {key with "*" for the number: shape and dtype, as text}); (0, {}) for no entries.

    Raises:
        CheckpointError: numbers that are not 0..E-1, or experts that differ in parameters or shape.
    """
    return _alike(entries, where, _shape_text)


def expert_states(entries: Mapping[str, Any], where: str) -> tuple[int, dict[str, str]]:
    """As :func:`expert_shapes`, of the names of what an optimizer keeps for each parameter."""
    return _alike(entries, f"{where}: optimizer state", lambda state: str(sorted(map(str, state))))


def check_same(
    forms: Mapping[str, str], expected: Mapping[str, str], where: str, like: str
) -> None:
    """Raises CheckpointError naming a parameter by which ``where`` differs from ``like``."""
    for key in sorted(set(forms) | set(expected)):
        if forms.get(key) != expected.get(key):
            raise CheckpointError(
                f"{where} differs from {like} in {key}: "
                f"{forms.get(key, 'absent')} against {expected.get(key, 'absent')}"
            )


def gate_experts(
    dense: Mapping[str, Any], expert_keys: Iterable[str], null_experts: int = 0
) -> int | None:
    """E by the rows of the gates, whose weights [E + N, M] are named like the experts' layer.

    Returns None if the layers have no such gate. Raises CheckpointError if the layers differ.

    Args:
        null_experts: N, outputs of a gate that lead to no expert.
    """
    prefixes = {split_key(key)[0] for key in expert_keys if split_key(key) is not None}
    rows = {}
    for prefix in prefixes:
        gate = prefix[: -len("experts.")] + "gate.wg.weight"
        if gate in dense:
            rows[gate] = dense[gate].shape[0] - null_experts
    if len(set(rows.values())) > 1:
        raise CheckpointError(f"the MoE layers differ in their number of experts: {rows}")
    return next(iter(rows.values()), None)


def _parse_expert(key: str) -> tuple[str, int, str]:
    parsed = split_key(key)
    if parsed is None:
        raise CheckpointError(f"not a parameter of an expert: {key!r}")
    return parsed


def _alike(
    entries: Mapping[str, Any], where: str, form: Callable[[Any], str]
) -> tuple[int, dict[str, str]]:
    """Number of experts, and the form of each of their entries, which all have in common."""
    experts: dict[int, dict[str, str]] = {}
    for key, value in entries.items():
        prefix, index, rest = _parse_expert(key)
        experts.setdefault(index, {})[f"{prefix}*{rest}"] = form(value)
    if not experts:
        return 0, {}
    absent = sorted(set(range(max(experts) + 1)) - set(experts))
    if absent:
        raise CheckpointError(f"{where}: has experts {sorted(experts)} but lacks {absent}")
    for index, forms in experts.items():
        check_same(forms, experts[0], f"{where}: expert {index}", "expert 0")
    return len(experts), experts[0]


def _shape_text(tensor: Any) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
