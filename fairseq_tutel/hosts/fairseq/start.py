"""Where a run starts from: what fairseq's ``load_checkpoint`` decides by looking for one file.

Stock asks whether ``checkpoint_last`` exists to distinguish a restart from a first launch, which
``--finetune-from-model`` and ``--continue-once`` apply to. A set exists where that one file may
not: in a save that was committed and then interrupted, or in a merged file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from omegaconf import open_dict

from ...checkpoint import check_shared_directory, find_checkpoint, recover_directory, set_exists
from ...distributed import gather_texts, process_world


@contextlib.contextmanager
def start_of_run(checkpoint_cfg) -> Iterator[None]:
    """Make ready for stock ``load_checkpoint`` with fairseq's ``checkpoint`` config. Collective.

    Within, the options for a first launch are gone where there is a set to go on from, and
    ``--finetune-from-model`` may name a set like every other option.

    Raises:
        CheckpointError: the ranks do not share the save dir.
    """
    rank, world_size = process_world()
    world = {"rank": rank, "world_size": world_size, "gather_texts": gather_texts}
    if not checkpoint_cfg.no_save:  # else it may be another run's folder
        if world_size > 1:
            check_shared_directory(checkpoint_cfg.save_dir, **world)
        recover_directory(checkpoint_cfg.save_dir, **world)
    before = {key: checkpoint_cfg.get(key) for key in ("finetune_from_model", "continue_once")}
    now = dict(before)
    if checkpoint_cfg.restore_file == "checkpoint_last.pt" and set_exists(
        os.path.join(checkpoint_cfg.save_dir, "checkpoint_last.pt")
    ):
        now = dict.fromkeys(now)
    elif before["finetune_from_model"] is not None:
        found = find_checkpoint(before["finetune_from_model"])
        if found is not None:
            now["finetune_from_model"] = found[1]
    with changed(checkpoint_cfg, now):
        yield


@contextlib.contextmanager
def changed(section, values):
    """Within, entries of a section of fairseq's config have other values."""
    before = {key: section.get(key) for key in values}
    with open_dict(section):
        section.update({key: value for key, value in values.items() if value != before[key]})
    try:
        yield
    finally:
        with open_dict(section):
            section.update(
                {key: before[key] for key, value in values.items() if value != before[key]}
            )
