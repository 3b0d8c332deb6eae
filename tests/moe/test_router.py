"""``route_logits`` against gating token by token, and the invariants of its results.

A cell is one value of each option. Each pair of values that is not refused occurs in a cell.
"""

import math

import pytest
import torch
from helpers.assertions import assert_close, rms_ratio
from helpers.naive import gating
from helpers.pairs import cover_pairs
from helpers.routing import route, weight_by_expert

from fairseq_tutel.moe import METRIC_NAMES, MoEConfig, make_router

T, E = 13, 5  # neither divides the other; capacity ceil(13/5) = 3 per choice drops tokens

AXES = {
    "top_k": (2, 1, 3, 4),
    "capacity_factor": (1.0, 0.0, -0.7, 0.6),
    "eval_capacity_factor": (-1.0, 0.5, 0.0),
    "score_function": ("softmax", "sigmoid"),
    "second_expert_policy": ("all", "random", "sampling"),
    "normalize_before_dropping": (False, True),
    "unnormalized_weights": (False, True),
    "batch_prioritized": (False, True),
    "drop_policy": ("position", "probability", "random"),
    "overflow_rerouting": (0, 1, 2, 9),
    "null_experts": (0, 3),
    "load_bias": ("none", "sign", "quantile", "frozen"),
    # groups of 12 experts, and how many of them a token may choose from
    "groups": ((1, 1), (4, 2), (4, 4), (6, 1)),
    "group_score": ("top2", "max"),
    "balance_choices": ("first", "all"),
    "balance_scope": ("rank", "sequence"),
    "balance_over": ("all", "unpadded"),
    "z_loss_weight": (0.0, 0.4),
    "route_scale": (1.0, 2.5),
    "pad": (0.0, 0.3, 1.0),  # share of padding
    "tokens": (T, 29, 1, 0),
    # added to the logits of one expert, or taken from those of another
    "favourite": (0.0, 2.0, 8.0, -50.0),
}


def config_of(cell):
    """The config of a cell; None if it is refused."""
    options = dict(vars(cell))
    for name in ("pad", "tokens", "favourite"):
        del options[name]
    groups, top_groups = options.pop("groups")
    if groups > 1:
        options |= {"num_expert_groups": groups, "top_groups": top_groups}
    try:
        return MoEConfig(num_experts=12 if groups > 1 else E, **options)
    except ValueError:
        return None


def set_up(cell, seed):
    """(config, logits, padding mask, load bias) of a cell."""
    generator, config = torch.Generator().manual_seed(seed), config_of(cell)
    shape = cell.tokens, config.num_outputs
    logits = 2 * torch.randn(shape, dtype=torch.float64, generator=generator)
    logits[:, 1] += cell.favourite
    logits[:, 2] -= max(-cell.favourite, 0.0)
    pad = torch.rand(cell.tokens, generator=generator) < cell.pad if cell.pad else None
    bias = torch.randn(config.num_outputs, dtype=torch.float64, generator=generator)
    return config, logits.requires_grad_(), pad, bias if config.load_bias != "none" else None


def check_cell(cell, training, seed):
    """Compare with gating token by token; return how many pairs found their expert full."""
    config, logits, pad, bias = set_up(cell, seed)
    want = gating(logits, config, training, pad_T=pad, bias_E=bias, seed=seed)
    torch.manual_seed(seed)
    routing, aux = route(logits, config, training, pad_T=pad, load_bias_E=bias)
    got = weight_by_expert(routing)
    assert_close("weights", got, want.weight_TE, torch.float64)
    assert_close("loss", aux.loss, want.loss, torch.float64)
    target = torch.randn(len(logits), config.num_experts, dtype=torch.float64)
    wanted = (want.weight_TE * target).sum() + 3 * want.loss
    total = (got * target).sum() + 3 * aux.loss
    want_grad, grad = (torch.autograd.grad(x, logits)[0] for x in (wanted, total))
    assert_close("gradient of logits", grad, want_grad, torch.float64)
    check_rows(config, want, routing, aux, training)
    metrics = aux.metrics_dict()
    assert set(metrics) == set(want.metrics) == {*METRIC_NAMES[:-2], "moe_drop"}
    for key, value in want.metrics.items():
        assert metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-5), key
    return want.num_full


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_route_equals_gating_token_by_token(training):
    failures, num_full = [], 0
    for seed in range(3):
        for cell in cover_pairs(AXES, lambda cell: config_of(cell) is not None, seed=seed):
            try:
                num_full += check_cell(cell, training, seed)
            except (AssertionError, RuntimeError) as error:
                failures.append(f"seed {seed}, {cell}\n{str(error)[:400]}")
    if failures:
        pytest.fail(f"{len(failures)} cells\n" + "\n\n".join(failures[:12]))
    assert num_full > 200


def check_rows(config, want, routing, aux, training):
    """Padding, rejected and dropped choices hold no row; all others the row of their place."""
    assert routing.padded == (training and config.capacity_factor > 0)
    kept = torch.tensor([e for e, _ in want.place.values()], dtype=torch.long)
    kept_E = kept.bincount(minlength=config.num_experts)
    assert routing.num_kept_per_expert_E.tolist() == kept_E.tolist()
    start_E = kept_E.cumsum(0) - kept_E
    if routing.padded:
        start_E = want.capacity * torch.arange(config.num_experts)
        assert len(routing.src_pair_R) == config.num_experts * want.capacity
    rows = {
        int(start_E[expert]) + position: t * config.top_k + k
        for (t, k), (expert, position) in want.place.items()
    }
    assert len(rows) == int(kept_E.sum()) == int(routing.kept_TK.sum())
    for row, pair in enumerate(routing.src_pair_R.tolist()):
        assert pair == rows.get(row, -1), row
    for row, pair in rows.items():
        assert routing.dest_row_TK.flatten()[pair] == row
    assert not routing.topk_weight_TK[~routing.kept_TK].any()
    assert aux.load_E.tolist() == want.routed_E
    assert aux.num_null_KN is None or int(aux.num_null_KN.sum()) == want.num_null


