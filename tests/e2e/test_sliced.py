"""fairseq-train with experts in slices, stopped and resumed with the other placement and back."""

import pytest
import torch
from commands import forked, perplexity
from helpers.assertions import rms_ratio
from helpers.commands import ROOT, logged
from helpers.programs import requeued_in

from fairseq_tutel.command_line import EXIT_REQUEUE

pytestmark = pytest.mark.long

_DATA = f"{ROOT}/tests/golden/data_world1"
# an update is over four blocks, and does not depend on who has them
_WORDS = f"""
    {_DATA} --user-dir {ROOT}/fairseq_tutel --cpu --task language_modeling --tokens-per-sample 4
    --sample-break-mode none --batch-size 1 --arch transformer_lm_gpt_moe --moe-expert-count 2
    --criterion moe_cross_entropy --moe-capacity-factor 0 --moe-second-expert-policy all
    --decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32
    --decoder-attention-heads 2 --dropout 0 --attention-dropout 0 --optimizer adam --lr 0.01
    --fp16 --fp16-init-scale 4 --fp16-adam-stats --clip-norm 0.5 --num-workers 0
    --required-batch-size-multiple 1 --log-format json --log-interval 1 --no-epoch-checkpoints
    --disable-validation
"""
_SLICED = ["--moe-expert-placement", "sliced", "--moe-parallelism-r"]


def _train(programs, folder, ranks, updates, *more, **options):
    command = ["fairseq-train", *_WORDS.split(), "--max-update", str(updates), *more]
    command += ["--save-dir", str(folder), "--update-freq", str(4 // ranks)]
    done = programs.run(command, ranks=ranks, timeout=120, **options)
    assert done.status == (EXIT_REQUEUE if options else 0), done.text[-3000:]
    rows = logged(done.text, "train_inner")
    return {int(row["num_updates"]): row["loss"] for row in rows}


def _experts(folder):
    """Weights, fp32 copies and moments of both experts in a set, read with torch alone."""
    found = {}
    for path in sorted(folder.glob("checkpoint_last-rank-*.pt")):
        state = torch.load(path, weights_only=False)
        for name, value in state["model"].items():
            kept = state["last_optimizer_state"]["named_state"][name]
            if path.name.endswith("rank-1.pt"):  # of the run with two files
                name = name.replace("experts.0.", "experts.1.")
            assert kept["step"] == 6
            found[name], found[f"fp32 {name}"] = value, kept["fp32_weight"]
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{key} {name}"] = kept[key].float() * kept[f"{key}_scale"]
    return found


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
    whole, joined = _experts(tmp_path / "whole"), _experts(folder)
    assert joined.keys() == whole.keys()
    for name, value in whole.items():
        assert joined[name].shape == value.shape and rms_ratio(joined[name], value) < 5e-3, name
    # for evaluation, on any number of ranks, slices and r of the training run mean nothing
    words = f"{_DATA} --user-dir fairseq_tutel --cpu --batch-size 4 --gen-subset valid".split()
    words += ["--tokens-per-sample", "4", "--path", str(folder / "checkpoint_last.pt")]
    found = perplexity(forked(programs, 1, "fairseq-eval-lm", *words))
    assert found == pytest.approx(196.5, rel=0.05)
