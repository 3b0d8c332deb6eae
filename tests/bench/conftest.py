"""The benchmarks are scripts, not a package: their folder goes onto the path."""

import logging
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "bench"))


@pytest.fixture(autouse=True)
def process_as_found():
    """A benchmark chooses backends, log levels and threads for its whole process."""
    from fairseq_tutel import ops

    before = ops.get_backend(), logging.getLogger().level, torch.get_num_threads()
    yield
    ops.set_backend(before[0])
    logging.getLogger().setLevel(before[1])
    torch.set_num_threads(before[2])