@pytest.mark.parametrize("padding", [False, True])
def test_load_importance_loss_equals_a_loop(padding):
    torch.manual_seed(8)
    logits = torch.randn(T, E, dtype=torch.float64, requires_grad=True)
    pad = torch.arange(T) < 4 if padding else None
    options = {"gate_noise": 1.5, "load_importance_loss": True, "second_expert_policy": "all"}
    config = MoEConfig(num_experts=E, top_k=2, **options)
    std = 1.5 / E
    torch.manual_seed(9)
    noisy = logits + std * torch.randn_like(logits)

    torch.manual_seed(9)
    loss = route(logits, config, True, pad_T=pad)[1].loss
    counted = slice(4 if padding else 0, T)
    threshold_T1 = noisy.sort(1, descending=True).values[counted, 1:2]
    z_TE = (logits[counted] - threshold_T1) / std
    load_E = 0.5 * (1 + torch.erf(z_TE / math.sqrt(2))).sum(0)
    importance_E = noisy.softmax(1)[counted].sum(0)
    terms = [x.var(correction=0) / x.mean() ** 2 for x in (importance_E, load_E)]
    want = 0.5 * sum(terms)
    assert loss.item() == pytest.approx(want.item(), rel=1e-9)
    grads = [torch.autograd.grad(x, logits)[0] for x in (loss, want)]
    assert rms_ratio(*grads) < 1e-9
    evaluated = [route(logits, each, False, pad_T=pad)[1] for each in (config, MoEConfig(E))]
    assert evaluated[0].loss == evaluated[1].loss  # both are for training


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_logits_are_a_product_or_a_cosine_over_a_temperature(dtype, bias):
    """In fp32 also from halves, unless ``gating_fp32=False``; gradients: test_gate_logits.py."""
    x, wide = torch.randn(9, 32, dtype=dtype), max(dtype, torch.float32, key=lambda d: d.itemsize)
    cosine = make_router(32, MoEConfig(E, router="cosine", router_options={"bias": bias})).to(dtype)
    point = x.double() @ cosine.proj.weight.double().t()
    point = point + (cosine.proj.bias.double() if bias else 0)
    dirs = cosine.expert_dirs.double()
    want = torch.nn.functional.cosine_similarity(point[:, None], dirs[None], dim=2) / 0.5
    limit = {torch.float16: 1e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-5)
    assert cosine.logits(x).dtype == wide and rms_ratio(cosine.logits(x), want) < limit
    with torch.no_grad():
        cosine.log_scale.fill_(100.0)
    assert rms_ratio(cosine.logits(x), want * 0.5 / 0.01) < limit
    for fp32 in (True, False):
        linear = make_router(32, MoEConfig(E, gating_fp32=fp32)).to(dtype)
        error = rms_ratio(linear.logits(x), x.double() @ linear.wg.weight.double().t())
        assert linear.logits(x).dtype == wide
        assert (error < 3e-7) == (fp32 or dtype.itemsize > 2)


def by_logarithms(logits, expert_TK, score_function):
    """[T, E] weights of these choices (-1: none), in fp64."""
    score = logits.double()
    if score_function == "sigmoid":
        score = torch.nn.functional.logsigmoid(score)
    rows = []
    for t, experts in enumerate(expert_TK.tolist()):
        row, chosen = torch.zeros(E, dtype=torch.float64), [e for e in experts if e >= 0]
        if chosen:
            row = row.index_put((torch.tensor(chosen),), score[t, chosen].softmax(0))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["torch", pytest.param("triton", marks=pytest.mark.interpreted)])
@pytest.mark.parametrize("before", [False, True], ids=["", "normalised before"])
@pytest.mark.parametrize(
    "options",
    [
        {"score_function": "sigmoid", "load_bias": "sign"},
        {"score_function": "sigmoid", "overflow_rerouting": 2, "capacity_factor": 4.0},
        {"null_experts": 2},
    ],
    ids=str,
)
def test_weights_sum_to_one_however_small_the_scores_are(options, before, name, backend):
    """Down to sigmoids that no fp32 number holds, or beside a null expert far above the others."""
    backend(name)
    torch.manual_seed(0)
    options = {"capacity_factor": 0.0, "normalize_before_dropping": before, **options}
    config = MoEConfig(num_experts=E, top_k=3, **options)
    logits = torch.randn(T, config.num_outputs)
    if config.null_experts:
        logits[:, E] += torch.linspace(0, 120, T)
        logits[-1, E + 1] += 110
    else:
        logits -= torch.linspace(0, 120, T)[:, None]
    logits.requires_grad_()
    bias = torch.zeros(E) if "load_bias" in options else None
    routing, _ = route(logits, config, True, load_bias_E=bias)
    assert bias is not None or torch.equal(routing.expert_TK >= 0, logits.topk(3).indices < E)
    want_TE = by_logarithms(logits, routing.expert_TK, config.score_function)
    weight_TE = weight_by_expert(routing)
    torch.testing.assert_close(weight_TE, want_TE.float(), rtol=1e-5, atol=1e-6)
    target = torch.randn(T, E)
    grads = [torch.autograd.grad((w * target).sum(), logits)[0] for w in (weight_TE, want_TE)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)
