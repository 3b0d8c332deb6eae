"""Names: the files of a checkpoint set, and the experts in the keys of a state dict.

The layout is that of Meta's fairseq branch ``moe``: a set of ``X-shared.pt`` (dense parameters,
including the gates) and ``X-rank-N.pt`` (the experts of rank N, numbered from 0 in each file). A
merged file is one plain ``X.pt`` with global expert numbers. ``index.py`` gives a set its name.

With E experts, P neighbouring ranks hold them all; P is min(E, W) of W ranks unless a run chooses
fewer. Rank r holds experts [j*E/P, (j+1)*E/P) with j = r % P. The first P ranks write a file each.
"Entries" are a dict keyed by parameter names: tensors of a model, or optimizer states.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ..config import exchange_size

Value = TypeVar("Value")
Role = str | int  # "merged", "shared", or the number of a rank file

MERGED = "merged"
SHARED = "shared"

_EXPERT_KEY = re.compile(r"((?:.*\.)?experts\.)(\d+)(\..*)")
_ALIAS = ".cmr_layer.moe_layer."
_FILE = re.compile(r"(?P<stem>.+?)(?P<member>-shared|-rank-(?P<rank>\d+))?\.pt")


class CheckpointError(ValueError):
    """Failure to read or write a checkpoint; the message names the file and what to do."""


@dataclass(frozen=True)
class CheckpointSet:
    """Location of the files of the checkpoint ``directory/stem.pt``, whether or not they exist."""

    directory: str
    stem: str

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> CheckpointSet:
        """Return the set of X.pt, X-shared.pt or X-rank-N.pt; CheckpointError for other names."""
        directory, name = os.path.split(os.fspath(path))
        file = _FILE.fullmatch(name)
        if file is None:
            raise CheckpointError(f"not the name of a checkpoint: {path!r} (expected NAME.pt)")
        return cls(directory, file["stem"])

    @property
    def path(self) -> str:
        """Canonical name X.pt; also the path of a merged file."""
        return self.path_of(MERGED)

    def name_of(self, role: Role) -> str:
        """Return the file name of a member, without the directory."""
        ending = {MERGED: "", SHARED: "-shared"}.get(role, f"-rank-{role}")
        return f"{self.stem}{ending}.pt"

    def path_of(self, role: Role) -> str:
        return os.path.join(self.directory, self.name_of(role))

    def role_of(self, name: str) -> Role | None:
        """Return the role of the file ``name`` in this set; None if it is not a member."""
        file = _FILE.fullmatch(name)
        if file is None or file["stem"] != self.stem:
            return None
        if file["rank"] is not None:
            return int(file["rank"])
        return SHARED if file["member"] else MERGED

    def files(self) -> dict[Role, str]:
        """Return the paths of the files that are there; {} without the directory."""
        try:
            names = os.listdir(self.directory or ".")
        except FileNotFoundError:
            return {}
        found = {self.role_of(name): os.path.join(self.directory, name) for name in names}
        return {role: path for role, path in found.items() if role is not None}


def count_rank_files(num_experts: int, world_size: int, expert_parallel_size: int = 0) -> int:
    """Return the number of rank files: P if chosen, else min(E, W); CheckpointError if no fit."""
    try:
        return exchange_size(num_experts, world_size, expert_parallel_size)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def experts_of_rank(
    rank: int, world_size: int, num_experts: int, expert_parallel_size: int = 0
) -> range:
    """Return global numbers of the experts of one rank; errors as :func:`count_rank_files`."""
    size = count_rank_files(num_experts, world_size, expert_parallel_size)
    local = num_experts // size
    return range(rank % size * local, (rank % size + 1) * local)


def split_key(key: str) -> tuple[str, int, str] | None:
    """Return (prefix including "experts.", expert number, rest), or None for a dense parameter."""
    match = _EXPERT_KEY.fullmatch(key)
    return (match[1], int(match[2]), match[3]) if match else None


def without_aliases(entries: Mapping[str, Value]) -> dict[str, Value]:
    """Drop the second names that the branch ``nllb`` stores for MoE layers (``cmr_layer``)."""
    return {key: value for key, value in entries.items() if _ALIAS not in key}


def split_dense_expert(entries: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, Value]]:
    """Return the dense entries and the expert entries, each in their order."""
    dense: dict[str, Value] = {}
    expert: dict[str, Value] = {}
    for key, value in entries.items():
        (dense if split_key(key) is None else expert)[key] = value
    return dense, expert


def select_experts(entries: Mapping[str, Value], *, first: int, wanted: range) -> dict[str, Value]:
    """Keep the ``wanted`` experts, renumbered from 0; key number j is global expert first + j."""
    kept = {}
    for key, value in entries.items():
        prefix, index, rest = _of_expert(key, "experts")
        if first + index in wanted:
            kept[f"{prefix}{first + index - wanted.start}{rest}"] = value
    return kept


def expert_forms(entries: Mapping[str, Any], where: str) -> tuple[int, dict[str, str]]:
    """Return the number of experts in the entries of a file, and the form that all of them have.

    The form maps each key, with "*" for the expert's number, to its shape and dtype, or to the
    names of its optimizer state. CheckpointError for dense entries, missing or unequal experts.
    """
    experts: dict[int, dict[str, str]] = {}
    for key, value in entries.items():
        prefix, index, rest = _of_expert(key, where)
        experts.setdefault(index, {})[f"{prefix}*{rest}"] = form(value)
    absent = sorted(set(range(max(experts, default=0))) - set(experts))
    if absent:
        raise CheckpointError(f"{where}: has experts {sorted(experts)} but lacks {absent}")
    for index, forms in experts.items():
        check_same(forms, experts[0], f"{where}: expert {index}", "expert 0")
    return len(experts), experts.get(0, {})


def check_same(
    forms: Mapping[str, str], expected: Mapping[str, str], where: str, like: str
) -> None:
    """Raise CheckpointError naming a parameter by which ``where`` differs from ``like``."""
    for key in sorted(set(forms) | set(expected)):
        if forms.get(key) != expected.get(key):
            both = f"{forms.get(key, 'absent')} against {expected.get(key, 'absent')}"
            raise CheckpointError(f"{where} differs from {like} in {key}: {both}")


def gate_experts(
    dense: Mapping[str, Any], expert_keys: Iterable[str], null_experts: int = 0
) -> int | None:
    """Return E from the gates' weights, [E + N, M]; None if the layers have no such weights."""
    layers = {_of_expert(key, "gates")[0].removesuffix("experts.") for key in expert_keys}
    gates = {f"{layer}gate.wg.weight" for layer in layers}
    found = {gate: (*dense[gate].shape, 0)[0] for gate in sorted(gates) if gate in dense}
    rows = {gate: count - null_experts for gate, count in found.items()}
    if len(set(rows.values())) > 1:
        raise CheckpointError(f"the MoE layers differ in their number of experts: {rows}")
    return next(iter(rows.values()), None)


def check_gates(
    dense: Mapping[str, Any], expert_keys: Iterable[str], outputs: int, where: str
) -> None:
    """Raise CheckpointError for a tensor of a built-in router without a row for each output."""
    layers = {_of_expert(key, "gates")[0].removesuffix("experts.") for key in expert_keys}
    for layer in sorted(layers):
        for name in (f"{layer}gate.{part}" for part in ("wg.weight", "expert_dirs", "load_bias")):
            rows = dense.get(name)
            if rows is not None and (*rows.shape, 0)[0] != outputs:
                wanted = f"not with a row for each of the router's {outputs} outputs"
                raise CheckpointError(f"{where}: {name} is {form(rows)}, {wanted}")


def _of_expert(key: str, where: str) -> tuple[str, int, str]:
    parsed = split_key(key)
    if parsed is None:
        raise CheckpointError(f"{where}: {key!r} is not of an expert")
    return parsed


def form(value: Any) -> str:
    """Return shape and dtype of a tensor, or the names of an optimizer state, as text."""
    if isinstance(value, Mapping):
        return str(sorted(map(str, value)))
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
