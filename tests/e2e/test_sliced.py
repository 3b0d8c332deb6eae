"""fairseq-train with experts in slices, stopped and resumed with the other placement and back."""

import pytest
from commands import forked, perplexity
from helpers.commands import ROOT, SMALL_LM, logged
from helpers.programs import requeued_in

from fairseq_tutel.command_line import EXIT_REQUEUE

pytestmark = pytest.mark.long

_DATA = f"{ROOT}/tests/golden/data_world1"
# an update is over four blocks, and does not depend on who has them
_WORDS = f"""
    {_DATA} {SMALL_LM} --task language_modeling --tokens-per-sample 4 --sample-break-mode none
    --batch-size 1 --moe-expert-count 2 --moe-capacity-factor 0 --moe-second-expert-policy all
    --dropout 0 --attention-dropout 0 --lr 0.01 --fp16 --fp16-init-scale 4 --fp16-adam-stats
    --clip-norm 0.5 --no-epoch-checkpoints --disable-validation
"""
_SLICED = ["--moe-expert-placement", "sliced", "--moe-parallelism-r"]


def _train(programs, folder, ranks, updates, *more, **options):
    command = ["fairseq-train", *_WORDS.split(), "--max-update", str(updates), *more]
    command += ["--save-dir", str(folder), "--update-freq", str(4 // ranks)]
    done = programs.run(command, ranks=ranks, timeout=120, **options)
    assert done.status == (EXIT_REQUEUE if options else 0), done.text[-3000:]
    rows = logged(done.text, "train_inner")
    return {int(row["num_updates"]): row["loss"] for row in rows}


def test_a_run_goes_from_slices_to_whole_experts_and_back(programs, tmp_path):
    """Four ranks are asked to leave, two go on, four again: as one without any of that."""
    want = _train(programs, tmp_path / "whole", 1, 6)
    folder = tmp_path / "sliced"
    losses = _train(programs, folder, 4, 6, *_SLICED, "2", prelude=requeued_in(2))
    names = {path.name for path in folder.glob("*.pt")}
    assert names == {f"checkpoint_last-{part}.pt" for part in ("shared", "rank-0", "rank-1")}
    losses |= _train(programs, folder, 2, 4)  # as many as experts: no slices
    losses |= _train(programs, folder, 4, 6, *_SLICED, "0")
    assert sorted(want) == [1, 2, 3, 4, 5, 6] and losses == pytest.approx(want, abs=2e-3)
    # for evaluation, on any number of ranks, slices and r of the training run mean nothing
    words = f"{_DATA} --user-dir fairseq_tutel --cpu --batch-size 4 --gen-subset valid".split()
    words += ["--tokens-per-sample", "4", "--path", str(folder / "checkpoint_last.pt")]
    found = perplexity(forked(programs, 1, "fairseq-eval-lm", *words))
    assert found == pytest.approx(196.5, rel=0.05)
