"""Runs on 1, 2 and 4 ranks train alike, whole or resumed from a set that other ranks saved.

One rank accumulates the gradients of the same micro-batches: losses (aux too), capacities, drops,
gradients and weights are equal. Sources and targets of a translation have different lengths.
"""

import functools
import re
from dataclasses import replace

import pytest
import torch
from fairseq import checkpoint_utils, tasks
from helpers.assertions import rms_ratio
from helpers.distributed import run_ranks
from helpers.training import (
    gradients,
    make_batch,
    make_config,
    make_trainer,
    named,
    own_batches,
    record_updates,
    save,
)
from helpers.translation import make_pairs, own_pairs, pair_config

from fairseq_tutel.distributed import process_world, take_slice

UPDATES, SAVED_AT, CLIP = 3, 1, 0.3
PYTORCH = "--ddp-backend pytorch_ddp"
DROPLESS = "--moe-capacity-factor 0"
HELPED = f"{DROPLESS} --moe-balance-ranks --moe-balance-min-rows 1 --moe-balance-tolerance 1"
SLICED16 = "--memory-efficient-fp16 --fp16-init-scale 8 --fp16-adam-stats"
# Options; 4 micro-batches per update, 8 with update-freq 2 (on 4 ranks 1 and 2 of each). The words
# of a name also say how experts are placed, what must show, and whether the run is resumed.
RUNS = {
    "E=1 K=1 drops": "--moe-top-k 1",
    "E=2 K=1 drops, saved": f"--moe-top-k 1 --moe-load-bias quantile {PYTORCH}",
    "E=4 K=1 dropless": f"--moe-top-k 1 {DROPLESS}",
    "E=8 K=4 dropless helped": f"--moe-top-k 4 {HELPED}",
    "E=2 K=2 update-freq 2": PYTORCH,
    "E=4 K=2, saved": "",
    "E=4 K=2 dropless helped": f"--checkpoint-activations {HELPED}",
    # recomputed layers exchange again, in the same order
    "E=8 K=2 2dh": "--checkpoint-activations --moe-exchange 2dh --moe-overlap-degree 4",
    "E=4 top1-expert, z-loss, average": "--moe-top1-expert --moe-z-loss-wt 0.01 "
    "--moe-gate-loss-combine-method average --moe-load-bias quantile",
    "E=4 prioritised, normalised before, dynamic": "--moe-batch-prioritized-routing "
    "--moe-normalize-gate-prob-before-dropping --moe-capacity-factor -0.75",
    "E=4 K=2 re-routed, by probability, sigmoid": "--moe-overflow-rerouting 1 --moe-drop-policy "
    "probability --moe-score-function sigmoid --moe-capacity-factor 0.6 "
    "--moe-gate-loss-choices all --moe-gate-loss-scope sequence",
    "E=6 K=2 in groups dropless helped update-freq 2, saved": f"{HELPED} {PYTORCH} --lr 0.007 "
    "--checkpoint-activations --moe-shared-expert-ffn-dim 12 --moe-null-experts 2",
    # r as many as ranks hold an expert, or the weights travel
    "E=2 K=2 in slices": "--moe-overlap-degree 2",
    "E=1 K=1 in slices dropless update-freq 2": f"{DROPLESS} {PYTORCH} --checkpoint-activations",
    "E=2 K=2 in slices r=0": "--moe-expert-placement sliced --moe-parallelism-r 0",
    "E=4 cosine, every layer sparse, untied": "--moe-router cosine --moe-freq 1 "
    "--moe-expert-ffn-dim 12",
    # with pytorch_ddp a resumed run sums half gradients in another order
    "E=4 fp16, saved": "--fp16 --fp16-init-scale 16",
    "E=4 bf16, saved": "--bf16",
    "E=4 efficient fp16, saved": f"--memory-efficient-fp16 {PYTORCH}",
    "E=4 efficient bf16": f"--memory-efficient-bf16 {PYTORCH}",
    # fairseq sets these statistics a second time after loading
    "E=2 fp16, sharded, saved": "--memory-efficient-fp16 --fp16-init-scale 8 --zero-sharding os",
    "E=4 sharded, saved": f"--zero-sharding os --weight-decay 0.01 {PYTORCH}",
    "E=4 momentum, saved": "--optimizer nag --lr 0.1 --lr-scheduler inverse_sqrt --warmup-updates "
    "8",
    "E=2 fp16 in slices, saved": SLICED16,
    "E=4 lora, saved": "--moe-lora-rank 2 --lr 0.1",
    "translation E=4 K=2 drops, masked": "--use-moe-pad-mask --moe-freq 1",
    "translation E=4 dropless helped update-freq 2, saved": f"{HELPED} {PYTORCH} --moe-cmr "
    "--checkpoint-activations --cmr-gate-loss-wt 0.1 --cmr-gate-loss-p 0.8",
    "translation E=4 K=2 in groups": "--moe-overflow-rerouting 1 --moe-capacity-factor 0.6 "
    "--moe-wire-compact",
    "translation E=2 dropless in slices": f"{DROPLESS} --encoder-moe-freq 1",
    "translation E=8 K=2 2dh": "--moe-exchange 2dh --moe-overlap-degree 2 --use-moe-pad-mask "
    "--moe-gate-loss-scope sequence --moe-gate-loss-over unpadded",
    "translation E=4 dropless wire fp16": f"{DROPLESS} --moe-wire fp16",
    "translation E=4 top-1": "--moe-top1-expert --moe-load-bias sign --decoder-moe-freq 1",
}
# --fp16-adam-stats after the save, unlike before
CHANGED = {"E=4 efficient fp16, saved": True, "E=2 fp16 in slices, saved": False}
# (ranks that save, ranks that go on) and, by words of a name, those without --long: four ranks
# where two would share nothing, and as many as saved where only their sums have the same bits
MOVES = [(4, 4), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (4, 1)]
QUICK = {
    "groups": [(1, 4), (4, 4)], "slices": [(2, 4), (4, 2)], "fp16, sharded": [(4, 4), (4, 2)],
    "16": [(1, 2), (2, 2)], "drops": [(1, 4), (4, 1)], "saved": [(1, 2), (2, 1)],
}  # fmt: skip


