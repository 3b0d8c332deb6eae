"""The modules of scripts/examples/swin_moe."""

import sys
from pathlib import Path

SWIN_MOE = Path(__file__).parents[2] / "scripts/examples/swin_moe"


def example(name):
    """A module of the example."""
    sys.path.insert(0, str(SWIN_MOE))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(SWIN_MOE))
