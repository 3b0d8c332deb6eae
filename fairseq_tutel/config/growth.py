"""``--moe-grow-at UPDATE:E``: when a running job gets more experts, and how many."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class GrowAt:
    """After which update a run has how many experts."""

    update: int
    num_experts: int

    @classmethod
    def of(cls, text: str | None) -> GrowAt | None:
        """Of the option's value; None where it is not given. Raises ValueError for another form."""
        if text is None:
            return None
        match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", str(text))
        if match is None:
            raise ValueError(
                f"--moe-grow-at {text}: expected UPDATE:EXPERTS, two positive numbers, as in 300:8 "
                "(in quotes where it is in a YAML file)"
            )
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.update}:{self.num_experts}"
