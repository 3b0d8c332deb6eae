"""``moe_cross_entropy`` with made-up logits and gate losses, ``moe_label_smoothed_cross_entropy``
on a small model: arithmetic and what is logged."""

import math
from types import SimpleNamespace

import pytest
import torch
from fairseq import tasks, utils
from fairseq.logging import metrics
from helpers.translation import make_pairs, pair_config
from torch import nn

from fairseq_tutel.config import MoEConfig
from fairseq_tutel.distributed import Direction, ExchangeRecord
from fairseq_tutel.integrations.fairseq.criterions import (
    MoECrossEntropyCriterion,
    MoELabelSmoothedCrossEntropyCriterion,
)
from fairseq_tutel.integrations.fairseq.criterions.moe_criterion import collected_extra, join_passes
from fairseq_tutel.moe import (
    METRIC_NAMES,
    UTILISATION_NAMES,
    WIRE_ERROR_NAMES,
    WIRE_LAYERS_NAMES,
    MoEAux,
    MoELayer,
    RoutingCounts,
    utilisation,
)
from fairseq_tutel.training import collect_aux

VOCABULARY, PAD = 6, 1
TARGET = torch.tensor([[2, 3, 4], [5, PAD, PAD]])  # 4 tokens in 2 sentences
TOKENS, SENTENCES = 4, 2


def counts(seed):
    """What a layer with 6 experts reports of 10 tokens beside its loss; some were dropped."""
    torch.manual_seed(seed)
    first, second = (torch.randint(6, (10,)).bincount(minlength=6) for _ in range(2))
    routed = torch.stack([first, second])
    routed[1, second.argmax()] -= 1
    kept = routed.sum(0)
    kept[first.argmax()] = first.max() - 1  # drops a first choice, and all second ones
    chosen = torch.stack([first, second])
    as_int = (x.to(torch.int32) for x in (chosen, routed, kept))
    record = ExchangeRecord()
    record.cpu_ms, record.cuda_ms = float(seed), 2.0 * seed
    return (torch.rand(()) * 10, *as_int, 10, record)


class FakeModel(nn.Module):
    """Given logits, and reports of MoE layers with given losses."""

    def __init__(self, gate_losses):
        super().__init__()
        torch.manual_seed(0)
        self.logits = nn.Parameter(torch.randn(2, 3, VOCABULARY, dtype=torch.float64))
        self.gate_losses = nn.Parameter(torch.tensor(gate_losses, dtype=torch.float32))
        self.counts = [counts(seed) for seed in range(len(gate_losses))]
        self.routing = None

    def forward(self, **net_input):
        rows = zip(self.gate_losses, self.counts, strict=True)
        reports = [MoEAux(loss, *row) for loss, row in rows]
        extra = {"moe": reports} if reports else {}
        if self.routing is not None:
            extra["moe_counts"] = self.routing
        return self.logits, extra

    def get_normalized_probs(self, net_output, log_probs, sample=None):
        return net_output[0].log_softmax(-1)

    def get_targets(self, sample, net_output):
        return sample["target"]


def criterion(weight=0.5, combine="average", transform="none", sentence_avg=False):
    task = SimpleNamespace(target_dictionary=SimpleNamespace(pad=lambda: PAD))
    return MoECrossEntropyCriterion(task, sentence_avg, weight, combine, transform)


def sample():
    return {"net_input": {}, "target": TARGET, "ntokens": TOKENS}


def cross_entropy(model):
    """In nats, summed over the four real tokens."""
    total = 0.0
    for row, targets in zip(model.logits.tolist(), TARGET.tolist(), strict=True):
        for logits, target in zip(row, targets, strict=True):
            if target != PAD:
                total += math.log(sum(math.exp(v) for v in logits)) - logits[target]
    return total


def logged(outputs, kind=MoECrossEntropyCriterion):
    """What reduce_metrics hands to fairseq's aggregator, by name."""
    with metrics.aggregate(new_root=True) as aggregator:
        kind.reduce_metrics(outputs)
    return {
        key: float(meter.avg) if hasattr(meter, "avg") else meter.fn(aggregator)
        for key, meter in aggregator.items()
    }


def output_of(model, **options):
    """What a criterion hands on of a batch."""
    return criterion(**options)(model, sample())[2]


