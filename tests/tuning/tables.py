"""Times of choices by a cost model, and noise on them."""

import random

from fairseq_tutel.tuning.search.halving import list_choices


def space(slices=1):
    """2 algorithms, 4 degrees, and the parallelisms of experts that are cut into slices."""
    values = {"algorithm": ("linear", "2dh"), "overlap_degree": (1, 2, 4, 8)}
    if slices > 1:
        values["r"] = (0, *(r for r in range(1, slices + 1) if slices % r == 0))
    return list_choices(values)


def table(choices, seed):
    """Microseconds: T(d) = max(2 Ta, Ta + (Ta + Tf)/d, Tf + 2 Ta/d), an overhead per chunk,
    messages r times as large, weights from S/r ranks; r = 0 gathers all weights, sends no token."""
    rng = random.Random(seed)
    exchange, experts = rng.uniform(200, 20000), rng.uniform(200, 20000)
    hierarchical, overhead = rng.uniform(0.4, 2.5), rng.uniform(0, 400)
    gather, gather_all = rng.uniform(50, 8000), rng.uniform(5000, 40000)
    times = []
    for values in choices:
        d, r = values["overlap_degree"], values.get("r", 1)
        a = exchange * r * (hierarchical if values["algorithm"] == "2dh" else 1)
        time = max(2 * a, a + (a + experts) / d, experts + 2 * a / d) + overhead * (d - 1)
        times.append(round(gather_all + experts if r == 0 else time + gather / r))
    return times


class Noise:
    """10% (delays, half a normal distribution) and 5% outliers of three times the time."""

    def __init__(self, seed):
        self._rng = random.Random(seed)

    def __call__(self, time):
        factor = 1 + abs(self._rng.gauss(0, 0.1))
        return round(time * factor * (3 if self._rng.random() < 0.05 else 1))
