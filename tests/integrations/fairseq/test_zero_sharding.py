"""``--zero-sharding os`` against the same run without it: bit for bit, in training and in files.

Other numbers of ranks load the files: test_resume.py.
"""

import math

import pytest
import torch
from helpers.assertions import assert_same_state
from helpers.distributed import run_ranks
from helpers.sets import member
from helpers.training import make_config, make_trainer, named, own_batches, record_updates, save

from fairseq_tutel.checkpoint import CheckpointError
from fairseq_tutel.distributed import is_expert, process_world
from fairseq_tutel.training.state import sharded_optimizer

pytestmark = pytest.mark.long

HALF, BATCHES = 6, 4  # updates before and after the save, micro-batches of all ranks per update
SCALE = "--fp16-init-scale 8 --fp16-scale-tolerance 0"
# two experts, so that on 4 ranks each is on two of them; on 2 ranks --update-freq is 2
CASES = [
    ("--ddp-backend pytorch_ddp --weight-decay 0.01", 4),
    (f"--memory-efficient-fp16 --fp16-adam-stats {SCALE}", 4),
    (f"--fp16 --ddp-backend pytorch_ddp {SCALE}", 2),
    (f"--memory-efficient-fp16 {SCALE}", 2),
]


def config(options, sharding):
    words = f"--moe-expert-count 2 --clip-norm 0.3 --zero-sharding {sharding} {options}"
    return make_config(*words.split())


def _go_on(trainer, first, last):
    """Make updates; on rank 1 the sixth has an inf, if the precision knows what to do with it.

    Returns:
        Loss and norm of each update, and the weights at the end.
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


def _train(cfg, path):
    """Losses and norms before the save, and for each dense parameter whether its state is here."""
    trainer = make_trainer(cfg)
    before = _go_on(trainer, 0, HALF)
    save(trainer, path, HALF)
    after = _go_on(trainer, HALF, 2 * HALF)
    optimizer = trainer.optimizer.optimizer
    params = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(optimizer.state.get(p) for p in params if is_expert(p))
    return before, after, [bool(optimizer.state.get(p)) for p in params if not is_expert(p)]


def _train_both(cfgs, folder):
    plain, sharded = (_train(cfg, f"{folder}/{way}.pt") for way, cfg in cfgs.items())
    assert_same_state(sharded[:2], plain[:2])
    assert all(plain[2]) and any(sharded[2])
    return plain[0][0], sharded[2]


@pytest.mark.parametrize("options, ranks", CASES)
def test_trains_to_the_bit_as_without_it(options, ranks, tmp_path):
    cfgs = {way: config(options, way) for way in ("none", "os")}
    records, states = zip(*run_ranks(_train_both, ranks, cfgs, str(tmp_path)), strict=True)
    assert len(records[0]) == HALF - ("fp16" in options)  # one had an inf
    assert any(norm > 0.3 for _, norm in records[0])  # clipped
    assert {sum(here) for here in zip(*states, strict=True)} == {1}
    for part in ("shared", "rank-0"):
        plain, sharded = (
            torch.load(member(tmp_path / f"{way}.pt", part), weights_only=False) for way in cfgs
        )
        for key in ("model", "last_optimizer_state"):
            assert_same_state(sharded[key], plain[key], part)


def _fail_to_save(cfg, folder):
    path = folder / "checkpoint_last.pt"
    trainer = make_trainer(cfg)
    trainer.train_step(own_batches(0, 2))
    save(trainer, path)
    before = [file.read_bytes() for file in sorted(folder.iterdir())]
    trainer.train_step(own_batches(1, 2))
    make = sharded_optimizer._empty
    if process_world()[0] == 0:
        sharded_optimizer._empty = lambda *form: (_ for _ in ()).throw(MemoryError("no room"))
    with pytest.raises(CheckpointError, match="saving .* rank 0: MemoryError: no room"):
        save(trainer, path)
    sharded_optimizer._empty = make
    assert [file.read_bytes() for file in sorted(folder.iterdir())] == before
    save(trainer, path)


def test_a_save_that_fails_on_one_rank_fails_on_all_and_loses_nothing(tmp_path):
    run_ranks(_fail_to_save, 2, config("", "os"), tmp_path)


def test_optimizers_that_look_at_all_parameters_are_refused():
    with pytest.raises(ValueError, match="adam, nag or sgd, not adafactor"):
        make_trainer(config("--optimizer adafactor", "os")).optimizer  # noqa: B018 (builds it)
