"""Tokens to experts, or weights to tokens (r): what one process computes, whatever the flow.

Ranks compare with the same layer that sees all tokens on one rank, with nothing dropped.
"""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist
from helpers.assertions import rms_ratio
from helpers.distributed import run_ranks
from helpers.slices import join_slices
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import hosts, ops
from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import (
    ExpertParallelGroups,
    build_groups,
    make_flow,
    possible_r,
    process_world,
    sum_over_ranks,
    sync_step,
    take_slice,
)
from fairseq_tutel.moe import MoELayer, dispatcher

M, HIDDEN = 6, 16
EXPERTS = (1, 2, 4, 8)
PLACES = [*((experts, "sliced") for experts in EXPERTS), (2, "replicated"), (8, "replicated")]
TOKENS = {"equal": [6] * 8, "empty": [9, 0, 2, 13, 0, 8, 3, 11]}
# capacity factors that drop nothing, and evaluation
LAYOUTS = {"padded": (8.0, True), "ragged": (0.0, True), "evaluation": (1.0, False)}
BATCHES = [("padded", "empty"), ("ragged", "empty"), ("ragged", "equal"), ("evaluation", "empty")]
# algorithm, degree, compact, way of recomputing
WAYS = [
    ("linear", 1, False, None),
    ("2dh", 1, False, False),
    ("linear", 4, True, None),
    ("2dh", 2, False, True),
    ("linear", 8, False, False),
]


def make_layer(groups, layout="ragged", dtype=torch.float64, **options):
    factor, training = LAYOUTS[layout]
    torch.manual_seed(7)
    layer = MoELayer(
        M,
        groups.num_experts,
        HIDDEN,
        top_k=min(2, groups.num_experts),
        groups=groups,
        seed=3,
        capacity_factor=factor,
        second_expert_policy="all",
        **options,
    )
    return layer.to(dtype).train(training)


