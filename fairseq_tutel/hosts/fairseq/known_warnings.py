"""Warnings of fairseq and its dependencies that no user of this package can do anything about, and
log lines that say nothing.

fairseq of 2022 under Hydra 1.3 and torch 2.x prints about twenty such warnings at every start, and
each rank again. They are left out in fairseq's own programs (never where the package is used as a
library), each for the reason beside it; ``FAIRSEQ_TUTEL_WARNINGS=1`` shows them.
"""

from __future__ import annotations

import logging
import os
import re
import warnings

VARIABLE = "FAIRSEQ_TUTEL_WARNINGS"

# (beginning of the message, category, why the user need not see it)
KNOWN = (
    (r"\s*hydra\.experimental\.", UserWarning, "fairseq calls Hydra by its name of 2020"),
    (r"\s*The version_base parameter", UserWarning, "fairseq relies on Hydra's behaviour of 1.0"),
    (r"\s*The strict flag in the compose API", UserWarning, "fairseq passes Hydra's old flag"),
    (r"\s*'config' is validated against", UserWarning, "fairseq's schema has its config's name"),
    (r"\s*In 'config': Usage of deprecated", UserWarning, "fairseq's config files are of 2020"),
    (r"'pin_memory' argument is set", UserWarning, "fairseq pins memory on a CPU, too"),
    (r"`torch\.cuda\.amp\.\w+\(args", FutureWarning, "fairseq's spelling of torch.amp"),
    (r"`broadcast_buffers` is deprecated", FutureWarning, "fairseq's option of DDP of that name"),
    (r"Support for mismatched key_padding_mask", UserWarning, "fairseq's masks of two dtypes"),
    (r"`torch\.jit\.script` is deprecated", DeprecationWarning, "fairseq's scripted functions"),
)
# (logger, the whole line, why the user need not see it)
LINES = (
    (
        "fairseq.tasks.fairseq_task",
        r"(can_reuse_epoch_itr|reuse_dataloader|rebuild_batches) = \w+",
        "a note to fairseq's authors, at every use of a split of the data",
    ),
    (
        "fairseq.trainer",
        r"detected shared parameter: \S+\.bias <- \S+\.bias",
        "layers without a bias: fairseq takes their None for one parameter",
    ),
)


def install() -> None:
    """Add a filter for each, unless the user wants to see them."""
    if os.environ.get(VARIABLE, "0") not in ("", "0"):
        return
    for message, category, _ in KNOWN:
        warnings.filterwarnings("ignore", message=message, category=category)
    for name, line, _ in LINES:
        logging.getLogger(name).addFilter(
            lambda record, line=line: not re.fullmatch(line, record.getMessage())
        )