@pytest.mark.parametrize("combine, total", [("sum", 4.0), ("average", 2.0)])
@pytest.mark.parametrize("transform", ["none", "neg_log"])
@pytest.mark.parametrize("sentence_avg", [False, True])
def test_loss_is_cross_entropy_plus_weighted_gate_loss(combine, total, transform, sentence_avg):
    model, gate_loss = FakeModel([1.5, 2.5]), total if transform == "none" else -math.log(total)
    loss, sample_size, output = criterion(0.5, combine, transform, sentence_avg)(model, sample())
    size = SENTENCES if sentence_avg else TOKENS
    inner = cross_entropy(model)
    assert sample_size == size
    assert loss.item() == pytest.approx(inner + 0.5 * size * gate_loss, rel=1e-6)
    assert output["inner_loss"].item() == pytest.approx(inner)
    assert output["moe_loss"].item() == pytest.approx(size * gate_loss, rel=1e-6)
    assert (output["ntokens"], output["nsentences"], output["sample_size"]) == (4, 2, size)

    loss.backward()
    layers = 1.0 if combine == "sum" else 0.5
    slope = -layers / total if transform == "neg_log" else layers
    assert model.gate_losses.grad.tolist() == pytest.approx([0.5 * size * slope] * 2)

    values = logged([output])
    assert values["moe_gate_loss"] == pytest.approx(gate_loss, rel=1e-6)  # without the weight
    assert values["loss"] == pytest.approx(loss.item() / size / math.log(2), rel=1e-6)
    assert values["inner_loss"] == pytest.approx(inner / size / math.log(2), rel=1e-6)
    assert ("nll_loss" in values) == sentence_avg
    per_token = inner / TOKENS / math.log(2)
    assert values["ppl"] == pytest.approx(2**per_token, abs=0.01)
    if sentence_avg:
        assert values["nll_loss"] == pytest.approx(per_token, rel=1e-6)
    unreduced, *_ = criterion(0.0, combine, transform)(model, sample(), reduce=False)
    assert unreduced.shape == (TARGET.numel(),)
    assert unreduced.sum().item() == pytest.approx(inner)


def test_collected_counts_are_those_of_each_layer():
    """The first is called once, the second twice, and the third not."""
    torch.manual_seed(0)
    model = nn.ModuleList(MoELayer(8, 4, 8) for _ in range(3))
    x, calls = torch.randn(12, 8), (0, 1, 1)
    loads = torch.stack([layer(x, return_aux=True)[1].load_E for layer in model])
    with collect_aux(model) as aux:
        for number in calls:
            model[number](x)
    found = collected_extra(aux, model)["moe_counts"].load
    wanted = loads * torch.tensor([[calls.count(number)] for number in range(3)])
    assert not torch.equal(loads[0], loads[1]) and found.tolist() == wanted.tolist()


def test_errors_on_the_wire_are_means_over_the_layers_that_have_one():
    """Those of gradients, which records have when the backward pass is over, included."""
    dispatch, gradient = Direction.DISPATCH, Direction.DISPATCH_GRADIENT
    model = FakeModel([1.0, 2.0])
    assert not set(WIRE_ERROR_NAMES) & set(logged([output_of(model)]))
    logs = [output_of(model)]
    records = [counts_of_layer[-1] for counts_of_layer in model.counts]
    records[0].add_square_sums(dispatch, torch.tensor([0.04, 4.0]))
    records[0].add_square_sums(gradient, torch.tensor([0.01, 1.0]))
    records[1].add_square_sums(dispatch, torch.tensor([0.09, 1.0]))
    join_passes(logs)
    assert all(torch.is_tensor(logs[0][name]) for name in WIRE_ERROR_NAMES + WIRE_LAYERS_NAMES)
    values = logged(logs)
    assert values["moe_wire_error_dispatch"] == pytest.approx(0.2)
    assert values["moe_wire_error_dispatch_gradient"] == pytest.approx(0.1)
    assert "moe_wire_error_combine" not in values
    assert logged([output_of(model.eval())])["moe_wire_error_dispatch"] == pytest.approx(0.2)


