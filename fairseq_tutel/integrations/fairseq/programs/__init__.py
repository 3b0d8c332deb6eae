"""Changes to fairseq's programs for models with experts; the name of the running program."""

import os
import sys
from pathlib import Path

_PACKAGE = "fairseq_cli"


def program() -> str | None:
    """Return the name of the console script, such as ``fairseq-train``; None for other programs."""
    script = os.path.basename(sys.argv[0])
    if script.startswith("fairseq-"):
        return script
    file = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    # fairseq-hydra-train imports fairseq-train's module, and has begun to be imported first
    loaded = [name for name in sys.modules if name.startswith(f"{_PACKAGE}.")]
    module = None
    if file.parent.name == _PACKAGE:
        module = file.stem
    elif script == "-c" and loaded:
        module = loaded[0].rpartition(".")[2]
    return module and "fairseq-" + module.replace("_", "-")
