"""Tests that import transformers are not collected where it is not installed."""

import importlib.util
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by the first import of transformers
collect_ignore = [] if importlib.util.find_spec("trl") else ["test_trl.py"]
if importlib.util.find_spec("transformers") is None:
    tests = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    collect_ignore = list(tests - {"test_sparse_blocks.py"})