def test_share_of_null_experts():
    """20 choices of a layer; one without such experts logs nothing of them."""
    model = FakeModel([1.0, 1.0])
    plain = output_of(model)
    assert "moe_null" not in plain and "moe_null" not in logged([plain])
    with_nulls = ({"num_null_KN": torch.tensor([[3], [2]])}, {"num_null_KN": torch.zeros(2, 1)})
    reports = model()[1]["moe"]
    reports = [aux._replace(**nulls) for aux, nulls in zip(reports, with_nulls, strict=True)]
    model.forward = lambda **net_input: (model.logits, {"moe": reports})
    output = output_of(model)
    assert logged([output, output])["moe_null"] == pytest.approx(100 * 5 / (20 + 5) / 2, abs=0.01)


@pytest.mark.parametrize("extra", [{}, None])
def test_dense_models_have_no_gate_loss(extra):
    """fairseq's lstm_lm returns None beside its output in training."""
    model = FakeModel([])
    model.forward = lambda **inputs: (model.logits, extra)
    loss, _, output = criterion(weight=7.0)(model, sample())
    assert loss.item() == pytest.approx(cross_entropy(model))
    assert output["moe_loss"] == 0 and not set(METRIC_NAMES) & set(output)
    assert logged([output])["moe_gate_loss"] == 0


def routing_of_a_pass(load_LE, kept_LE, received_LW, slots):
    as_int = (torch.tensor(x, dtype=torch.int32) for x in (load_LE, kept_LE, received_LW))
    return RoutingCounts(*as_int, torch.tensor([slots] * len(load_LE), dtype=torch.int32))


# forward passes of one layer, 4 experts on 2 ranks, of two ranks: load, kept, received and slots
ONE = [
    ([[5, 1, 2, 0]], [[3, 1, 2, 0]], [[4, 2]], 12),
    ([[2, 2, 2, 2]], [[2, 2, 2, 2]], [[4, 4]], 12),
    ([[8, 0, 0, 0]], [[3, 0, 0, 0]], [[3, 0]], 12),
]
OTHER = [([[1, 1, 3, 3]], [[1, 1, 3, 3]], [[2, 6]], 12), ([[1] * 4], [[1] * 4], [[2, 2]], 12)]


def test_utilisation_is_that_of_passes_of_all_ranks():
    """Stock sums the outputs by one all-reduce, instead of pickling them."""
    assert MoECrossEntropyCriterion.logging_outputs_can_be_summed()
    model, ranks = FakeModel([2.0]), []
    assert not set(UTILISATION_NAMES) & set(logged([output_of(model)]))
    for passes, fillers in ((ONE, 0), (OTHER, 1)):  # the other rank has no first batch
        logs = []
        for counts_of_pass in passes:
            model.routing = routing_of_a_pass(*counts_of_pass)
            logs.append(output_of(model))
        alone = logged(logs)
        join_passes(logs, fillers)
        assert all(not {"moe_load", "moe_slots"} & set(log) for log in logs[1:])
        assert all(torch.is_tensor(v) or isinstance(v, (int, float)) for v in logs[0].values())
        ranks.append(logs[0])
    assert alone["moe_drop"] == 0 and alone["moe_dead"] == 0
    both = {key: ranks[0][key] + ranks[1][key] for key in ranks[0]}  # as stock's all-reduce
    values = logged([both])
    passes = [[ONE[0]], [ONE[1], OTHER[0]], [ONE[2], OTHER[1]]]
    of_ranks = [[routing_of_a_pass(*counts_of_rank) for counts_of_rank in one] for one in passes]
    used = [utilisation(RoutingCounts(*map(sum, zip(*one, strict=True)))) for one in of_ranks]
    want = torch.tensor([[float(value) for value in one] for one in used]).mean(0)
    assert [values[name] for name in UTILISATION_NAMES] == pytest.approx(want.tolist(), rel=1e-5)


def test_what_an_option_leaves_at_0_is_not_logged():
    """Drops of a dropless layer, whose rows are as many as are needed; second choices of top-1."""
    model = FakeModel([2.0])
    model.routing = routing_of_a_pass(*ONE[0][:3], 0)
    assert {"moe_drop", "overflow_expert1"} <= set(logged([output_of(model)]))
    model.moe_layers = {"1": SimpleNamespace(config=MoEConfig(num_experts=6, capacity_factor=0))}
    values = logged([output_of(model)])
    dropping = {"moe_util_slot", "moe_drop", "overflow_expert1", "overflow_expert2"}
    clocks = {"all_to_all_cpu_time_ms", "all_to_all_cuda_time_ms"}
    assert not (dropping | clocks) & set(values)  # the first layer's clocks say 0
    assert set(METRIC_NAMES) - dropping - clocks <= set(values)
    assert values["moe_util_load"] == pytest.approx(100 * 2 / 5)
    entropy, chosen, routed, kept, *rest = counts(1)
    top1 = MoEAux(torch.tensor(2.0), entropy, chosen[:1], routed[:1], kept, *rest)
    model.forward = lambda **net_input: (model.logits, {"moe": [top1]})
    values = logged([output_of(model)])
    second = {name for name in METRIC_NAMES if "2" in name}
    assert not (second | {"overflow_expert1"}) & set(values)
    assert {"expert1_balance_top", *clocks} <= set(values)


