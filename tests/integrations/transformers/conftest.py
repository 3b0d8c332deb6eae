"""Tests whose helpers import transformers are not collected where it is not installed."""

import importlib.util

collect_ignore = []
if importlib.util.find_spec("transformers") is None:
    names = ("experts_interface", "models", "moe_trainer", "refused_models", "replace_moe")
    collect_ignore = [f"test_{name}.py" for name in names]
