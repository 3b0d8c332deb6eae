"""Save with W ranks, go on with W' ranks, as if nothing had happened."""

import functools

import pytest
from fairseq import checkpoint_utils, tasks
from helpers.assertions import rms_ratio
from helpers.distributed import run_ranks
from helpers.training import (
    make_batch,
    make_config,
    make_trainer,
    named,
    own_batches,
    record_updates,
    save,
)
from helpers.translation import make_pairs, own_pairs, pair_config

from fairseq_tutel.distributed import process_world

HALF, BATCHES = 2, 4  # updates before and after, micro-batches per update over all ranks
CASES = {
    "E=4 adam": "--moe-expert-count 4",
    "E=2 top1 pytorch_ddp": "--moe-expert-count 2 --moe-top1-expert --ddp-backend pytorch_ddp "
                            "--moe-load-bias quantile",
    "E=6 in groups": "--moe-expert-count 6 --moe-shared-expert-ffn-dim 12 --moe-null-experts 2",
    "E=4 fp16": "--moe-expert-count 4 --fp16 --fp16-init-scale 16",
    "E=4 bf16": "--moe-expert-count 4 --bf16",
    "E=4 memory-efficient-fp16": "--moe-expert-count 4 --memory-efficient-fp16",
    # fairseq sets these statistics a second time after loading
    "E=2 memory-efficient-fp16, sharded": "--moe-expert-count 2 --memory-efficient-fp16 "
                                          "--fp16-init-scale 8 --zero-sharding os",
    "E=4 pytorch_ddp, sharded": "--moe-expert-count 4 --zero-sharding os "
                                "--ddp-backend pytorch_ddp --weight-decay 0.01",
    "E=4 warm-up, momentum": "--moe-expert-count 4 --optimizer nag --lr 0.1 "
                             "--lr-scheduler inverse_sqrt --warmup-updates 8",
    "E=2 in slices, fp16 statistics": "--moe-expert-count 2 --memory-efficient-fp16 "
                                      "--fp16-init-scale 8 --fp16-adam-stats",
    "E=4 lora": "--moe-expert-count 4 --moe-lora-rank 2 --lr 0.1",
    "translation, E=4": "--moe-expert-count 4 --moe-freq 1 --moe-cmr --use-moe-pad-mask",
}  # fmt: skip
# --fp16-adam-stats after the save, unlike before
CHANGED = {"E=4 memory-efficient-fp16": True, "E=2 in slices, fp16 statistics": False}
# ranks that save, ranks that go on
MOVES = [(4, 4), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (4, 1)]
# words of a case -> its moves without --long: four ranks where two would share nothing, and as many
# ranks as saved where only their sums are equal to the last bit
QUICK = {
    "groups": [(1, 2), (4, 4)], "slices": [(2, 4), (4, 2)], "fp16, sharded": [(4, 4), (4, 2)],
    "16": [(1, 2), (2, 2)],
}  # fmt: skip


def _is_quick(name, *sizes):
    """Whether a move, or a run that is not interrupted on so many ranks, needs no --long."""
    moves = next((found for words, found in QUICK.items() if words in name), [(1, 2), (2, 1)])
    return any(sizes in (move, move[:1], move[1:]) for move in moves)


@functools.cache
def configs():
    return {
        name: (pair_config if _translates(name) else make_config)(*options.split())
        for name, options in CASES.items()
    }


def _translates(name):
    return name.startswith("translation")


def _make_trainer(name, cfg):
    return make_trainer(cfg, (make_pairs if _translates(name) else make_batch)(0))


def _own_batches(name, update):
    return (own_pairs if _translates(name) else own_batches)(update, BATCHES)


def _place(name, cfg, saved_by=None):
    """Half of the ranks hold all experts; other groups where as many ranks as saved go on."""
    world_size = process_world()[1]
    if "in slices" in name and world_size == 4:
        cfg.model.moe_expert_placement, cfg.model.moe_parallelism_r = "sliced", "2"
    if "in groups" in name:
        sizes = {1: 1, 2: 2, 4: 1} if saved_by == world_size else {1: 1, 2: 1, 4: 2}
        cfg.model.moe_expert_parallel_size = sizes[world_size]


def _path(folder, name, world_size):
    return f"{folder}/{name.replace(' ', '_')}-{world_size}.pt"


def _losses(records):
    return [r.sums["loss"] / r.sample_size for r in records]


def _save(trainer, path):
    """With marks in the states whose effect on a loss is too small to be seen."""
    trainer.lr_scheduler.best = 0.375
    if getattr(trainer.optimizer, "scaler", None) is not None:
        trainer.optimizer.scaler.loss_scale = 2.0
    save(trainer, path, 12, val_loss=1.25)


def _train_and_save(cfgs, folder):
    """Losses of all updates and the weights at the end; a set is saved in the middle."""
    found = {}
    for name, cfg in cfgs.items():
        _place(name, cfg)
        trainer = _make_trainer(name, cfg)
        records = record_updates(trainer)
        for update in range(2 * HALF):
            if update == HALF:
                _save(trainer, _path(folder, name, process_world()[1]))
            trainer.train_step(_own_batches(name, update))
        found[name] = (_losses(records), named(trainer))
    return found


