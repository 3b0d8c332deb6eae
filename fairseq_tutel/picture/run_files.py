"""Files of JSON lines that a run writes, and what all pictures of them share."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

BLUE, RED, GREY = "#4878a8", "#c44e52", "#777777"
COLORS = (BLUE, RED, "#55a868", "#8172b2", "#ccb974", "#64b5cd", GREY, "#937860")


def read_lines(file: Path) -> Iterator[dict]:
    """Yield the objects of a file of JSON lines; none for a missing file or a torn line."""
    if not file.is_file():
        return
    with file.open(encoding="utf-8") as lines:  # a trace may be large
        for text in lines:
            with contextlib.suppress(ValueError):
                yield json.loads(text)


def order_of_layer(name: str) -> tuple[bool, list[int]]:
    """Return the sort key of a layer's name, such as ``3`` or ``encoder.3``: the encoder first."""
    return name.startswith("decoder"), [int(number) for number in re.findall(r"\d+", name)]
