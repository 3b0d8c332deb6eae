"""The quickstart's modules are files beside its main.py, not a package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "quickstart"))
