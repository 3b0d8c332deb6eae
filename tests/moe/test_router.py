"""``route_logits`` against gating with dense masks, and the invariants of its results."""

import math

import pytest
import torch
from gating_reference import gating, train_capacity
from helpers.assertions import assert_close, rms_ratio
from helpers.routing import route

from fairseq_tutel.moe import METRIC_NAMES, MoEConfig, make_router

T, E = 13, 5  # neither divides the other; capacity ceil(13/5) = 3 per choice drops tokens

# name -> routing options, and what else differs
CASES = {
    "top1": {"top_k": 1},
    "top1 prioritised, padding": {"top_k": 1, "batch_prioritized": True, "pad": True},
    "top1 dropless": {"top_k": 1, "capacity_factor": 0.0},
    "top1, 2021 evaluation fraction": {"top_k": 1, "eval_capacity_token_fraction": 0.25},
    "top2": {"top_k": 2},
    "top2 dropless": {"top_k": 2, "capacity_factor": 0.0},
    "top2 dynamic, bound not reached": {"top_k": 2, "capacity_factor": -4.0},
    "top2 dynamic, bound reached": {"top_k": 2, "capacity_factor": -0.7},
    "top2 large capacity": {"top_k": 2, "capacity_factor": 2.5},
    "top2 less than one slot": {"top_k": 2, "capacity_factor": 0.1, "eval_capacity_factor": 0.1},
    "top2 evaluation capacity": {"top_k": 2, "eval_capacity_factor": 0.5},
    "top2 evaluation bound": {"top_k": 2, "eval_capacity_factor": -0.5},
    "top2, 2021 evaluation fraction": {"top_k": 2, "eval_capacity_token_fraction": 0.25},
    "top2 normalised before": {"top_k": 2, "normalize_before_dropping": True},
    "top2 prioritised": {"top_k": 2, "batch_prioritized": True},
    "top2 padding": {"top_k": 2, "pad": True},
    "top2 all padding": {"top_k": 2, "pad": "all"},
    "top2 random": {"top_k": 2, "second_expert_policy": "random"},
    "top2 random, normalised before": {
        "top_k": 2,
        "second_expert_policy": "random",
        "normalize_before_dropping": True,
    },
    "top2 sampling": {"top_k": 2, "second_expert_policy": "sampling"},
    "top2 sampling, everything": {
        "top_k": 2,
        "second_expert_policy": "sampling",
        "normalize_before_dropping": True,
        "batch_prioritized": True,
        "pad": True,
    },
    "top2 random, everything": {
        "top_k": 2,
        "second_expert_policy": "random",
        "batch_prioritized": True,
        "pad": True,
    },
    "top4": {"top_k": 4},
    "top4 random, dropless": {
        "top_k": 4,
        "second_expert_policy": "random",
        "capacity_factor": 0.0,
    },
    "top4 sampling, padding": {"top_k": 4, "second_expert_policy": "sampling", "pad": True},
    "all experts": {"top_k": E},
    "all experts normalised before": {"top_k": E, "normalize_before_dropping": True},
    "no tokens": {"top_k": 2, "tokens": 0},
    "no tokens, dropless": {"top_k": 1, "tokens": 0, "capacity_factor": 0.0},
    "one token": {"top_k": 2, "tokens": 1},
    "all on one expert": {"top_k": 2, "favourite": 50.0},
    "all on one expert, prioritised": {"top_k": 1, "favourite": 50.0, "batch_prioritized": True},
    "two experts empty": {"top_k": 2, "favourite": -50.0},
}


def set_up(name, seed, dtype=torch.float64):
    """(config, logits, padding mask) of a case."""
    options = dict(CASES[name])
    options.setdefault("second_expert_policy", "all")
    generator = torch.Generator().manual_seed(seed)
    tokens = options.pop("tokens", T)
    logits = 2 * torch.randn(tokens, E, dtype=dtype, generator=generator)
    logits[:, 1] += options.get("favourite", 0.0)
    logits[:, 2] -= max(-options.pop("favourite", 0.0), 0.0)
    pad = options.pop("pad", None)
    if pad is not None:
        pad = torch.rand(tokens, generator=generator) < (1.0 if pad == "all" else 0.3)
        options["use_pad_mask"] = True
    return MoEConfig(num_experts=E, **options), logits.requires_grad_(), pad