def tokens_of(kind, dtype=torch.float64):
    """x and a target of all ranks, and which of them are this rank's."""
    rank, world_size = process_world()
    sizes = TOKENS[kind][:world_size]
    torch.manual_seed(11)
    x, target = torch.randn(2, sum(sizes), M).to(dtype)
    return x, target, slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def run(layer, x, target, recompute=None, **options):
    """y and the gradients of x and of all parameters, by name; those of experts by state names."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    if recompute is None:
        y = layer(x, **options)
    else:
        y = (
            checkpoint(layer, x, use_reentrant=recompute, **options)
            if not recompute
            else (checkpoint(lambda x: layer(x, **options), x, use_reentrant=True))
        )
    (y.float() * target.float()).sum().backward()
    found = {"y": y.detach(), "x": x.grad, "gate": layer.gate.wg.weight.grad}
    for name, singles in layer.experts.single_names().items():
        grad = getattr(layer.experts, name).grad
        found |= {single: grad[slot] for slot, single in enumerate(singles)}
    return found


def over_copies(found, groups):
    """Sums over the ranks that have a copy of the same, of which each saw a part of the tokens."""
    dist.all_reduce(found["gate"])
    for name, grad in found.items():
        copies = groups.num_replicas
        if "." in name and groups.num_slices > 1 and not name.endswith("fc2.bias"):
            copies = 1
        if "." in name and copies > 1:
            dist.all_reduce(grad, group=groups.replica_group)
    return found


def own_part(whole, rows, groups):
    """Of the results of one process what a rank has."""
    found = {"y": whole["y"][rows], "x": whole["x"][rows], "gate": whole["gate"]}
    for slot, expert in enumerate(groups.local_experts):
        for end in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"):
            value, cut = whole[f"{expert}.{end}"], (groups.slice_index, groups.num_slices)
            found[f"{slot}.{end}"] = take_slice(value, end, *cut)
    return found


def compare(got, want, case, units=1e-12):
    assert set(got) == set(want)
    for name, value in want.items():
        scale = max(1.0, float(value.abs().max())) if value.numel() else 1.0
        torch.testing.assert_close(
            got[name],
            value,
            rtol=0,
            atol=units * scale,
            msg=lambda m: f"{case}, {name}: {m}",  # noqa: B023
        )


def _compare_with_one_process():
    """One layer, of which every call has another r and way."""
    numbers = itertools.count()
    for (experts, placement), (layout, kind) in itertools.product(PLACES, BATCHES):
        groups = build_groups(experts, placement=placement)
        x, target, rows = tokens_of(kind)
        alone = make_layer(ExpertParallelGroups(experts), layout)
        want = own_part(run(alone, x, target), rows, groups)
        layer = make_layer(groups, layout, exchange=ExchangeConfig("2dh", 2))
        layer.prepare_exchanges(["linear"])
        for r in possible_r(groups):
            # every way meets every layout, not all of them together
            algorithm, degree, compact, recompute = way = WAYS[next(numbers) % len(WAYS)]
            nodes = 2 if algorithm == "2dh" else 0
            exchange = ExchangeConfig(algorithm, nodes, degree, wire_compact=compact, r=r)
            got = run(layer, x[rows], target[rows], recompute, exchange=exchange)
            compare(over_copies(got, groups), want, (experts, placement, layout, kind, r, way))


def _refuse_what_does_not_fit():
    rank, world_size = process_world()
    groups = build_groups(2, placement="sliced")
    layer = make_layer(groups)
    x, _, rows = tokens_of("equal")
    with pytest.raises(ValueError, match=r"disagree on r: 0 on ranks \[1\]; 1 on ranks \[0, 2"):
        layer(x[rows], r=0 if rank == 1 else 1)
    with pytest.raises(
        ValueError, match=r"r=3 .* does not fit 2 experts on .* choose one of 0, 1, 2"
    ):
        layer(x[rows], r=3)
    with pytest.raises(ValueError, match=r"r=2 .* whole: choose one of 0, 1$"):
        make_layer(build_groups(world_size), exchange=ExchangeConfig(r=2))
    step = sync_step(6, layer.step_settings(x.dtype, r=2), groups)
    with pytest.raises(ValueError, match="this call's options make r 0, but .* for this step has"):
        layer(x[rows], step=step, r=0)
    layer(x[rows], step=step, r=2)
    own = [nn.Linear(M, M)]
    with pytest.raises(ValueError, match="experts=Linear: modules of one's own cannot be cut into"):
        make_layer(groups, experts=own)
    with pytest.raises(ValueError, match="r=0, .* weights of modules of one's own .Linear. cannot"):
        make_layer(build_groups(world_size), experts=own)(x[rows].double(), r=0)
    with pytest.raises(ValueError, match="16 hidden units .* cut into 3") as caught:
        MoELayer(M, 2, HIDDEN, groups=dataclasses.replace(groups, num_replicas=3))
    assert "\n" not in str(caught.value)


def _drops():
    """Which pairs a full expert drops depends neither on r nor on the degree of overlap."""
    rank, _ = process_world()
    x, target, rows = tokens_of("empty")
    for experts, factor in itertools.product((1, 2), (0.25, -0.25)):
        groups = build_groups(experts, placement="sliced")
        options = {"null_experts": 1, "batch_prioritized": True} if factor < 0 else {}
        layer, found = make_layer(groups, **options), []
        for r, degree in itertools.product(possible_r(groups), (1, 2)):
            exchange = ExchangeConfig(overlap_degree=degree, r=r)
            found.append(
                run(layer, x[rows], target[rows], exchange=exchange, capacity_factor=factor)
            )
            over_copies(found[-1], groups)
            compare(found[-1], found[0], (experts, factor, r, degree))
        _, aux = layer(x[rows], capacity_factor=factor, return_aux=True)
        kept = sum_over_ranks([float(aux.num_kept_per_expert_E.sum())], x.device)
        assert 0 < kept[0] < len(x) * layer.config.top_k


def _dropout_and_dtypes():
    """Masks of dropout after fc2 are those of the tokens, at any r; half precision and wires."""
    _, world_size = process_world()
    x, target, rows = tokens_of("empty")
    for experts in (2, world_size):
        groups, outputs = build_groups(experts, placement="sliced"), []
        for layout in ("padded", "ragged"):
            layer = make_layer(groups, layout, dropout=0.5)
            for r, degree in itertools.product(possible_r(groups), (1, 4)):
                torch.manual_seed(dist.get_rank())
                config = ExchangeConfig(overlap_degree=degree, r=r)
                outputs.append(run(layer, x[rows], target[rows], exchange=config))
                torch.manual_seed(dist.get_rank())  # the same masks again, recomputed
                recomputed = run(layer, x[rows], target[rows], False, exchange=config)
                compare(recomputed, outputs[-1], (experts, layout, r, degree, "recomputed"))
        whole = run(layer.eval(), x[rows], target[rows])
        for found in outputs:
            for name in ("y", "x"):
                torch.testing.assert_close(found[name], outputs[0][name], rtol=0, atol=1e-12)
        assert not len(whole["y"]) or rms_ratio(outputs[0]["y"], whole["y"]) > 0.1
    for dtype, wire in itertools.product((torch.bfloat16, torch.float32), ("same", "bf16")):
        groups = build_groups(2, placement="sliced")
        given, aims = x[rows].to(dtype), target[rows].to(dtype)
        want = over_copies(run(make_layer(groups), x[rows], target[rows]), groups)
        limit = 3e-2 if torch.bfloat16 == dtype or wire == "bf16" else 1e-5
        layer = make_layer(groups, dtype=torch.float32, exchange=ExchangeConfig(wire=wire))
        for r in possible_r(groups):
            with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
                got = over_copies(run(layer, given.float(), aims, r=r), groups)
            for name in ("y", "0.fc1.weight", "0.fc2.weight"):
                case = (dtype, wire, r, name)
                assert not want[name].any() or rms_ratio(got[name], want[name]) < limit, case


def _train():
    """20 updates, another r at each, against one process with all tokens; the norms, too."""
    rank, world_size = process_world()
    for experts in EXPERTS:
        groups = build_groups(experts, placement="sliced")
        x, target, rows = tokens_of("equal")
        layer, alone = make_layer(groups), make_layer(ExpertParallelGroups(experts))
        hosts.prepare_data_parallel(layer)
        choices, norms = possible_r(groups), []
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (layer, alone)]
        for number in range(20):
            r = choices[number % len(choices)]
            y = layer(x[rows] + 0.1 * number, r=r)
            # the mean over ranks of their losses, as data parallelism has it
            (y - target[rows]).square().sum().mul(world_size).backward()
            dist.all_reduce(layer.gate.wg.weight.grad)
            layer.gate.wg.weight.grad /= world_size
            (alone(x + 0.1 * number) - target).square().sum().backward()
            # measured only: fp32, whose rounding would be in the weights
            norm = nn.utils.get_total_norm([p.grad for p in alone.parameters()])
            norms.append([hosts.clip_grad_norm_(layer, float("inf")).item(), norm.item()])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(*torch.tensor(norms).t(), rtol=1e-6, atol=0)
        want = alone.state_dict()
        for name, value in layer.state_dict().items():
            if not name.startswith("experts."):
                torch.testing.assert_close(value, want[name], rtol=0, atol=1e-10)
                continue
            slot, end = name.removeprefix("experts.").split(".", 1)
            held = [torch.empty_like(value) for _ in range(groups.num_replicas)]
            if groups.num_replicas > 1:
                dist.all_gather(held, value.contiguous(), group=groups.replica_group)
            else:
                held = [value]
            expert = groups.local_experts[int(slot)]
            torch.testing.assert_close(
                join_slices(held, end), want[f"experts.{expert}.{end}"], rtol=0, atol=1e-10
            )
            assert end != "fc2.bias" or all(torch.equal(one, value) for one in held)


def _all(checks):
    for check in checks:
        check()


def test_every_flow_gives_what_one_process_computes():
    checks = [_compare_with_one_process, _refuse_what_does_not_fit, _drops]
    run_ranks(_all, 4, [*checks, _dropout_and_dtypes, _train], timeout=250)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 8])
def test_every_flow_gives_the_same_on_other_numbers_of_ranks(world_size):
    run_ranks(_all, world_size, (_compare_with_one_process, _train), timeout=300)


def test_simulated_ranks_copy_what_they_would_send_and_gather():
    for experts in (2, 8):
        groups = build_groups(experts, simulate_world_size=8, placement="sliced")
        layer = make_layer(groups)
        x = torch.randn(12, M, dtype=torch.float64)
        for r in possible_r(groups):
            flow = make_flow(groups, r)
            assert flow.gather_size == (8 if r == 0 else groups.num_slices // r)
            found = run(layer, x, x, r=r)
            assert found["y"].shape == x.shape
            assert all(torch.isfinite(value).all() for value in found.values())
            network = layer.experts.network(x.dtype, flow)
            held = experts if r == 0 else 1
            assert network.params[0].shape == (held, HIDDEN // (r or 1), M)
            assert network.params[2].shape == (held, M, HIDDEN // (r or 1))


def test_dropout_is_that_of_the_pair_of_each_row():
    """Rows of two tokens with two choices, of two parts each; some are empty."""
    pair_of_row = [7, 0, -1, 2, 5, 4]  # t * 4 + part * 2 + choice
    rows, keep = torch.randn(6, M), torch.rand(4, M) < 0.5
    got = dispatcher._drop(
        rows, torch.tensor(pair_of_row, dtype=torch.int32), keep, copies=2, top_k=2, dropout=0.5
    )
    for row, pair in enumerate(pair_of_row):
        if pair >= 0:
            choice = 2 * (pair // 4) + pair % 2
            assert torch.equal(got[row], torch.where(keep[choice], 2 * rows[row], 0.0))


def test_parts_of_an_expert_draw_unlike_masks():
    seeds = []
    for part in range(3):
        torch.manual_seed(0)
        seed = ops.FFNOptions("relu", (0.5, 0.0), part).draw_seed(torch.device("cpu"))
        seeds += [int(seed), int(seed) + 1]  # of both masks
    assert len(set(seeds)) == 6


def test_one_process_has_no_ranks_to_gather_from():
    x, target, _ = tokens_of("equal")
    layer = make_layer(build_groups(4, placement="sliced"))
    whole = run(layer, x[:6], target[:6])
    compare(run(layer, x[:6], target[:6], r=0), whole, "r=0", units=1e-15)
