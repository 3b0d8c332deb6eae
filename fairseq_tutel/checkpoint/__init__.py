"""Expert-sharded checkpoint sets: save, load, inspect, merge, reshard.

Needs torch only. The layout on disk is Meta's (``layout.py``), the content fairseq's
(``state.py``). Command line: ``python -m fairseq_tutel.checkpoint --help``.
"""

from .all_ranks import AllRanks
from .commit import final_path
from .errors import CheckpointError
from .find import find_checkpoint
from .harmless import harmless_only
from .inspection import inspect
from .io import load_file
from .layout import (
    CheckpointSet,
    check_divisible,
    count_rank_files,
    experts_of_rank,
    slice_experts,
    split_dense_expert,
)
from .load import SetReader, load_for_rank
from .reshard import merge, reshard
from .state import check_complete, split_state
from .store import (
    check_shared_directory,
    copy_set,
    find_sets,
    recover,
    recover_directory,
    remove_set,
    set_exists,
    write_set,
)

__all__ = [
    "CheckpointError",
    "CheckpointSet",
    "AllRanks",
    "SetReader",
    "check_complete",
    "check_divisible",
    "check_shared_directory",
    "copy_set",
    "count_rank_files",
    "experts_of_rank",
    "final_path",
    "find_checkpoint",
    "find_sets",
    "harmless_only",
    "inspect",
    "load_file",
    "load_for_rank",
    "merge",
    "recover",
    "recover_directory",
    "remove_set",
    "reshard",
    "set_exists",
    "slice_experts",
    "split_dense_expert",
    "split_state",
    "write_set",
]