def expected_capacity(config, tokens, training):
    """Capacity by the sentences that define it."""
    if not training and config.eval_capacity_token_fraction > 0:
        return math.ceil(config.eval_capacity_token_fraction * tokens)
    factor = config.capacity_factor if training else config.eval_capacity_factor
    if factor == 0:
        return math.inf
    if factor == 1:
        return max(1, train_capacity(tokens, E, config.top_k))
    return max(1, config.top_k * int(abs(factor) * math.ceil(tokens / E)))


def draws(config, logits, training, seed):
    """The noise that ``route_logits`` will draw after ``torch.manual_seed(seed)``, as keywords."""
    torch.manual_seed(seed)
    keywords = {}
    if training and config.top_k > 1:
        if config.second_expert_policy == "sampling":
            keywords["gumbel_TE"] = -torch.empty_like(logits).exponential_().log()
        if config.second_expert_policy == "random":
            keywords["uniform_TK"] = torch.rand(len(logits), config.top_k, dtype=logits.dtype)
    torch.manual_seed(seed)
    return keywords


def reference(config, logits, pad, training, seed):
    return gating(
        logits,
        config.top_k,
        expected_capacity(config, len(logits), training),
        pad_T=pad,
        normalize_before=config.normalize_before_dropping,
        prioritized=config.batch_prioritized,
        **draws(config, logits, training, seed),
    )


def weight_by_expert(routing):
    """[T, E] combine weights."""
    weight_TK = routing.topk_weight_TK
    weight_TE = weight_TK.new_zeros(len(weight_TK), routing.num_experts)
    return weight_TE.scatter_add(1, routing.expert_TK.clamp(min=0).long(), weight_TK)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", CASES)
def test_route_equals_dense_masks(name, training):
    for seed in range(3):
        config, logits, pad = set_up(name, seed)
        want = reference(config, logits, pad, training, seed)
        routing, aux = route(logits, config, training, pad_T=pad)

        assert_close("weights", weight_by_expert(routing), want.weight_TE, torch.float64)
        kept_KTE = torch.zeros_like(want.kept_KTE)
        k_index, t_index = (routing.kept_TK.t()).nonzero(as_tuple=True)
        kept_KTE[k_index, t_index, routing.expert_TK.t()[k_index, t_index].long()] = True
        assert torch.equal(kept_KTE, want.kept_KTE)
        assert_close("loss", aux.loss, want.loss, torch.float64)

        target = torch.randn(len(logits), E, dtype=torch.float64)
        losses = [
            (w * target).sum() + 3 * x
            for w, x in ((want.weight_TE, want.loss), (weight_by_expert(routing), aux.loss))
        ]
        want_grad, grad = (torch.autograd.grad(x, logits)[0] for x in losses)
        assert_close("gradient of logits", grad, want_grad, torch.float64)
        got = aux.metrics_dict()
        assert set(got) == set(METRIC_NAMES) == set(want.metrics)
        for key, value in want.metrics.items():
            assert got[key] == pytest.approx(value, rel=1e-5, abs=1e-5), key


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", CASES)
def test_rows_are_one_to_one_and_within_their_expert(name, training):
    """Padding, rejected and dropped choices hold no row; all others the row of their location."""
    config, logits, pad = set_up(name, seed=11)
    want = reference(config, logits, pad, training, seed=11)
    capacity = expected_capacity(config, len(logits), training)
    routing, aux = route(logits, config, training, pad_T=pad)
    assert routing.padded == (training and config.capacity_factor > 0)
    kept_E = want.kept_KTE.sum((0, 1))
    assert routing.num_kept_per_expert_E.tolist() == kept_E.tolist()
    start_E = kept_E.cumsum(0) - kept_E
    if routing.padded:
        start_E = capacity * torch.arange(E)
        assert len(routing.src_pair_R) == E * capacity
    rows = {}
    for k, t, expert in want.kept_KTE.nonzero().tolist():
        rows[int(start_E[expert] + want.location_KT[k, t])] = t * config.top_k + k
    assert len(rows) == int(kept_E.sum())
    for row, pair in enumerate(routing.src_pair_R.tolist()):
        assert pair == rows.get(row, -1), row
    for t, k in (routing.dest_row_TK < 0).nonzero().tolist():
        assert routing.topk_weight_TK[t, k] == 0
    for row, pair in rows.items():
        assert routing.dest_row_TK.flatten()[pair] == row
    assert int(routing.kept_TK.sum()) == len(rows)
    routed_E = [int((want.location_KT >= 0)[routing.expert_TK.t() == e].sum()) for e in range(E)]
    assert aux.load_E.tolist() == routed_E and int(aux.needed_capacity) == max(routed_E)


