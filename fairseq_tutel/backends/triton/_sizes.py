"""Sizes of grids and blocks. Triton's functions of these names cost 7 us of the host a call."""


def cdiv(count: int, size: int) -> int:
    """Return ``count / size``, rounded up."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the smallest power of two that is at least ``count``; 1 for 0."""
    return 1 << max(count - 1, 0).bit_length()
