"""Tests that import transformers are not collected where it is not installed."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("transformers") else ["test_huggingface.py"]
