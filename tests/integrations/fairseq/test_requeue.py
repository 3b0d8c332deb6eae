"""A run that SIGUSR1 ends and that is started again does what an uninterrupted one does."""

import json
import os
import re
import signal
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers.commands import ROOT, SMALL_LM, logged
from helpers.distributed import run_ranks
from helpers.programs import requeued_in
from helpers.sets import member, names_in
from helpers.training import make_batch, make_config, make_trainer

from fairseq_tutel.command_line import EXIT_REQUEUE
from fairseq_tutel.distributed import process_world

UPDATES_PER_EPOCH, MAX_UPDATE = 6, 15  # 16 blocks, 3 to a batch
# With --update-epoch-batch-itr, since stock fairseq otherwise forms batches once, from a seed plus
# the number of the first epoch: a run that resumes in the second one has other batches from there.
_WORDS = f"""
    {ROOT}/tests/golden/data_world1 {SMALL_LM} --task language_modeling --tokens-per-sample 8
    --sample-break-mode none --batch-size 3 --moe-expert-count 4 --moe-load-log-interval 4
    --lr 0.002 --max-update {MAX_UPDATE} --validate-interval-updates 5 --save-interval-updates 5
    --update-epoch-batch-itr True
"""


def _train(programs, folder, prelude="", program=("fairseq-train",)):
    command = [*program, *_WORDS.split(), "--save-dir", str(folder)]
    done = programs.run(command, timeout=120, prelude=prelude)
    assert done.status in (0, EXIT_REQUEUE), done.text
    return done.status, done.text


def _saved(folder):
    file = member(folder / "checkpoint_last.pt", "shared")
    state = torch.load(file, weights_only=False)
    return state, state["optimizer_history"][-1]["num_updates"]


def _outcome(folder, logs):
    """What must not depend on interruptions."""
    last, updates = _saved(folder)
    validated = [row for text in logs for row in logged(text, "valid")]
    return {
        "files": sorted(name for name in names_in(folder) if name.endswith(".pt")),
        "updates": updates,
        "validated": [(row["num_updates"], row["loss"]) for row in validated],
        "loads": (folder / "expert_load.jsonl").read_text(),
        "best": last["extra_state"]["best"],
    }, last["model"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, programs):
    """Its outcome and its weights."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    code, log = _train(programs, folder)
    assert code == 0
    outcome, weights = _outcome(folder, [log])
    assert f"checkpoint_2_{UPDATES_PER_EPOCH + 4}.pt" in outcome["files"]
    return outcome, weights


@pytest.mark.parametrize("update", [8, 5, UPDATES_PER_EPOCH, MAX_UPDATE],
                         ids=["nothing is due", "a save", "an epoch ends", "the end"])  # fmt: skip
def test_requeued_run_is_like_an_uninterrupted_one(update, uninterrupted, programs, tmp_path):
    want, weights = uninterrupted
    code, log = _train(programs, tmp_path, requeued_in(update))
    logs = [log]
    assert code == (0 if update == MAX_UPDATE else EXIT_REQUEUE), log
    if code:
        assert re.search(r"SIGUSR1: saved .*checkpoint_last.pt", log)
        assert _saved(tmp_path)[1] == update
        code, log = _train(programs, tmp_path)
        assert code == 0
        logs.append(log)
    got, end = _outcome(tmp_path, logs)
    assert got == want
    # fairseq 0.12.2 has a buffer of whatever the memory held
    keys = [key for key in weights if not key.endswith("embed_positions._float_tensor")]
    assert all(torch.equal(end[key], weights[key]) for key in keys)
    updates = [json.loads(line)["update"] for line in got["loads"].splitlines()]
    assert updates == [4, 8, 12]


_HELD = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
os.kill(os.getpid(), signal.SIGUSR1)
"""


@pytest.mark.parametrize("prelude, program, update", [
    (requeued_in(2), ("-m", "fairseq_cli.train"), 2), (_HELD, ("fairseq-train",), 1),
], ids=["run as a module", "the launcher has held it back"])  # fmt: skip
def test_the_signal_is_heard(prelude, program, update, programs, tmp_path):
    code, log = _train(programs, tmp_path, prelude, program)
    assert code == EXIT_REQUEUE and re.search(r"SIGUSR1: saved .*checkpoint_last.pt", log)
    assert _saved(tmp_path)[1] == update


def _leave_together(folder):
    """One update per round on each of two ranks; SIGUSR1 comes to the second before the third, as
    both are about to begin again with more experts."""
    rank, _ = process_world()
    trainer = make_trainer(make_config("--moe-expert-count", "2"))
    trainer.requeue.watched, trainer.save_last = True, str
    reduced, counts = torch.distributed.all_reduce, []

    def counting(*args, **kwargs):
        counts[-1] += 1
        return reduced(*args, **kwargs)

    asked, ends = [], []
    torch.distributed.all_reduce = counting
    for update in range(4):
        if update == 2:
            ends += [_end_of_growing(trainer)]
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # the new process does
            if rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            ends += [_end_of_growing(trainer)]
            os.environ["FAIRSEQ_TUTEL_LAUNCHER"] = folder  # which then has the code
            ends += [_end_of_growing(trainer)]
        counts.append(0)
        trainer.train_step([make_batch(update + rank)])
        within = counts[-1]
        asked.append(trainer.requeue.made_on_any_rank())
        assert counts[-1] == within  # the question costs no message of its own
    return asked, ends


def _end_of_growing(trainer):
    """The exit code; or the new process's variables, and whether a request waits for it."""

    def execute(program, words, env):
        assert words == [sys.executable, *sys.orig_argv[1:]] and program == sys.executable
        files = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
        assert not [file for file in files if os.path.exists(f"/proc/self/fd/{file}")
                    and os.get_inheritable(file)]  # fmt: skip
        held = signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        env = {key: value for key, value in env.items() if os.environ.get(key) != value}
        raise SystemExit((env, held))

    growth = SimpleNamespace(is_due=lambda update: True, grow=lambda path: None)
    with (
        mock.patch.object(trainer, "growth", growth),
        mock.patch("os.execve", execute), mock.patch("time.sleep"),
        mock.patch("atexit._run_exitfuncs"), mock.patch("atexit.unregister"),
        pytest.raises(SystemExit) as left,
    ):  # fmt: skip
        trainer.leave()
    return left.value.code


def test_ranks_learn_of_a_signal_with_the_statistics_of_the_update(tmp_path):
    """And, where they begin again with more experts, of one that came since."""
    found = run_ranks(_leave_together, 2, str(tmp_path))
    assert len({ends[0][0].pop("MASTER_PORT") for _, ends in found}) == 1
    env = {"FAIRSEQ_TUTEL_GOES_ON": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert [ends for _, ends in found] == [[(env, True), EXIT_REQUEUE, 0]] * 2
    assert [asked for asked, _ in found] == [[False, False, True, True]] * 2
    assert (tmp_path / "outcome").read_text() == str(EXIT_REQUEUE)
