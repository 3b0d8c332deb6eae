"""``moe_label_smoothed_cross_entropy``: arithmetic and what is logged, on a small model."""

import math

import pytest
from fairseq import tasks, utils
from fairseq.logging import metrics
from helpers.training import VOCABULARY
from helpers.translation import PAD, make_pairs, pair_config

from fairseq_tutel.integrations.fairseq.criterions import MoELabelSmoothedCrossEntropyCriterion

LAYERS = ("--moe-expert-count", "4", "--moe-freq", "1")


@pytest.fixture(scope="module")
def model():
    cfg = pair_config(*LAYERS)
    utils.set_torch_seed(1)
    return tasks.setup_task(cfg.task).build_model(cfg.model).double().eval()


def criterion(*words):
    cfg = pair_config(*LAYERS, *words)
    return tasks.setup_task(cfg.task).build_criterion(cfg.criterion)


def by_hand(model, sample, skipped=0):
    """(NLL, -log p of all symbols, right ones, tokens) of the targets, in nats."""
    logits = model(**sample["net_input"])[0].tolist()
    nll = smooth = right = tokens = 0
    for rows, targets in zip(logits, sample["target"].tolist(), strict=True):
        for row, target in list(zip(rows, targets, strict=True))[skipped:]:
            if target == PAD:
                continue
            lse = math.log(sum(math.exp(v) for v in row))
            nll += lse - row[target]
            smooth += sum(lse - v for v in row)
            right += row[target] == max(row)
            tokens += 1
    return nll, smooth, right, tokens


@pytest.mark.parametrize("sentence_avg", [False, True])
@pytest.mark.parametrize("combine", ["sum", "average"])
@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_loss_spreads_eps_over_all_symbols(model, eps, combine, sentence_avg):
    sample = make_pairs(3)
    words = ["--label-smoothing", str(eps), "--moe-gate-loss-combine-method", combine]
    words += ["--sentence-avg"] * sentence_avg
    loss, size, output = criterion(*words)(model, sample)
    nll, smooth, _, tokens = by_hand(model, sample)
    reports = model(**sample["net_input"])[1]["moe"]
    assert len(reports) == 4  # of both stacks
    gate_loss = sum(aux.loss.item() for aux in reports) / (1 if combine == "sum" else 4)
    assert size == (4 if sentence_avg else tokens)
    want = (1 - eps) * nll + eps / VOCABULARY * smooth + 0.1 * size * gate_loss
    assert loss.item() == pytest.approx(want, rel=1e-6)
    with metrics.aggregate(new_root=True) as aggregator:
        MoELabelSmoothedCrossEntropyCriterion.reduce_metrics([output])
        values = aggregator.get_smoothed_values()
    assert values["loss"] == pytest.approx(want / size / math.log(2), abs=1e-3)
    assert values["nll_loss"] == pytest.approx(nll / tokens / math.log(2), abs=1e-3)
    assert values["ppl"] == pytest.approx(math.exp(nll / tokens), rel=1e-2)
    assert values["moe_gate_loss"] == pytest.approx(gate_loss, rel=1e-6)
    assert "accuracy" not in values and "expert1_balance_top" in values


def test_accuracy_and_prefix(model):
    sample = make_pairs(5)
    output = criterion("--report-accuracy", "--ignore-prefix-size", "2")(model, sample)[2]
    nll, _, right, tokens = by_hand(model, sample, skipped=2)
    assert output["nll_loss"].item() == pytest.approx(nll, rel=1e-6)
    assert (output["n_correct"], output["total"]) == (right, tokens)
    with metrics.aggregate(new_root=True) as aggregator:
        MoELabelSmoothedCrossEntropyCriterion.reduce_metrics([output, output])
        values = aggregator.get_smoothed_values()
    assert values["accuracy"] == pytest.approx(100 * right / tokens, abs=1e-3)


def test_the_default_weight_of_the_gate_loss_is_that_of_the_branch():
    task = tasks.setup_task(pair_config().task)
    assert MoELabelSmoothedCrossEntropyCriterion(task, False).gate_loss_weight == 0
    with pytest.raises(ValueError, match="--moe-gate-loss-wt -1 must be at least 0"):
        MoELabelSmoothedCrossEntropyCriterion(task, False, moe_gate_loss_wt=-1)
