"""Tables of the product of choices: cells in which each pair of values occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any


def cover_pairs(
    axes: Mapping[str, Sequence[Any]],
    allowed: Callable[[Any], bool],
    otherwise: Callable[[Any, set[str]], Any] = lambda plain, names: None,
    seed: int = 0,
) -> list[Any]:
    """Allowed cells, one value of each axis, that together have each pair of values.

    If no allowed cell has a pair, ``otherwise`` makes a cell of the pair and the first value of
    each other axis, or None.
    """
    rng, found, seen = random.Random(seed), [], set()
    plain = {name: values[0] for name, values in axes.items()}
    for (a, x), (b, y) in itertools.combinations(axes.items(), 2):
        for pair in itertools.product([(a, value) for value in x], [(b, value) for value in y]):
            if pair in seen:
                continue
            for attempt in range(100):
                drawn = {name: rng.choice(values) for name, values in axes.items()}
                mostly = rng.sample(sorted(axes), attempt * len(axes) // 100)
                drawn |= {name: plain[name] for name in mostly}
                cell = SimpleNamespace(**{**drawn, **dict(pair)})
                if allowed(cell):
                    break
            else:
                cell = otherwise(SimpleNamespace(**{**plain, **dict(pair)}), {a, b})
            if cell is not None:
                found.append(cell)
                seen.update(itertools.combinations(vars(cell).items(), 2))
    return found
