"""The page about a run's log against what a run logs."""

import re

from helpers.commands import ROOT, SMALL_LM, logged

from fairseq_tutel.integrations.fairseq.errors import log_filters

PAGE = ROOT / "fairseq_tutel/integrations/fairseq/WATCHING.md"
FAIRSEQS = {
    "epoch", "wps", "ups", "wpb", "bsz", "num_updates", "lr", "gnorm", "clip", "train_wall", "wall",
    "gb_free",
}  # fmt: skip
# of a tuner, of a loss per sentence, of a GPU's clock, of an encoder-decoder, of ranks that help
NOT_IN_THIS_RUN = {
    "moe_exchange_ms", "nll_loss", "all_to_all_cuda_time_ms", "cmr_gate_loss",
    "moe_util_rank_helped", "moe_rows_helped", "moe_mb_moved",
}  # fmt: skip
RUN = f"""{SMALL_LM}
    --task dummy_lm --dict-size 28 --dataset-size 16 --tokens-per-sample 8 --batch-size 4 --no-save
    --moe-expert-count 4 --lr 0.01 --max-update 2 --moe-null-experts 2 --moe-wire bf16
    --record-a2a-perf-stats --moe-second-expert-policy all --disable-validation
"""


def test_the_page_names_every_metric_and_no_other_and_all_experts_are_counted(programs):
    rows = re.findall(r"^\| `(\w+)`(?: \*)? \|(.*)\|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    names = [name for name, *_ in rows]
    assert len(set(names)) == len(names) > 20 and all(all(map(str.strip, row)) for row in rows)
    marked = set(re.findall(r"^\| `(\w+)` \*", PAGE.read_text(), re.MULTILINE))
    assert marked == {name for name in names if log_filters._DETAILS.fullmatch(f", {name}=1")}
    counts = []
    for ranks in (1, 2):
        done = programs.run(["fairseq-train", *RUN.split()], ranks=ranks)
        assert done.status == 0, done.text[-3000:]
        counts += re.findall(r"parameters of all ranks: (.*) active per token: (.*)", done.stdout)
    (run,) = logged(done.text, "train")
    assert set(run) - FAIRSEQS == set(names) - NOT_IN_THIS_RUN
    # one layer of 4 experts: one has 2 * 16 * 32 weights and 48 biases
    assert counts[0] == counts[1] and "experts 4,288)" in counts[0][0]
    assert "(2 of 4 experts)" in counts[0][1]
