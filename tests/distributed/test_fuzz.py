"""Random layers on one rank or more against loops over tokens in fp64 that know no rank.

A case is a seed: placement, groups, r, algorithm, degree, capacity, top-k, uneven and empty ranks.
``FUZZ_SEEDS=7,8 python -m pytest tests/distributed/test_fuzz.py`` runs those alone; a failure names
its seed.
"""

import functools
import os
import random
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import naive
from helpers.distributed import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairseq_tutel.config import ExchangeConfig, MoEConfig
from fairseq_tutel.distributed import build_groups, process_world
from fairseq_tutel.moe import MoELayer

# by ranks; on 2 cores a case on 8 of them costs as much as three on 2
SEEDS = {1: range(60), 2: range(0, 240, 2), 4: range(1, 280, 2), 8: range(0, 240, 4)}
ENDS = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
# which dimension has the hidden units
CUT = {"fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1}


class Case(SimpleNamespace):
    """One layer on several ranks, and its tokens; :func:`case_of` draws it."""

    @property
    def slices(self):
        return self.ranks // self.group_size if self.placement == "sliced" else 1

    @property
    def local_experts(self):
        return self.experts // self.group_size

    def place(self, rank):
        """Global numbers of a rank's experts, and which of their slices it has."""
        first = rank % self.group_size * self.local_experts
        return range(first, first + self.local_experts), rank // self.group_size % self.slices


def case_of(seed, ranks=4):
    rng = random.Random(seed)
    experts = rng.choice([1, 2, 4, 4, 6, 8, 12, 64])
    fitting = [p for p in (1, 2, 4, 8) if experts % p == 0 and ranks % p == 0]
    placement, group_size = rng.choice(["replicated", "sliced"]), rng.choice(fitting)
    if placement == "sliced":
        experts = rng.choice([1, 2, 2, 4, 8])
        group_size = min(experts, ranks)
    slices = ranks // group_size if placement == "sliced" else 1
    r = rng.choice([r for r in range(slices + 1) if r == 0 or slices % r == 0])
    most = rng.choice([0, 3, 9, 20])
    top_k = rng.randint(1, min(3, experts))
    fitting = [g for g in (2, 4) if experts % g == 0 and experts // g >= max(2, top_k)]
    groups = rng.choice([1, *fitting])
    tokens = [rng.choice([0, most, rng.randint(0, most)]) for _ in range(ranks)]
    case = Case(
        seed=seed,
        ranks=ranks,
        experts=experts,
        placement=placement,
        group_size=group_size,  # ranks that exchange tokens where experts are whole
        r=r,
        algorithm=rng.choice(["linear", "2dh"]),
        degree=rng.choice([1, 1, 2, 4, 8]),
        compact=rng.random() < 0.2,
        top_k=top_k,
        factor=rng.choice([0.0, 0.5, 1.0, 2.0, -0.25, -1.0]),
        training=rng.random() < 0.8,
        normalize_before_dropping=rng.random() < 0.3,
        batch_prioritized=rng.random() < 0.3,
        # None: no; else whether reentrant
        recompute=(recompute := rng.choice([None, None, False, True])),
        # whether the balance loss, computed in fp32, is part of the loss
        balance=recompute is None and rng.random() < 0.4,
        activation=rng.choice(["gelu", "relu"]),
        model_dim=rng.choice([3, 8]),
        hidden_dim=rng.choice([8, 24]),
        # number, how many a token may choose from, score
        groups=(groups, rng.randint(1, groups), rng.choice(["max", "top2"])),
        sigmoid=rng.random() < 0.3,
        biased=rng.random() < 0.3,  # whether a frozen bias takes part in the selection
        own=(own := placement == "replicated" and r == 1 and rng.random() < 0.4),
        shared=rng.random() < 0.3,
        tokens=tuple(tokens),
        nulls=rng.choice([0, 0, 3]) if groups == 1 else 0,
        padded=rng.random() < 0.3,  # whether about every third token is padding
        helped=False,  # whether ranks help each other
        memory="fast" if own else random.Random(f"{seed}").choice(["fast", "lean", "minimal"]),
    )
    if placement == "sliced" or own or rng.random() < 0.3:
        return case
    # nothing is dropped, or more is dropped than fits
    way = {"r": 1, "algorithm": "linear", "compact": False, "factor": min(case.factor, 0)}
    return Case(**{**vars(case), "helped": True, **way})


def routing_of(case):
    """Options of the layer's routing."""
    names = ("num_expert_groups", "top_groups", "group_score")
    return {
        "top_k": case.top_k,
        "capacity_factor": case.factor,
        "eval_capacity_factor": case.factor,
        "normalize_before_dropping": case.normalize_before_dropping,
        "batch_prioritized": case.batch_prioritized,
        **(dict(zip(names, case.groups, strict=True)) if case.groups[0] > 1 else {}),
        "score_function": "sigmoid" if case.sigmoid else "softmax",
        "load_bias": "frozen" if case.biased else "none",
        "null_experts": case.nulls,
    }


def tensors_of(case):
    """Tokens, targets, padding of each rank, the gate's weight, {(expert, end): tensor}, bias."""
    generator = torch.Generator().manual_seed(case.seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    m, f = case.model_dim, case.hidden_dim
    shapes = dict(zip(ENDS, ((f, m), (f,), (m, f), (m,)), strict=True))
    weights = {(e, end): draw(*shapes[end]) for e in range(case.experts) for end in ENDS}
    xs, targets = ([draw(count, m) for count in case.tokens] for _ in range(2))
    pads = [draw(count) > 0.4 if case.padded else None for count in case.tokens]
    outputs = case.experts + case.nulls
    return xs, targets, pads, draw(outputs, m), weights, draw(outputs).float()


def shared_of(case):
    """Weights of the shared expert and its gate, by name; fp64."""
    generator, m = torch.Generator().manual_seed(case.seed + 1), case.model_dim
    shapes = {"fc1.weight": (2, m), "fc1.bias": (2,), "fc2.weight": (m, 2), "fc2.bias": (m,)}
    shapes["gate.weight"] = (1, m)
    return {
        f"shared_expert.{name}": torch.randn(*shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items() if case.shared
    }  # fmt: skip


def cut(tensor, case, end, index):
    """What the holder of a slice has of an expert's tensor."""
    return tensor if end not in CUT else tensor.chunk(case.slices, CUT[end])[index]


# the oracle


def expert_of(x_M, weights, expert, case):
    w1, b1, w2, b2 = (weights[expert, end] for end in ENDS)
    return w2 @ getattr(F, case.activation)(w1 @ x_M + b1) + b2


def shared_output(x_M, case):
    if not case.shared:
        return torch.zeros_like(x_M)
    w1, b1, w2, b2, gate = shared_of(case).values()
    activation = F.gelu if case.own else getattr(F, case.activation)
    return torch.sigmoid(gate @ x_M) * (w2 @ activation(w1 @ x_M + b1) + b2)


def oracle(case):
    """(by rank y, d_x, balance loss and rows kept by expert; d_gate; d_weights)"""
    xs, targets, pads, gate, weights, bias = tensors_of(case)
    leaves, config = [*xs, gate, *weights.values()], MoEConfig(case.experts, **routing_of(case))
    for leaf in leaves:
        leaf.requires_grad_()
    total, ys, losses, counts = 0.0 * gate.sum(), [], [], []
    for rank, (x_TM, target_TM) in enumerate(zip(xs, targets, strict=True)):
        block = rank // case.group_size * case.group_size
        of_group = slice(block, block + case.group_size) if case.slices == 1 else slice(None)
        given = {"bias_E": bias if case.biased else None, "num_tokens": max(case.tokens[of_group])}
        given["pad_T"] = pads[rank]
        routed = naive.gating(x_TM @ gate.t(), config, case.training, **given)
        y = [shared_output(x_M, case) for x_M in x_TM]
        for (t, _), (expert, _) in routed.place.items():
            part = routed.weight_TE[t, expert] * expert_of(x_TM[t], weights, expert, case)
            y[t] = y[t] + part
        ys.append(torch.stack(y) if y else x_TM)
        losses.append(routed.loss)
        kept = [expert for expert, _ in routed.place.values()]
        counts.append([kept.count(expert) for expert in range(case.experts)])
        total = total + (ys[-1] * target_TM).sum() + case.balance * losses[-1]
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
    d_weights = dict(zip(weights, grads[case.ranks + 1 :], strict=True))
    return (
        list(zip(ys, grads[: case.ranks], losses, counts, strict=True)),
        grads[case.ranks],
        d_weights,
    )


# the layer


def own_expert(case):
    parts = {
        "fc1": nn.Linear(case.model_dim, case.hidden_dim),
        "act": {"gelu": nn.GELU, "relu": nn.ReLU}[case.activation](),
        "fc2": nn.Linear(case.hidden_dim, case.model_dim),
    }
    return nn.Sequential(OrderedDict(parts))


def layer_of(case):
    rank, _ = process_world()
    own = {"hidden_dim": case.hidden_dim, "activation": case.activation}
    own |= {"activation_memory": case.memory}
    if case.own:
        own = {"experts": [own_expert(case) for _ in range(case.local_experts)]}
    chosen = case.group_size if case.placement == "replicated" else 0
    layer = MoELayer(
        case.model_dim,
        case.experts,
        groups=build_groups(case.experts, expert_parallel_size=chosen, placement=case.placement),
        exchange=ExchangeConfig(
            case.algorithm,
            ranks_per_node=2 if case.algorithm == "2dh" else 0,
            overlap_degree=case.degree,
            r=case.r,
            wire_compact=case.compact,
            balance_ranks=case.helped,
            **({"balance_tolerance": 1.0, "balance_min_rows": 1} if case.helped else {}),
        ),
        shared_expert_dim=2 if case.shared else 0,
        shared_expert_gate=case.shared,
        **routing_of(case),
        **own,
    )
    *_, gate, weights, bias = tensors_of(case)
    experts, index = case.place(rank)
    state = {
        f"experts.{slot}.{end}": cut(weights[e, end], case, end, index)
        for slot, e in enumerate(experts)
        for end in ENDS
    }
    router = {"gate.wg.weight": gate, **({"gate.load_bias": bias} if case.biased else {})}
    layer.double().load_state_dict({**router, **state, **shared_of(case)})
    return layer.train(case.training)


def run(case):
    """y, d_x, balance loss, rows kept by expert, d_gate and {(expert, end): d_weight} of a rank."""
    rank, _ = process_world()
    layer, (xs, targets, pads, *_) = layer_of(case), tensors_of(case)
    x, call = xs[rank].requires_grad_(), functools.partial(layer, pad_mask=pads[rank])
    if case.recompute is None:
        y, aux = call(x, return_aux=True)
        loss, count = aux.loss, aux.num_kept_per_expert_E.tolist()
        ((y * targets[rank]).sum() + case.balance * loss).backward()
    else:
        y, loss, count = checkpoint(call, x, use_reentrant=case.recompute), None, None
        (y * targets[rank]).sum().backward()
    experts, _ = case.place(rank)
    grads = {}
    for name, param in layer.experts.named_parameters():
        singles, found = [name], [param.grad]
        if not case.own:
            singles, found = layer.experts.single_names()[name], param.grad
        for single, grad in zip(singles, found, strict=True):
            slot, end = single.split(".", 1)
            grads[experts[int(slot)], end] = grad
    return y.detach(), x.grad, loss, count, layer.gate.wg.weight.grad, grads


def _run_all(seeds):
    _, ranks = process_world()
    found = []
    for seed in seeds:
        try:
            found.append(run(case_of(seed, ranks)))
        except Exception as error:
            raise AssertionError(f"FUZZ_SEEDS={seed}, {case_of(seed, ranks)}") from error
    return found


def compare(name, got, want, case, fp32=False):
    scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    units = 1e-6 if fp32 else 1e-11
    torch.testing.assert_close(
        got, want, rtol=0, atol=units * scale,
        msg=lambda text: f"{name}: {text}\nFUZZ_SEEDS={case.seed}, {case}",
    )  # fmt: skip


def check(case, by_rank):
    want_by_rank, d_gate, d_weights = oracle(case)
    sums = {key: torch.zeros_like(grad) for key, grad in d_weights.items()}
    for rank, (y, d_x, loss, count, _, grads) in enumerate(by_rank):
        want_y, want_d_x, want_loss, want_count = want_by_rank[rank]
        compare(f"y of rank {rank}", y, want_y.detach(), case)
        compare(f"the gradient of x of rank {rank}", d_x, want_d_x, case, case.balance)
        if loss is not None:
            compare(f"the loss of rank {rank}", loss.double(), want_loss.detach(), case, True)
            assert count == want_count, f"FUZZ_SEEDS={case.seed}, {case}"
        for (expert, end), grad in grads.items():
            cut(sums[expert, end], case, end, case.place(rank)[1]).add_(grad)
    compare("the gate's gradient", sum(each[4] for each in by_rank), d_gate, case, case.balance)
    for key, grad in d_weights.items():
        compare(f"the gradient of {key}", sums[key], grad, case)


SHORT = [(1, SEEDS[1]), (4, SEEDS[4][:40])]
LONG = [(2, SEEDS[2]), (4, SEEDS[4][40:]), (8, SEEDS[8])]


@pytest.mark.parametrize(
    ("ranks", "seeds"), [*SHORT, *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)]
)
def test_the_layer_is_the_loop_over_tokens(ranks, seeds):
    given = os.environ.get("FUZZ_SEEDS")
    if given:
        seeds = [int(seed) for seed in given.split(",")]
    results = run_ranks(_run_all, ranks, seeds, timeout=250)
    failures = []
    for number, seed in enumerate(seeds):
        try:
            check(case_of(seed, ranks), [rank[number] for rank in results])
        except AssertionError as error:
            failures.append(str(error))
    if failures:
        pytest.fail(f"{len(failures)} of {len(seeds)} cases\n" + "\n\n".join(failures[:5]))
