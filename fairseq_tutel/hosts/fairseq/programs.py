"""Which of fairseq's programs this process runs, if any."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TRAINING = ("fairseq-train", "fairseq-hydra-train")
_PACKAGE = "fairseq_cli"


def program() -> str | None:
    """Name of the console script (``fairseq-train``), also where it was started in another way:
    as a module, as a file, or by ``python -c "from fairseq_cli.train import ..."``."""
    script = os.path.basename(sys.argv[0])
    if script.startswith("fairseq-"):
        return script
    main = sys.modules.get("__main__")
    module = getattr(getattr(main, "__spec__", None), "name", "")
    file = Path(getattr(main, "__file__", None) or "")
    if module.startswith(f"{_PACKAGE}."):
        return _script(module.rpartition(".")[2])
    if file.parent.name == _PACKAGE:
        return _script(file.stem)
    if script == "-c":
        loaded = [name for name in sys.modules if name.startswith(f"{_PACKAGE}.")]
        # fairseq-hydra-train imports fairseq-train's module, and has begun to be imported first
        return _script(loaded[0].rpartition(".")[2]) if loaded else None
    return None


def _script(module: str) -> str:
    return "fairseq-" + module.replace("_", "-")
