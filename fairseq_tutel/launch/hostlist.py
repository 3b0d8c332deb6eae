"""SLURM's compact node lists: ``node[01-03,7],login`` and ``2(x3),1``."""

from __future__ import annotations

import itertools
import re

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise ValueError(f"node list {text!r}: unbalanced brackets at position {i}")
        if char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if depth:
        raise ValueError(f"node list {text!r}: a bracket is not closed")
    parts.append(text[start:])
    return parts


def _expand_range(item: str, whole: str) -> list[str]:
    low, dash, high = item.partition("-")
    if not low.isdigit() or (dash and not high.isdigit()):
        raise ValueError(f"node list {whole!r}: {item!r} is neither a number nor a range")
    if not dash:
        return [low]
    if int(high) < int(low):
        raise ValueError(f"node list {whole!r}: the range {item!r} runs backwards")
    # Leading zeros of the lower end give the width, as in node[008-010].
    return [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]


def expand_hostlist(text: str) -> list[str]:
    """Host names of SLURM's list `text`, in its order; several brackets in one name multiply.

    >>> expand_hostlist("gpu[08-10],login,r[1-2]n[0,3]")
    ['gpu08', 'gpu09', 'gpu10', 'login', 'r1n0', 'r1n3', 'r2n0', 'r2n3']

    Raises ValueError for unbalanced brackets and for anything but numbers and ranges in them.
    The syntax is the one `scontrol show hostnames` reads; this is for machines without scontrol.
    """
    hosts: list[str] = []
    for part in _split_outside_brackets(text.strip()):
        if not part:
            raise ValueError(f"node list {text!r}: an empty name")
        pieces = _BRACKETS.split(part)  # literal, inside, literal, inside, ..., literal
        choices = [
            [piece]
            if i % 2 == 0
            else [name for item in piece.split(",") for name in _expand_range(item, text)]
            for i, piece in enumerate(pieces)
        ]
        hosts.extend("".join(combination) for combination in itertools.product(*choices))
    return hosts


def expand_tasks_per_node(text: str) -> list[int]:
    """Tasks on every node from SLURM_STEP_TASKS_PER_NODE: ``2(x3),1`` is [2, 2, 2, 1]."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise ValueError(f"tasks per node {text!r}: cannot read {item!r}")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts
