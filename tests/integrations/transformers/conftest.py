"""Tests whose helpers import transformers are not collected where it is not installed."""

import importlib.util

collect_ignore = []
if importlib.util.find_spec("transformers") is None:
    collect_ignore = ["test_experts_interface.py", "test_models.py"]
