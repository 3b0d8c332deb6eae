"""Filters for lines that importing fairseq prints, to be installed before.

The launcher's ranks run this file by its path (startup/), so it imports nothing of this package.
"""

import logging
import os
import warnings

VARIABLE = "FAIRSEQ_TUTEL_WARNINGS"  # 1: show everything

# importing fairseq compiles functions with torch.jit, which torch deprecates
_TORCH_JIT = r"`torch\.jit\."
# fairseq of 2022 warns under Hydra 1.3 at every start, before it reads a config, in these modules
_HYDRA = ("fairseq_cli.hydra_train", "hydra.main", "hydra._internal.hydra", "sys")
# logger -> beginning of a line that it logs when fairseq is imported
_LINES = {"fairseq.tasks.text_to_speech": "Please install tensorboardX"}


def wants_everything() -> bool:
    """Return whether the user asked to see all warnings."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def silence_imports() -> None:
    """Add the filters, unless the user wants to see everything."""
    if wants_everything():
        return
    warnings.filterwarnings("ignore", message=_TORCH_JIT)
    for module in _HYDRA:
        warnings.filterwarnings("ignore", category=UserWarning, module=rf"{module}\Z")
    for name, begin in _LINES.items():
        logging.getLogger(name).addFilter(
            lambda record, begin=begin: not record.getMessage().startswith(begin)
        )
