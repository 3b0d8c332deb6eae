"""``--zero-sharding os`` against the same run without it: bit for bit, in training and in files.

Other numbers of ranks load the files: test_resume.py.
"""

import copy
import functools
import math
import pathlib

import pytest
import torch
from helpers.assertions import assert_same_state
from helpers.distributed import run_ranks
from helpers.training import (
    make_config,
    make_trainer,
    named,
    own_batches,
    record_updates,
    save,
)

from fairseq_tutel.checkpoint import CheckpointError
from fairseq_tutel.distributed import is_expert, process_world
from fairseq_tutel.training.state import sharded_optimizer

pytestmark = pytest.mark.long

HALF, BATCHES = 10, 4  # updates before and after the save, micro-batches of all ranks per update
SCALE = "--fp16-init-scale 8 --fp16-scale-tolerance 0"
# two experts, so that on 4 ranks each is on two of them; on 2 ranks --update-freq is 2
CASES = {
    "fp32": "--ddp-backend pytorch_ddp --weight-decay 0.01",
    "memory-efficient-fp16": f"--memory-efficient-fp16 --fp16-adam-stats {SCALE}",
    "fp16": f"--fp16 --ddp-backend pytorch_ddp {SCALE}",
    "memory-efficient-fp16, fp32 statistics": f"--memory-efficient-fp16 {SCALE}",
}
RUNS = {
    2: ["fp32", "memory-efficient-fp16, fp32 statistics", "fp16"],
    4: ["fp32", "memory-efficient-fp16", "fp16"],
}
ALL = ("--moe-expert-count", "2", "--clip-norm", "0.3")


@functools.cache
def configs():
    return {name: make_config(*ALL, *options.split()) for name, options in CASES.items()}


def _sharded(cfg, on=True):
    cfg = copy.deepcopy(cfg)
    cfg.distributed_training.zero_sharding = "os" if on else "none"
    return cfg


def _go_on(trainer, first, last):
    """Updates; on rank 1 the sixth has an inf, if the precision knows what to do with it.

    (loss and norm of each update, weights at the end)
    """
    records = record_updates(trainer)
    param = next(p for p in trainer.get_model().parameters() if not is_expert(p))
    for update in range(first, last):
        hook = None
        if update == 5 and process_world()[0] == 1 and getattr(trainer.optimizer, "scaler", None):
            hook = param.register_hook(lambda grad: grad * math.inf)
        trainer.train_step(own_batches(update, BATCHES))
        if hook is not None:
            hook.remove()
    return [(r.sums["loss"], r.grad_norm) for r in records], named(trainer)


def _file(folder, name, how):
    return pathlib.Path(folder) / f"{name.replace(' ', '_')}-{how}.pt"


def _dense_states(trainer):
    """Whether this rank has state, by the number of each dense parameter."""
    optimizer = trainer.optimizer.optimizer
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [bool(optimizer.state.get(p)) for p in params if not is_expert(p)]
    assert all(optimizer.state.get(p) for p in params if is_expert(p))
    return states


def _train(cfgs, folder):
    """By case: what each of the two runs did, and which states of dense parameters are here."""
    found = {}
    for name, cfg in cfgs.items():
        for on in (False, True):
            trainer = make_trainer(_sharded(cfg, on))
            before = _go_on(trainer, 0, HALF)
            save(trainer, _file(folder, name, f"{process_world()[1]}-{on}"), HALF)
            after = _go_on(trainer, HALF, 2 * HALF)
            found[name, on] = before, after, _dense_states(trainer)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("zero"))


@pytest.fixture(scope="module")
def trained(folder):
    @functools.cache
    def run(world_size):
        cases = {name: configs()[name] for name in RUNS[world_size]}
        return run_ranks(_train, world_size, cases, folder, timeout=120)

    return run


def _content(path, part):
    """Weights and optimizer state of a file of a set."""
    state = torch.load(path.with_name(f"{path.stem}-{part}.pt"), weights_only=False)
    return state["model"], state["last_optimizer_state"]


@pytest.mark.parametrize(
    "name, world_size", [(name, size) for size, names in RUNS.items() for name in names]
)
def test_trains_to_the_bit_as_without_it(name, world_size, trained, folder):
    ranks = [{on: found[name, on] for on in (False, True)} for found in trained(world_size)]
    for found in ranks:
        assert_same_state(found[True][:2], found[False][:2])
    records = ranks[0][False][0][0]
    assert len(records) == HALF - ("fp16" in name)  # one had an inf
    assert any(norm > 0.3 for _, norm in records)  # clipped
    owners = [sum(here) for here in zip(*(found[True][2] for found in ranks), strict=True)]
    assert set(owners) == {1} and all(any(found[True][2]) for found in ranks)
    assert all(all(found[False][2]) for found in ranks)
    for part in ("shared", "rank-0"):
        files = [_file(folder, name, f"{world_size}-{on}") for on in (False, True)]
        want, got = (_content(file, part) for file in files)
        assert_same_state(got, want, part)


def _fail_to_save(cfg, path):
    trainer = make_trainer(_sharded(cfg))
    trainer.train_step(own_batches(0, 2))
    save(trainer, path)
    files = sorted(pathlib.Path(path).parent.iterdir())
    before = [file.read_bytes() for file in files]
    trainer.train_step(own_batches(1, 2))
    make = sharded_optimizer._empty
    if process_world()[0] == 0:
        sharded_optimizer._empty = lambda *form: (_ for _ in ()).throw(MemoryError("no room"))
    with pytest.raises(CheckpointError, match="saving .* rank 0: MemoryError: no room"):
        save(trainer, path)
    sharded_optimizer._empty = make
    assert [file.read_bytes() for file in sorted(pathlib.Path(path).parent.iterdir())] == before
    save(trainer, path)


def test_a_save_that_fails_on_one_rank_fails_on_all_and_loses_nothing(tmp_path):
    run_ranks(_fail_to_save, 2, configs()["fp32"], str(tmp_path / "checkpoint_last.pt"))


def test_optimizers_that_look_at_all_parameters_are_refused():
    cfg = _sharded(make_config(*ALL, "--optimizer", "adafactor"))
    with pytest.raises(ValueError, match="adam, nag or sgd, not adafactor"):
        make_trainer(cfg).optimizer  # noqa: B018 (builds it)