def _resume(cfgs, folder, saved_by):
    found = {}
    for name, cfg in cfgs.items():
        cfg.common.seed = 77  # other initial weights: everything must come from the checkpoint
        cfg.checkpoint.save_dir = folder
        _place(name, cfg, saved_by)
        if name in CHANGED:
            cfg.optimizer.fp16_adam_stats = CHANGED[name]
        trainer = _make_trainer(name, cfg)
        trainer.cfg.common.seed = 3
        extra = trainer.load_checkpoint(_path(folder, name, saved_by))
        assert trainer.get_num_updates() == HALF and extra["val_loss"] == 1.25
        if "best" in trainer.lr_scheduler.state_dict():
            assert trainer.lr_scheduler.best == 0.375
        if getattr(trainer.optimizer, "scaler", None) is not None:
            assert trainer.optimizer.scaler.loss_scale == 2.0
        records = record_updates(trainer)
        for update in range(HALF, 2 * HALF):
            trainer.train_step(_own_batches(name, update))
        found[name] = (_losses(records), named(trainer), extra["train_iterator"])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def runs(folder):
    """Function (name, ranks) -> the results of a run; of a resumed one for two numbers of ranks.

    Runs of the same ranks share their processes. The sets of those not interrupted lie in
    ``folder``.
    """

    @functools.cache
    def run(sizes, quick):
        cfgs = {n: cfg for n, cfg in configs().items() if _is_quick(n, *sizes) == quick}
        if len(sizes) == 1:
            return run_ranks(_train_and_save, *sizes, cfgs, folder, timeout=120)
        return run_ranks(_resume, sizes[1], cfgs, folder, sizes[0], timeout=120)

    def of(name, *sizes):
        if len(sizes) == 2:  # those that go on together were saved by both kinds
            _ = run(sizes[:1], True), run(sizes[:1], False)
        return [found[name] for found in run(sizes, _is_quick(name, *sizes))]

    return of


ROWS = [
    pytest.param(name, *move, marks=() if _is_quick(name, *move) else pytest.mark.long)
    for name in CASES
    for move in MOVES
]


@pytest.mark.parametrize("name, saved_by, world_size", ROWS)
def test_goes_on_as_if_nothing_had_happened(name, saved_by, world_size, runs):
    half = "16" in name
    same = saved_by == world_size
    weights = {}  # of all ranks: in groups, they may hold other experts
    for _, held in runs(name, world_size):
        weights |= held
    both = zip(runs(name, world_size), runs(name, saved_by, world_size), strict=True)
    for (want, own), (losses, end, position) in both:
        # training had an effect (on 0.12.2, from other weights, nag's first steps go up)
        assert want[HALF] != pytest.approx(want[0], rel=1e-4)
        # other ranks sum half gradients in another order, fp16 statistics are rounded
        other = half and (not same or name in CHANGED)
        assert losses == pytest.approx(want[HALF:], rel=5e-3 if other else 1e-5)
        for key, value in end.items():
            if not key.endswith("k_proj.bias"):
                assert rms_ratio(value, {**weights, **own}[key]) < (5e-2 if other else 1e-4), key
        # one step of W ranks consumed W batches
        assert position["iterations_in_epoch"] == 12 * saved_by // world_size


def test_a_set_of_slices_is_evaluated_with_whole_experts(folder, runs):
    """On one rank r=2 would be refused."""
    name = "E=2 in slices, fp16 statistics"
    runs(name, 4)
    path, task = _path(folder, name, 4), tasks.setup_task(configs()[name].task)
    (model,), _ = checkpoint_utils.load_model_ensemble([path], task=task)
    assert model.moe_groups.placement == "replicated"


def _reset(cfg, folder, names):
    """What --reset-* leaves out, and weights that do not fit."""
    cfg.checkpoint.save_dir = folder
    trainer = make_trainer(cfg)
    path = _path(folder, names[0], 1)
    trainer.load_checkpoint(path, reset_optimizer=True, reset_lr_scheduler=True)
    assert trainer.get_num_updates() == 0
    assert not trainer.optimizer.optimizer.state  # nothing has been restored
    with pytest.raises(ValueError, match="FairseqNAG.*FairseqAdam|nag.*adam|reset-optimizer"):
        trainer.load_checkpoint(_path(folder, names[1], 1))
    for words, message in (
        ("--moe-expert-count 4 --decoder-embed-dim 24 --moe-load-bias quantile",
         "does not fit this model.*; the checkpoint was made with --decoder-embed-dim 16 --moe-load"
         "-bias none"),
        ("--moe-expert-count 8", "has 4 experts .* has 8: give --moe-expert-count 4"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make_trainer(make_config(*words.split(), "--save-dir", folder)).load_checkpoint(path)
    with pytest.raises(FileNotFoundError, match="nowhere.pt"):
        trainer.cfg.checkpoint.restore_file = "nowhere.pt"
        trainer.load_checkpoint(f"{folder}/nowhere.pt")
    trainer.cfg.checkpoint.restore_file = "checkpoint_last.pt"
    assert trainer.load_checkpoint(f"{folder}/checkpoint_last.pt") is None


def test_resets_and_what_does_not_fit(folder, runs):
    names = ("E=4 adam", "E=4 warm-up, momentum")
    runs(names[0], 1)
    run_ranks(_reset, 1, configs()[names[0]], folder, names)


def _load_from_own_disk(cfg, folder):
    rank, _ = process_world()
    cfg.checkpoint.save_dir = folder
    trainer = make_trainer(cfg)
    save(trainer, f"{folder}/checkpoint_last.pt")
    with pytest.raises(ValueError, match=r"ranks \[1\] of 2 do not see .* shared file system"):
        trainer.load_checkpoint(f"{folder}{'/elsewhere' * rank}/checkpoint_last.pt")


def test_a_checkpoint_that_some_ranks_do_not_see_is_an_error(tmp_path):
    """As on disks of their own: they would start afresh while the others wait for them."""
    run_ranks(_load_from_own_disk, 2, make_config("--moe-expert-count", "4"), str(tmp_path))
