"""Files of one JSON object per line, with the update that it is of."""

from __future__ import annotations

import json
import os


def append(path: str, line: dict) -> None:
    """Add a line; the folder is made if need be."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def drop_after(path: str, update: int) -> None:
    """Drop the lines of later updates, and one that was cut short: a resumed run makes them again.

    Leaves no half-written file, and nothing undone where there is none.
    """
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8") as file:
        lines = file.readlines()
    kept = [line for line in lines if _update_of(line) <= update]
    if len(kept) < len(lines):
        with open(f"{path}.tmp", "w", encoding="utf-8") as file:
            file.writelines(kept)
        os.replace(f"{path}.tmp", path)


def _update_of(line: str) -> float:
    """Infinity for a line that was cut short by a crash."""
    try:
        return json.loads(line)["update"]
    except (ValueError, KeyError):
        return float("inf")
