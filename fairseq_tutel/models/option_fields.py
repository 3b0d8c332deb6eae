"""Fields of dataclasses of options, as fairseq reads them."""

from dataclasses import field
from typing import Any, Optional

from ..ranges import Range


def option(default: Any, help_text: str, allowed: Optional[Range] = None):
    """A field of a dataclass of options; ``allowed`` is the range of a number (:mod:`..ranges`)."""
    return field(default=default, metadata={"help": help_text, "range": allowed})
