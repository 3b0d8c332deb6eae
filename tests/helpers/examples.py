"""Modules of the folders of scripts/examples."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "scripts/examples"
SWIN_MOE = EXAMPLES / "swin_moe"


def example(name, folder=SWIN_MOE):
    """A module of an example."""
    sys.path.insert(0, str(folder))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(folder))