@pytest.mark.parametrize("policy", ["sampling", "random"])
def test_evaluation_is_deterministic(policy):
    """The reference draws noise in evaluation too; here it takes the next best and keeps it."""
    config = MoEConfig(num_experts=E, second_expert_policy=policy, gate_noise=1.0)
    logits = torch.randn(T, E)
    routings = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        routings.append(route(logits, config, training=False)[0])
    assert torch.equal(routings[0].expert_TK, logits.topk(2).indices.to(torch.int32))
    assert torch.equal(routings[0].dest_row_TK, routings[1].dest_row_TK)
    assert torch.equal(routings[0].topk_weight_TK, routings[1].topk_weight_TK)
    trained = route(logits, config, training=True)[0]
    assert not torch.equal(trained.topk_weight_TK, routings[0].topk_weight_TK)


def test_sampled_second_expert_follows_the_softmax_of_the_rest():
    """Gumbel-max: P(second = e) = p_e / (1 - p_first)."""
    row = torch.tensor([2.0, 1.0, 0.0, -1.0])
    config = MoEConfig(num_experts=4, second_expert_policy="sampling", capacity_factor=0.0)
    torch.manual_seed(5)
    routing, _ = route(row.expand(40_000, 4), config, training=True)
    assert (routing.expert_TK[:, 0] == 0).all()
    share = torch.bincount(routing.expert_TK[:, 1], minlength=4) / 40_000
    p = row.softmax(0)
    torch.testing.assert_close(
        share, torch.cat([p.new_zeros(1), p[1:] / p[1:].sum()]), atol=0.01, rtol=0
    )


@pytest.mark.parametrize("before", [False, True], ids=["raw gate", "normalised gate"])
def test_random_policy_keeps_the_second_with_twice_its_gate(before):
    row = torch.tensor([1.0, 0.2, -1.0])
    config = MoEConfig(
        num_experts=3,
        second_expert_policy="random",
        capacity_factor=0.0,
        normalize_before_dropping=before,
    )
    torch.manual_seed(6)
    routing, _ = route(row.expand(40_000, 3), config, training=True)
    p = row.softmax(0)
    second = p[1] / (p[0] + p[1]) if before else p[1]
    kept = (routing.expert_TK[:, 1] == 1).float().mean()
    assert kept.item() == pytest.approx(2 * second.item(), abs=0.01)
    assert (routing.expert_TK[:, 0] == 0).all()
    rejected = routing.expert_TK[:, 1] < 0
    weight = p[0] / (p[0] + p[1]) if before else torch.tensor(1.0)
    torch.testing.assert_close(routing.topk_weight_TK[rejected][:, 0].mean(), weight)


def test_capacity_comes_from_the_agreed_token_count():
    """A rank with few tokens lays its rows out for the rank with the most."""
    config = MoEConfig(num_experts=E, top_k=2)
    routing, _ = route(torch.randn(3, E), config, training=True, num_tokens=20)
    assert routing.capacity == 2 * 4 and len(routing.src_pair_R) == E * 8


def test_perfect_balance_costs_one_and_collapse_costs_more():
    eye = 60 * torch.eye(E).repeat(4, 1)
    config = MoEConfig(num_experts=E, top_k=1)
    assert route(eye, config, training=True)[1].loss.item() == pytest.approx(1.0, rel=1e-6)
    uniform = torch.zeros(T, E)
    assert route(uniform, config, training=True)[1].loss.item() == pytest.approx(1.0, rel=1e-6)
    collapsed = eye[:1].expand(T, E)
    assert route(collapsed, config, training=True)[1].loss.item() == pytest.approx(E, rel=1e-6)


@pytest.mark.parametrize("padding", [False, True])
def test_z_loss_is_added_with_its_weight(padding):
    logits = torch.randn(T, E, dtype=torch.float64)
    pad = torch.arange(T) < 4 if padding else None
    plain, weighted = (
        route(
            logits,
            MoEConfig(
                num_experts=E, use_pad_mask=padding, z_loss_weight=w, second_expert_policy="all"
            ),
            True,
            pad_T=pad,
        )[1].loss
        for w in (0.0, 0.3)
    )
    z = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist()) / T
    assert (weighted - plain).item() == pytest.approx(0.3 * z, rel=1e-12)


