"""Files of JSON lines that a run appends to; each line has the number of its update."""

import json
import os
import uuid
from collections.abc import Iterable


def append_line(path: str, line: dict) -> None:
    """Append an object to a file of JSON lines, and make its folder."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def drop_after(path: str, update: int) -> None:
    """Drop the lines of later updates, and a line that a crash cut short."""
    if os.path.exists(path):
        with open(path, encoding="utf-8") as lines:
            replace_file(path, (line for line in lines if _update_of(line) <= update))


def _update_of(line: str) -> float:
    try:
        return json.loads(line)["update"]
    except (ValueError, KeyError):
        return float("inf")


def replace_file(path: str, lines: Iterable[str]) -> None:
    """Write a file in one step, so that readers see the old or the new content."""
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.writelines(lines)
    os.replace(temporary, path)
