"""Expert-sharded checkpoint sets: save, load, inspect, merge, reshard, grow.

The layout on disk is Meta's (``layout.py``) with an index (``index.py``), the content fairseq's
(``state.py``). The ranks of a
run call ``save_set`` and ``load_for_rank``. A program that makes one set from another calls
``read_set`` and ``write_set``.
"""

from .all_ranks import AllRanks
from .inspection import inspect
from .io import load_file
from .layout import CheckpointError, select_experts, split_key
from .reader import SetReader, find_checkpoint, load_for_rank, read_set
from .safe_globals import safe_globals_only
from .state import check_complete
from .store import (
    check_shared_directory,
    copy_set,
    find_sets,
    merge,
    remove_set,
    reshard,
    save_set,
    set_exists,
    write_set,
)

__all__ = [
    "AllRanks",
    "CheckpointError",
    "SetReader",
    "check_complete",
    "check_shared_directory",
    "copy_set",
    "find_checkpoint",
    "find_sets",
    "inspect",
    "load_file",
    "load_for_rank",
    "merge",
    "read_set",
    "remove_set",
    "reshard",
    "safe_globals_only",
    "save_set",
    "select_experts",
    "set_exists",
    "split_key",
    "write_set",
]
