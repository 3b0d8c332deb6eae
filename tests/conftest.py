"""Settings that must precede every import: without a GPU, Triton kernels run interpreted."""

import importlib.util
import os

import pytest
import torch

# Triton reads this when it is imported; set later, parts of its language fail.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# as fairseq's programs do for a --user-dir, whichever test imports what first
if importlib.util.find_spec("fairseq") is not None:
    import fairseq_tutel

    fairseq_tutel.register()


def pytest_collection_modifyitems(items):
    """Tests marked gpu are skipped, and counted as such, where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU"))