def _moves(name):
    quick = next((moves for words, moves in QUICK.items() if words in name), [])
    return quick if "saved" in name else []


def _sizes(name):
    """Numbers of ranks for one run without --long: four where two would be none of it."""
    four = re.search("in groups|in slices|2dh|E=[12] K=1 drops|K=4 dropless", name)
    return {1, 4 if four else 2}.union(*_moves(name))


def _is_quick(name, saved_by, ranks):
    return (saved_by, ranks) in _moves(name) if saved_by else ranks in _sizes(name)


@functools.cache
def configs():
    return {
        name: (pair_config if name.startswith("translation") else make_config)(
            "--clip-norm", str(CLIP), "--moe-expert-count", re.findall(r"E=(\d)", name)[0],
            *words.split(),
        )
        for name, words in RUNS.items()
    }  # fmt: skip


def _place(name, model, ranks, saved_by):
    """Place the experts as the name says, on so many ranks."""
    if "in groups" in name:  # half of the ranks hold all; other groups where as many go on
        model.moe_expert_parallel_size = max(1, ranks // (4 if saved_by == ranks else 2))
    if "in slices" in name and "r=0" not in name:
        model.moe_expert_placement = "sliced"
        if not name.startswith("translation"):
            model.moe_parallelism_r = max(1, ranks // model.moe_expert_count)
    if "2dh" in name and ranks == 4:
        model.moe_ranks_per_node = 2


def _path(folder, name, ranks):
    return f"{folder}/{re.sub('[^a-z0-9]+', '-', name)}-{ranks}.pt"


def _save(trainer, path):
    """With marks in the states whose effect on a loss is too small to be seen."""
    trainer.lr_scheduler.best = 0.375
    if getattr(trainer.optimizer, "scaler", None) is not None:
        trainer.optimizer.scaler.loss_scale = 2.0
    save(trainer, path, 12, val_loss=1.25)


def _load(trainer, path, saved_by):
    extra = trainer.load_checkpoint(path)
    assert trainer.get_num_updates() == SAVED_AT and extra["val_loss"] == 1.25
    if "best" in trainer.lr_scheduler.state_dict():
        assert trainer.lr_scheduler.best == 0.375
    if getattr(trainer.optimizer, "scaler", None) is not None:
        assert trainer.optimizer.scaler.loss_scale == 2.0
    # one step of W ranks consumed W batches
    position = extra["train_iterator"]["iterations_in_epoch"]
    assert position == 12 * saved_by // process_world()[1]


def _train(cases, folder, saved_by):
    """Per case every update's record and gradients, and weights at the end; a set is saved."""
    ranks, found = process_world()[1], {}
    for name, cfg in cases.items():
        of_pairs = name.startswith("translation")
        cfg.checkpoint.save_dir = folder
        _place(name, cfg.model, ranks, saved_by)
        if saved_by:  # other initial weights: everything must come from the set
            cfg.common.seed = 77
            if name in CHANGED:
                cfg.optimizer.fp16_adam_stats = CHANGED[name]
        trainer = make_trainer(cfg, (make_pairs if of_pairs else make_batch)(0))
        if saved_by:
            trainer.cfg.common.seed = 3
            _load(trainer, _path(folder, name, saved_by), saved_by)
        updates, grads = record_updates(trainer), []
        for update in range(SAVED_AT if saved_by else 0, UPDATES):
            if update == SAVED_AT and not saved_by and "saved" in name:
                _save(trainer, _path(folder, name, ranks))
            total = 8 if "update-freq 2" in name else 4
            trainer.train_step((own_pairs if of_pairs else own_batches)(update, total))
            grads.append(gradients(trainer))
        dtypes = {p.dtype for p in trainer.get_model().parameters()}
        assert dtypes == {torch.bfloat16 if "bf16" in name else torch.float16
                          if "fp16" in name and "wire" not in name else torch.float32}  # fmt: skip
        found[name] = updates, grads, named(trainer)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def runs(folder):
    """Function (name, saved_by, ranks) -> what :func:`_train` found on each rank.

    Runs of as many ranks share their processes, those without --long apart from others.
    """

    @functools.cache
    def run(saved_by, ranks, quick):
        cases = {
            name: cfg for name, cfg in configs().items()
            if _is_quick(name, saved_by, ranks) == quick and ("saved" in name or not saved_by)
        }  # fmt: skip
        for name in cases if saved_by else ():
            run(None, saved_by, _is_quick(name, None, saved_by))
        return run_ranks(_train, ranks, cases, folder, saved_by, timeout=280)

    def of(name, saved_by, ranks):
        quick = _is_quick(name, saved_by, ranks)
        return [found[name] for found in run(saved_by, ranks, quick)]

    return of


def assert_equal_tensors(what, got, want, slices=(0, 1), limit=1e-4):
    """Compare tensors by name; of an expert ``got`` has one of ``slices`` (number, how many)."""
    assert got, what
    for name, value in got.items():
        expected = want[name]
        if value is None or expected is None:  # the gradient of what is frozen
            assert value is expected, name
            continue
        if ".experts." in name and slices[1] > 1:
            kind = name.rsplit(".", 1)[1].split("[")[0].replace("_", ".")
            expected = take_slice(expected, kind, *slices)
        # rounding is all there is in its gradient, and Adam amplifies that
        if not name.endswith("k_proj.bias"):
            assert value.shape == expected.shape, name
            # a score at the edge of a bin of the quantile rule's histogram may fall on either side
            edge = 0.01 if name.endswith("load_bias") else limit
            assert rms_ratio(value, expected) < edge, f"{what} of {name}"


# of losses, norms and weights; rough: rows, gradients or statistics are rounded
EXACT, ROUGH = (1e-4, 1e-4, 1e-4), (5e-3, 0.1, 5e-2)


def assert_alike(got, want, limits, slices=(0, 1)):
    """Compare what :func:`_train` found."""
    loss, norm, weight = limits
    for mine, one in zip(got[0], want[0], strict=True):
        assert mine.sample_size == one.sample_size
        for key, value in one.sums.items() if limits is EXACT else ():
            assert mine.sums[key] == pytest.approx(value, rel=1e-4, abs=1e-4), key
        assert mine.sums["loss"] == pytest.approx(one.sums["loss"], rel=loss)
        assert mine.grad_norm == pytest.approx(one.grad_norm, rel=norm)
    for mine, one in zip(got[1], want[1], strict=True) if limits is EXACT else ():
        assert_equal_tensors("gradient", mine, one, slices)
    assert_equal_tensors("weight", got[2], want[2], slices, weight)


def _rows():
    for name in RUNS:
        for move in [(None, 2), (None, 4), *(MOVES if "saved" in name else ())]:
            marks = () if _is_quick(name, *move) else pytest.mark.long
            yield pytest.param(name, *move, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("name, saved_by, ranks", [*_rows()])
def test_ranks_train_like_one(name, saved_by, ranks, runs):
    found, whole = runs(name, saved_by, ranks), runs(name, None, ranks)
    if saved_by:
        rough = "16" in name and (saved_by != ranks or name in CHANGED)
        limits = ROUGH if rough else EXACT
        weights = {key: value for _, _, held in whole for key, value in held.items()}
        for got, (updates, grads, own) in zip(found, whole, strict=True):
            grads = grads[SAVED_AT:]
            if "groups" in name:  # they may hold other experts than before, or exchange nothing
                grads = got[1]
                updates = [replace(u, sums={"loss": u.sums["loss"]}) for u in updates]
            assert_alike(got, (updates[SAVED_AT:], grads, weights | own), limits)
        return
    (one,) = runs(name, None, 1)
    experts = configs()[name].model.moe_expert_count
    for rank, got in enumerate(found):
        slices = (0, 1)
        if "in slices" in name and experts < ranks:
            slices = (rank // experts, ranks // experts)
        assert_alike(got, one, ROUGH if "16" in name else EXACT, slices)
    assert set().union(*(held for *_, held in found)) == set(one[2])  # every expert is somewhere
    if "wire" in name:
        for got in (update.sums for updates, *_ in found for update in updates):
            assert 0 < got["moe_wire_error_dispatch"] < 1e-3 * got["moe_wire_layers_dispatch"]
    if "helped" in name and "groups" not in name:
        assert sum(u.sums["moe_rows_helped"] for updates, *_ in found for u in updates) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_runs_train_and_drop_as_they_say(name, runs):
    """Or the comparison would be of nothing. Half precision is near fp32."""
    ((updates, _, _),) = runs(name, None, 1)
    losses = [u.sums["loss"] / u.sample_size for u in updates]
    assert losses[-1] != pytest.approx(losses[0], rel=1e-3)
    assert all(u.grad_norm > CLIP for u in updates) or "lora" in name  # it was clipped
    if "dropless" in name:
        assert all(u.sums["overflow_expert1"] == 0 for u in updates)
    elif "K=2" in name and "E=2" not in name:
        assert all(u.sums["overflow_expert2"] > 0 for u in updates)
    if "E=4" in name and "16" in name and "wire" not in name:
        ((exact, _, _),) = runs("E=4 K=2, saved", None, 1)
        near = 0.05 if "bf16" in name else 0.01
        assert losses == pytest.approx([u.sums["loss"] / u.sample_size for u in exact], rel=near)


def test_a_set_of_slices_is_evaluated_with_whole_experts(folder, runs):
    """On one rank r=2 would be refused."""
    name = "E=2 fp16 in slices, saved"
    runs(name, None, 4)
    path, task = _path(folder, name, 4), tasks.setup_task(configs()[name].task)
    (model,), _ = checkpoint_utils.load_model_ensemble([path], task=task)
    assert model.moe_groups.placement == "replicated"


def _reset(cfg, folder, path, other):
    """What --reset-* leaves out, and weights that do not fit."""
    cfg.checkpoint.save_dir = folder
    trainer = make_trainer(cfg)
    trainer.load_checkpoint(path, reset_optimizer=True, reset_lr_scheduler=True)
    assert trainer.get_num_updates() == 0 and not trainer.optimizer.optimizer.state
    with pytest.raises(ValueError, match="FairseqNAG.*FairseqAdam|nag.*adam|reset-optimizer"):
        trainer.load_checkpoint(other)
    for words, message in (
        ("4 --decoder-embed-dim 24 --moe-load-bias quantile", "does not fit this model.*; the "
         "checkpoint was made with --decoder-embed-dim 16 --moe-load-bias none"),
        ("8", "has 4 experts .* has 8: give --moe-expert-count 4"),
    ):  # fmt: skip
        words = ["--save-dir", folder, "--moe-expert-count", *words.split()]
        with pytest.raises(ValueError, match=message):
            make_trainer(make_config(*words)).load_checkpoint(path)
    trainer.cfg.checkpoint.restore_file = "nowhere.pt"
    with pytest.raises(FileNotFoundError, match="nowhere.pt"):
        trainer.load_checkpoint(f"{folder}/nowhere.pt")
    trainer.cfg.checkpoint.restore_file = "checkpoint_last.pt"
    assert trainer.load_checkpoint(f"{folder}/checkpoint_last.pt") is None


def test_resets_and_what_does_not_fit(folder, runs):
    names = ("E=4 K=2, saved", "E=4 momentum, saved")
    runs(names[0], None, 1)
    run_ranks(_reset, 1, configs()[names[0]], folder, *(_path(folder, n, 1) for n in names))


def _load_from_own_disk(cfg, folder):
    cfg.checkpoint.save_dir = folder
    trainer, rank = make_trainer(cfg), process_world()[0]
    save(trainer, f"{folder}/checkpoint_last.pt")
    with pytest.raises(ValueError, match=r"ranks \[1\] of 2 do not see .* shared file system"):
        trainer.load_checkpoint(f"{folder}{'/elsewhere' * rank}/checkpoint_last.pt")


def test_a_checkpoint_that_some_ranks_do_not_see_is_an_error(tmp_path):
    """As on disks of their own: they would start afresh while the others wait for them."""
    run_ranks(_load_from_own_disk, 2, make_config("--moe-expert-count", "4"), str(tmp_path))