@pytest.mark.parametrize("padding", [False, True])
def test_load_importance_loss_equals_a_loop(padding):
    torch.manual_seed(8)
    logits = torch.randn(T, E, dtype=torch.float64, requires_grad=True)
    pad = torch.arange(T) < 4 if padding else torch.zeros(T, dtype=torch.bool)
    config = MoEConfig(
        num_experts=E,
        top_k=2,
        gate_noise=1.5,
        load_importance_loss=True,
        second_expert_policy="all",
        use_pad_mask=padding,
    )
    std = 1.5 / E
    torch.manual_seed(9)
    noisy = logits + std * torch.randn_like(logits)
    torch.manual_seed(9)
    loss = route(logits, config, True, pad_T=pad if padding else None)[1].loss

    importance, load = [], []
    prob = noisy.softmax(1)
    for e in range(E):
        tokens = [t for t in range(T) if not pad[t]]
        importance.append(sum(prob[t, e] for t in tokens))
        threshold = [noisy[t].detach().sort(descending=True).values[1] for t in tokens]
        load.append(
            sum(
                0.5 * (1 + torch.erf((logits[t, e] - h) / std / math.sqrt(2)))
                for t, h in zip(tokens, threshold, strict=True)
            )
        )

    def squared_variation(values):
        mean = sum(values) / E
        return sum((v - mean) ** 2 for v in values) / E / mean**2

    want = 0.5 * (squared_variation(importance) + squared_variation(load))
    assert loss.item() == pytest.approx(want.item(), rel=1e-9)
    grads = [torch.autograd.grad(x, logits)[0] for x in (loss, want)]
    assert rms_ratio(*grads) < 1e-9


def test_noise_and_load_importance_loss_are_for_training_only():
    logits = torch.randn(T, E)
    config = MoEConfig(num_experts=E, gate_noise=5.0, load_importance_loss=True)
    plain = MoEConfig(num_experts=E)
    _, noisy = route(logits, config, training=False)
    _, clean = route(logits, plain, training=False)
    assert noisy.loss == clean.loss and noisy.loss != route(logits, config, True)[1].loss


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp32_gating_never_rounds_logits_to_half(dtype):
    """Against an fp64 product of the same half numbers, forward and backward."""
    torch.manual_seed(3)
    x = torch.randn(40, 64, dtype=dtype, requires_grad=True)
    gate = make_router(64, MoEConfig(num_experts=E, gating_fp32=True)).to(dtype)
    logits = gate.logits(x)
    assert logits.dtype == torch.float32
    want = x.double() @ gate.wg.weight.double().t()
    assert rms_ratio(logits, want) < 3e-7
    grad = torch.randn_like(logits)
    logits.backward(grad)
    # gradients leave in half, rounded once
    unit = torch.finfo(dtype).eps
    assert x.grad.dtype == dtype
    assert rms_ratio(x.grad, grad.double() @ gate.wg.weight.double()) < unit
    assert rms_ratio(gate.wg.weight.grad, grad.double().t() @ x.double()) < unit
    rounded = make_router(64, MoEConfig(num_experts=E, gating_fp32=False)).to(dtype)
    rounded.load_state_dict(gate.state_dict())
    assert rounded.logits(x).dtype == torch.float32 and rms_ratio(rounded.logits(x), want) > 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_cosine_gate_is_a_cosine_over_a_temperature(dtype):
    gate = make_router(32, MoEConfig(num_experts=E, router="cosine")).to(dtype)
    x = torch.randn(9, 32, dtype=dtype)
    point = x.double() @ gate.proj.weight.double().t()
    want = torch.empty(9, E, dtype=torch.float64)
    for t in range(9):
        for e in range(E):
            direction = gate.expert_dirs[e].double()
            want[t, e] = point[t] @ direction / point[t].norm() / direction.norm()
    want /= 0.5
    assert gate.logits(x).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert rms_ratio(gate.logits(x), want) < (1e-3 if dtype == torch.float16 else 1e-5)
    with torch.no_grad():
        gate.log_scale.fill_(100.0)
    assert rms_ratio(gate.logits(x), want * 0.5 / 0.01) < (1e-3 if dtype == torch.float16 else 1e-5)


def test_logits_for_another_number_of_experts_are_refused():
    with pytest.raises(ValueError, match="logits for 3 experts, the layer has 5"):
        route(torch.randn(T, 3), MoEConfig(num_experts=E), training=True)


def test_gradient_check_in_fp64():
    """Numerical derivatives of weights and loss, noise fixed, capacity reached."""
    config = MoEConfig(num_experts=E, top_k=2, z_loss_weight=0.1, second_expert_policy="random")

    def function(logits):
        torch.manual_seed(4)
        routing, aux = route(logits, config, training=True)
        return routing.topk_weight_TK, aux.loss

    logits = torch.randn(T, E, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (logits,))
