"""Tests whose helpers import transformers are not collected where it is not installed."""

import importlib.util
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by the first import of transformers
collect_ignore = []
if importlib.util.find_spec("transformers") is None:
    names = (
        "adapters",
        "experts_interface",
        "generation",
        "models",
        "moe_trainer",
        "refused_models",
    )
    names += ("replace_moe", "trl")
    collect_ignore = [f"test_{name}.py" for name in names]
elif importlib.util.find_spec("trl") is None:
    collect_ignore = ["test_trl.py"]
