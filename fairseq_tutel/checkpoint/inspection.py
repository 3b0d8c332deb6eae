"""What is in a checkpoint, and whether its files belong together. Reads no tensor data."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch

from .checksums import damaged_member
from .commit import read_record, temporary_files, visible_files
from .errors import CheckpointError
from .layout import MERGED, SHARED, CheckpointSet, Role, split_key
from .load import SetReader, load_state
from .state import METADATA, MODEL, NAMED_STATE, OPTIMIZER, check_complete, is_of_fairseq

# fairseq's models mark their version by tensors of one element, which are no parameters
_MARKS = {"version", "_float_tensor"}


def inspect(path: str, *, verify: bool = False) -> dict[str, Any]:
    """Describe a set or a merged file.

    Args:
        path: X.pt, X-shared.pt or X-rank-N.pt.
        verify: also read every byte and check the checksums stored in the files.

    Returns:
        A dict of plain values: path, kind ("set" or "merged"), written_by, save_id, world_size,
        num_rank_files, num_experts, moe_layers, params_dense, params_expert and params_total
        (numbers of elements, as the trainer counts them; experts of all ranks, each once), dtypes
        {name: elements}, num_updates, epoch, optimizer_state ("by name", "foreign" or "none"),
        size_on_disk (bytes), files (a list of dicts: name, size, rank, experts, params, save_id,
        problem), unfinished_save, temporary_files, problems (texts) and consistent. Values that
        cannot be known are None.

    Raises:
        CheckpointError: no file of that name at all.
    """
    cset = CheckpointSet.from_path(path)
    files = visible_files(cset)
    if not files:
        SetReader(path)  # raises with what is missing, and hints at files of similar names
    problems: list[str] = []
    contents: dict[Role, dict[str, Any]] = {}
    rows = []
    for role in sorted(files, key=_order):
        contents[role], problem = _read(files[role], verify)
        if problem:
            problems.append(problem)
        rows.append(_describe_file(cset, role, files[role], contents[role], problem))
    reader, reading_problems = _check_together(path)
    problems += [problem for problem in reading_problems if problem not in problems]
    problems += _superfluous(reader, files, cset)
    return {
        "path": cset.path,
        "kind": reader.kind if reader else (MERGED if set(files) == {MERGED} else "set"),
        **_describe_reader(reader),
        **_describe_content(contents, reader),
        "size_on_disk": sum(row["size"] for row in rows),
        "files": rows,
        "unfinished_save": read_record(cset) is not None,
        "temporary_files": temporary_files(cset),
        "problems": problems,
        "consistent": not problems,
    }


def _order(role: Role) -> tuple[int, int]:
    return (1, role) if isinstance(role, int) else (0, 0)


def _read(path: str, verify: bool) -> tuple[dict[str, Any], str | None]:
    try:
        content, _ = load_state(path)
        damaged = damaged_member(path) if verify else None
    except CheckpointError as error:
        return {}, str(error)
    if damaged is not None:
        return content, f"{path}: is damaged: wrong checksum of {damaged}"
    return content, None


def _check_together(path: str) -> tuple[SetReader | None, list[str]]:
    """Open the set as loading would; every rank file is tried, so all problems are found."""
    try:
        reader = SetReader(path)
    except CheckpointError as error:
        return None, [str(error)]
    problems = []
    if is_of_fairseq(reader.shared):
        try:
            check_complete(reader.shared, reader.files[MERGED if reader.kind == MERGED else SHARED])
        except CheckpointError as error:
            problems.append(str(error))
    if reader.kind != MERGED:
        for number in range(reader.num_rank_files):
            try:
                reader.rank_content(number)
            except CheckpointError as error:
                problems.append(str(error))
    return reader, problems


def _superfluous(
    reader: SetReader | None, files: dict[Role, str], cset: CheckpointSet
) -> list[str]:
    if reader is None or reader.kind == MERGED or reader.metadata is None:
        return []
    extra = [role for role in files if isinstance(role, int) and role >= reader.num_rank_files]
    return [
        f"{cset.path_of(role)}: superfluous: the set has {reader.num_rank_files} rank files"
        for role in sorted(extra)
    ]


def _describe_file(
    cset: CheckpointSet, role: Role, path: str, content: dict[str, Any], problem: str | None
) -> dict[str, Any]:
    model = content.get(MODEL)
    model = model if isinstance(model, dict) else {}
    indices = {parsed[1] for key in model if (parsed := split_key(key))}
    metadata = content.get(METADATA)
    metadata = metadata if isinstance(metadata, dict) else {}
    return {
        "name": os.path.basename(path),
        "member": cset.name_of(role),
        "size": os.path.getsize(path),
        "rank": role if isinstance(role, int) else None,
        "experts": len(indices),
        "params": sum(tensor.numel() for tensor in _parameters(model).values()),
        "save_id": metadata.get("save_id"),
        "problem": problem,
    }


def _describe_reader(reader: SetReader | None) -> dict[str, Any]:
    metadata = reader.metadata if reader else None
    return {
        "written_by": (
            None
            if reader is None
            else f"fairseq_tutel, format {metadata.format_version}"
            if metadata
            else "another program (no moe_checkpoint metadata)"
        ),
        "save_id": metadata.save_id if metadata else None,
        "world_size": metadata.world_size if metadata else None,
        "num_rank_files": reader.num_rank_files if reader and reader.kind != MERGED else None,
        "num_experts": reader.num_experts if reader else None,
    }


def _describe_content(
    contents: dict[Role, dict[str, Any]], reader: SetReader | None
) -> dict[str, Any]:
    counted = _counted_roles(contents, reader)
    dense: Counter[str] = Counter()
    expert: Counter[str] = Counter()
    layers = set()
    for role in counted:
        for key, tensor in _parameters(contents[role].get(MODEL) or {}).items():
            parsed = split_key(key)
            (dense if parsed is None else expert)[_dtype_name(tensor)] += tensor.numel()
            if parsed is not None:
                layers.add(parsed[0].removesuffix(".experts.").removesuffix(".moe_layer"))
    main = contents.get(SHARED) or contents.get(MERGED) or next(iter(contents.values()), {})
    history = main.get("optimizer_history") or [{}]
    iterator = (main.get("extra_state") or {}).get("train_iterator") or {}
    return {
        "moe_layers": sorted(layers, key=_natural),
        "params_dense": dense.total(),
        "params_expert": expert.total(),
        "params_total": dense.total() + expert.total(),
        "dtypes": dict(dense + expert),
        "num_updates": history[-1].get("num_updates"),
        "epoch": iterator.get("epoch"),
        "optimizer_state": _optimizer_kind(main.get(OPTIMIZER)),
    }


def _counted_roles(contents: dict[Role, Any], reader: SetReader | None) -> list[Role]:
    """Files whose parameters count: replicas of Meta's E < W runs and stale files do not."""
    if reader is None:
        return list(contents)
    if reader.kind == MERGED:
        return [MERGED]
    return [role for role in (SHARED, *range(reader.num_rank_files)) if role in contents]


def _optimizer_kind(optimizer: Any) -> str:
    if optimizer is None:
        return "none"
    return "by name" if isinstance(optimizer, dict) and NAMED_STATE in optimizer else "foreign"


def _parameters(model: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Each tensor that the trainer counts, once: tied weights have two names and one storage."""
    distinct: dict[tuple, tuple[str, torch.Tensor]] = {}
    for key, tensor in model.items():
        if isinstance(tensor, torch.Tensor) and key.rpartition(".")[2] not in _MARKS:
            identity = (tensor.data_ptr(), tensor.shape, tensor.stride())
            distinct.setdefault(identity if tensor.numel() else (key,), (key, tensor))
    return dict(distinct.values())


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]
