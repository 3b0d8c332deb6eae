"""The published command: trained, resumed, resharded, evaluated, asked."""

import functools

import pytest
from commands import forked, launched, meta_command, perplexity
from helpers.commands import logged, run
from helpers.sets import names_in, set_names

pytestmark = pytest.mark.long


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_train_resume_reshard_evaluate_generate(data_bin, programs, tmp_path):
    """The first commands as a user starts them, later ones of the same kind forked."""
    fork, save_dir = functools.partial(forked, programs), tmp_path / "run"
    path = save_dir / "checkpoint_last.pt"

    def evaluate(path, ranks, batch):
        words = f"""{data_bin} --user-dir fairseq_tutel --path {path} --gen-subset test --cpu
            --tokens-per-sample 64 --required-batch-size-multiple 1 --batch-size {batch} --is-moe
            --model-overrides""".split()
        overrides = "{'moe_eval_capacity_token_fraction': None}"
        return perplexity(fork(ranks, "fairseq-eval-lm", *words, overrides))

    for last in (3, 6):
        words = meta_command(data_bin, save_dir, "--max-update", str(last))
        log = run(launched(2, "fairseq-train", *words))
        updates = [int(row["num_updates"]) for row in logged(log, "train_inner")]
        assert updates == list(range(last - 2, last + 1))
        names = {name for name in names_in(save_dir) if name.startswith("checkpoint_last")}
        assert names == set_names("checkpoint_last", 2)

    reference = evaluate(path, 2, 4)
    assert 10 < reference < 1200
    tool = functools.partial(fork, 1, "-m", "fairseq_tutel.checkpoint")
    for ranks in (4, 1):
        resharded = tmp_path / f"on{ranks}" / "checkpoint_last.pt"
        tool("reshard", str(path), str(resharded), "--ranks", str(ranks))
        assert evaluate(resharded, ranks, 3) == pytest.approx(reference, rel=1e-3)
        words = meta_command(data_bin, resharded.parent, "--max-update", "7")
        log = fork(ranks, "fairseq-train", *words)
        assert [int(row["num_updates"]) for row in logged(log, "train_inner")] == [7]
    merged = tmp_path / "model.pt"
    tool("merge", str(path), str(merged))
    assert evaluate(merged, 1, 1) == pytest.approx(reference, rel=1e-3)

    ask = ["fairseq-interactive", str(data_bin), "--user-dir", "fairseq_tutel", "--cpu"]
    ask += ["--task", "language_modeling", "--path", str(path), "--max-len-b", "12"]
    for how in ("--beam 3", "--sampling --sampling-topk 5 --beam 1"):
        answer = programs.run([*ask, *how.split()], text="the value of\n")
        assert answer.status == 0, answer.text[-3000:]
        completion = [line for line in answer.text.splitlines() if line.startswith("H-0")][0]
        assert completion.split("\t")[2].startswith("the value of")
