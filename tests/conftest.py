"""Settings that must precede every import: without a GPU, Triton kernels run interpreted."""

import os

import torch

# Triton reads this when it is imported; set later, parts of its language fail.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
