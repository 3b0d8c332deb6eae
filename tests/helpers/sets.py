"""Names of the files of checkpoint sets, read off the folder."""

from __future__ import annotations

import glob
import os
import re

import torch

_ID = re.compile(r"\.[0-9a-f]{16}(?=-)")


def names_in(directory) -> set[str]:
    """Names of the files; one that the index of its set names has ID for the number of its save."""
    names, named = set(os.listdir(directory)), set()
    for name in names:
        if f"{name}.ID" in {_ID.sub(".ID", each).partition("-")[0] for each in names}:
            index = torch.load(os.path.join(directory, name), weights_only=True)
            named |= set(index.get("moe_members", ()))
    return {_ID.sub(".ID", name) if name in named else name for name in names}


def set_names(stem: str, num_rank_files: int) -> set[str]:
    members = ("shared", *(f"rank-{n}" for n in range(num_rank_files)))
    return {f"{stem}.pt", *(f"{stem}.pt.ID-{member}.pt" for member in members)}


def member(path, name: str) -> str:
    """Path of the only file of that kind (shared, rank-0, ...), with an index or without."""
    (found,) = glob.glob(f"{path}.*-{name}.pt") or glob.glob(f"{str(path)[:-3]}-{name}.pt")
    return found


def as_earlier(path: str) -> None:
    """Give a set the names that earlier versions and Meta's code give it, and no index."""
    for file in glob.glob(f"{path}.*"):
        os.rename(file, _ID.sub("", file).replace(path, path[:-3]))
    os.remove(path)
