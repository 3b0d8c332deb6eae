"""The lists of tiles: pruning, pinning, and what the interpreter gets."""

import triton

from fairseq_tutel.kernels import _autotune as tiles
from fairseq_tutel.kernels._runtime import INTERPRET


def test_tiles_wider_than_the_row_are_pruned():
    configs = [triton.Config({"BLOCK_T": 1, "BLOCK_M": block}) for block in (2048, 512, 64)]
    for dim, blocks in ((4096, [2048, 512, 64]), (500, [512, 64]), (5, [64])):
        kept = tiles.prune_wide_tiles(configs, {"x_ptr": None}, M=dim)
        assert [config.kwargs["BLOCK_M"] for config in kept] == blocks
    configs = [triton.Config({"BLOCK_N": 1, "BLOCK_F": block}) for block in (1024, 128)]
    kept = tiles.prune_wide_tiles(configs, {"F": 200}, ACTIVATION="gelu")
    assert [config.kwargs["BLOCK_F"] for config in kept] == [128]


def test_interpreter_gets_one_config():
    if INTERPRET:
        assert len(tiles.move_configs()) == len(tiles.act_configs()) == 1


def test_pinned_and_free_lists(monkeypatch):
    monkeypatch.setattr(tiles, "INTERPRET", False)
    monkeypatch.setenv("FAIRSEQ_TUTEL_AUTOTUNE", "1")
    moves, acts = tiles.move_configs(), tiles.act_configs()
    assert len(moves) > 1 and len(acts) > 1
    monkeypatch.setenv("FAIRSEQ_TUTEL_AUTOTUNE", "0")
    for pinned, free in ((tiles.move_configs(), moves), (tiles.act_configs(), acts)):
        assert [config.kwargs for config in pinned] == [free[0].kwargs]
