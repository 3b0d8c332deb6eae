"""Describe a checkpoint and check that its files belong together. Reads no tensor data."""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from . import state
from .index import read_index, visible_files
from .io import verify_file
from .layout import MERGED, SHARED, CheckpointError, CheckpointSet, Role, split_key
from .reader import SetReader, load_state


def inspect(path: str, *, verify: bool = False) -> dict[str, Any]:
    """Describe a set or a merged file.

    Args:
        path: name of the set or of one of its files; CheckpointError if there is none.
        verify: also read every byte and check the checksums stored in the files.

    Returns:
        A dict of plain values, None if unknown. ``kind``: "set" or "merged". ``replicas``: rank
        files that repeat others (Meta's runs). ``params_*``: elements as the trainer counts them,
        each expert once. ``optimizer_state``: "by name", "foreign" or "none". ``growth``: a text
        per change of the number of experts. ``problems``: a text per defect.
    """
    cset = CheckpointSet.from_path(path)
    problems: list[str] = []

    def tried(action: Callable[..., Any], *args: Any) -> Any:
        """Return the result; on an error return None and note a problem."""
        try:
            return action(*args)
        except CheckpointError as error:
            if str(error) not in problems:
                problems.append(str(error))
            return None

    indexed = tried(read_index, cset)
    members, files = indexed or cset, indexed.files() if indexed else visible_files(cset)
    if not files:
        SetReader(path)  # raises with what is missing
    contents: dict[Role, dict[str, Any]] = {}
    rows = []
    for role in sorted(files, key=lambda role: role if isinstance(role, int) else -1):
        contents[role], _ = tried(load_state, files[role]) or ({}, None)
        if verify and contents[role]:
            tried(verify_file, files[role])
        rows.append(_describe_file(role, files[role], contents[role]))
    reader = tried(SetReader, path)
    metadata = reader and reader.metadata
    replicas = 0
    if reader is not None and state.is_of_fairseq(reader.shared):
        tried(state.check_complete, reader.shared, reader.main_path)
    if reader is not None and reader.kind != MERGED:
        count = reader.num_rank_files
        for number in range(count):
            tried(reader.rank_file, number)
        for role in sorted(role for role in files if isinstance(role, int) and role >= count):
            if metadata:
                problems.append(
                    f"{members.path_of(role)}: superfluous: the set has {count} rank files"
                )
            else:  # if experts are fewer than ranks, each rank of Meta's runs wrote a file
                replicas += 1
                tried(_check_replica, reader, contents, role, verify)
    return {
        "path": cset.path,
        "kind": reader.kind if reader else (MERGED if set(files) == {MERGED} else "set"),
        "written_by": reader and ("fairseq_tutel" if metadata else "another program"),
        "save_id": metadata and metadata.save_id,
        "world_size": metadata and metadata.world_size,
        "num_rank_files": reader.num_rank_files if reader and reader.kind != MERGED else None,
        "replicas": replicas,
        "num_experts": reader and reader.num_experts,
        **_describe_content(contents, reader),
        "growth": reader and tried(state.growth_of, reader.shared) or [],
        "size_on_disk": sum(row["size"] for row in rows),
        "files": rows,
        "problems": problems,
        "consistent": not problems,
    }


def _check_replica(
    reader: SetReader, contents: dict[Role, dict[str, Any]], number: int, values: bool
) -> None:
    """Raise CheckpointError if a replica has other parameters, or ``values``, than its original."""
    original = number % reader.num_rank_files
    if original not in contents:  # the replica stands in for a missing file
        return
    mine, theirs = (contents[role].get(state.MODEL) or {} for role in (number, original))
    for name in sorted({*mine, *theirs}):
        one, other = mine.get(name), theirs.get(name)
        alike = one is not None and other is not None and one.shape == other.shape
        alike = alike and one.dtype == other.dtype and (not values or torch.equal(one, other))
        if not alike:
            path, other = reader.members.path_of(number), reader.members.name_of(original)
            raise CheckpointError(f"{path}: a replica that differs from {other} in {name}")


def _describe_file(role: Role, path: str, content: dict[str, Any]) -> dict[str, Any]:
    model, metadata = content.get(state.MODEL) or {}, content.get(state.METADATA)
    save_id = metadata.get("save_id") if isinstance(metadata, dict) else None
    return {
        "name": os.path.basename(path),
        "size": os.path.getsize(path),
        "rank": role if isinstance(role, int) else None,
        "experts": len({parsed[1] for key in model if (parsed := split_key(key))}),
        "params": sum(tensor.numel() for tensor in state.parameters(model).values()),
        "save_id": save_id if isinstance(save_id, str) else None,
    }


def _describe_content(
    contents: dict[Role, dict[str, Any]], reader: SetReader | None
) -> dict[str, Any]:
    # replicas of Meta's E < W runs, and stale files, do not count
    counted = list(contents)
    if reader is not None:
        of_set = (SHARED, *range(reader.num_rank_files))
        counted = [MERGED] if reader.kind == MERGED else [r for r in of_set if r in contents]
    dense: Counter[str] = Counter()
    expert: Counter[str] = Counter()
    layers: dict[str, None] = {}  # in the order of the model
    for role in counted:
        for key, tensor in state.parameters(contents[role].get(state.MODEL) or {}).items():
            parsed = split_key(key)
            dtype = str(tensor.dtype).removeprefix("torch.")
            (dense if parsed is None else expert)[dtype] += tensor.numel()
            if parsed is not None:
                layers[parsed[0].removesuffix(".experts.").removesuffix(".moe_layer")] = None
    main = contents.get(SHARED) or contents.get(MERGED) or next(iter(contents.values()), {})
    history = main.get("optimizer_history") or [{}]
    iterator = (main.get("extra_state") or {}).get("train_iterator") or {}
    kind = "by name" if state.optimizer_is_named(main.get(state.OPTIMIZER)) else "foreign"
    return {
        "moe_layers": list(layers),
        "params_dense": dense.total(),
        "params_expert": expert.total(),
        "params_total": dense.total() + expert.total(),
        "dtypes": dict(dense + expert),
        "num_updates": history[-1].get("num_updates"),
        "epoch": iterator.get("epoch"),
        "optimizer_state": "none" if main.get(state.OPTIMIZER) is None else kind,
    }