LAYERS = ("--moe-expert-count", "4", "--moe-freq", "1")


@pytest.fixture(scope="module")
def translator():
    cfg = pair_config(*LAYERS)
    utils.set_torch_seed(1)
    return tasks.setup_task(cfg.task).build_model(cfg.model).double().eval()


def smoothed(*words):
    cfg = pair_config(*LAYERS, *words)
    return tasks.setup_task(cfg.task).build_criterion(cfg.criterion)


def by_hand(model, batch, skipped=0):
    """(NLL, -log p of all symbols, right ones, tokens) of the targets, in nats."""
    logits = model(**batch["net_input"])[0].tolist()
    nll = smooth = right = tokens = 0
    for rows, targets in zip(logits, batch["target"].tolist(), strict=True):
        for row, target in list(zip(rows, targets, strict=True))[skipped:]:
            if target == PAD:
                continue
            lse = math.log(sum(math.exp(v) for v in row))
            nll, smooth = nll + lse - row[target], smooth + sum(lse - v for v in row)
            right, tokens = right + (row[target] == max(row)), tokens + 1
    return nll, smooth, right, tokens


@pytest.mark.parametrize(
    "eps, combine, sentence_avg", [(0.1, "sum", False), (0.1, "average", True), (0.0, "sum", True)]
)
def test_loss_spreads_eps_over_all_symbols(translator, eps, combine, sentence_avg):
    batch = make_pairs(3)
    words = ["--label-smoothing", str(eps), "--moe-gate-loss-combine-method", combine]
    words += ["--sentence-avg"] * sentence_avg
    loss, size, output = smoothed(*words)(translator, batch)
    nll, smooth, _, tokens = by_hand(translator, batch)
    reports = translator(**batch["net_input"])[1]["moe"]
    assert len(reports) == 4  # of both stacks
    gate_loss = sum(aux.loss.item() for aux in reports) / (1 if combine == "sum" else 4)
    assert size == (4 if sentence_avg else tokens)
    want = (1 - eps) * nll + eps / 32 * smooth + 0.1 * size * gate_loss
    assert loss.item() == pytest.approx(want, rel=1e-6)
    values = logged([output], MoELabelSmoothedCrossEntropyCriterion)
    assert values["loss"] == pytest.approx(want / size / math.log(2), abs=1e-3)
    assert values["nll_loss"] == pytest.approx(nll / tokens / math.log(2), abs=1e-3)
    assert values["ppl"] == pytest.approx(math.exp(nll / tokens), rel=1e-2)
    assert values["moe_gate_loss"] == pytest.approx(gate_loss, rel=1e-6)
    assert "accuracy" not in values and "expert1_balance_top" in values


def test_accuracy_prefix_and_the_branchs_weight(translator):
    batch = make_pairs(5)
    output = smoothed("--report-accuracy", "--ignore-prefix-size", "2")(translator, batch)[2]
    nll, _, right, tokens = by_hand(translator, batch, skipped=2)
    assert output["nll_loss"].item() == pytest.approx(nll, rel=1e-6)
    assert (output["n_correct"], output["total"]) == (right, tokens)
    values = logged([output, output], MoELabelSmoothedCrossEntropyCriterion)
    assert values["accuracy"] == pytest.approx(100 * right / tokens, abs=1e-3)
    task = tasks.setup_task(pair_config().task)
    assert MoELabelSmoothedCrossEntropyCriterion(task, False).gate_loss_weight == 0
    with pytest.raises(ValueError, match="--moe-gate-loss-wt -1 must be at least 0"):
        MoELabelSmoothedCrossEntropyCriterion(task, False, moe_gate_loss_wt=-1)
