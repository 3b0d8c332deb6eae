"""Seeds for the random numbers of a test, so that each run draws the same ones."""

import random
import zlib

import numpy
import torch


def seed_all(name: str | int) -> None:
    """Seed torch, numpy and random by a test's or fixture's name, or by a seed of torch."""
    seed = zlib.crc32(name.encode()) if isinstance(name, str) else name
    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)
