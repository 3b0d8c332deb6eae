"""``force_load``: shares of the load per expert, for benchmarks."""

import functools
import itertools
import math
from fractions import Fraction

from .options import OptionError


@functools.cache
def _shares(text: str) -> tuple[int, ...]:
    """Return the shares as whole numbers in the same proportions."""
    try:
        shares = [Fraction(word.strip()) for word in text.split(",")]
    except (ValueError, ZeroDivisionError):
        shares = [Fraction(-1)]
    if min(shares) < 0 or not any(shares):
        raise OptionError(f"`force_load={text}` must be numbers of at least 0 with commas: 3,1,1,1")
    whole = math.lcm(*(share.denominator for share in shares))
    return tuple(int(share * whole) for share in shares)


def check_force_load(text: str, num_experts: int, top_k: int, benchmark: bool) -> None:
    """Raise OptionError if the shares cannot be given to the experts, or without ``benchmark``."""
    if not benchmark:
        raise OptionError(f"`force_load={text}` only measures speed: give `benchmark=True` too")
    shares = _shares(text)
    rounds, rest = divmod(num_experts, len(shares))
    if not rounds:
        raise OptionError(f"`force_load={text}` has {len(shares)} shares for {num_experts} experts")
    largest = Fraction(max(shares), rounds * sum(shares) + sum(shares[:rest]))
    if largest * top_k > 1:
        raise OptionError(
            f"`force_load={text}` gives an expert {float(largest):.3g} of all pairs, and a token "
            f"chooses it once at most: with `top_k={top_k}` the largest share is {1 / top_k:.3g}"
        )


@functools.cache
def share_ends(text: str, num_experts: int) -> tuple[int, ...]:
    """Return the sums of the shares up to each of the experts; the last one is their total."""
    shares = itertools.islice(itertools.cycle(_shares(text)), num_experts)
    return tuple(itertools.accumulate(shares))
