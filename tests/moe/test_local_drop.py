"""Local drop: what a layer computes in a step whose tokens stay, and that ranks draw alike."""

import pytest
import torch
from helpers import naive
from helpers.distributed import run_ranks

from fairseq_tutel.distributed import build_groups, process_world, sync_step
from fairseq_tutel.moe import MoEConfig, MoELayer, RouterCall

M, E, T, STEPS = 4, 4, 6, 8


def make(drop=0.5, **options):
    layer = MoELayer(M, E, 6, seed=1, local_drop=drop, top_k=2, **options).double()
    torch.manual_seed(3)
    torch.nn.init.normal_(layer.gate.wg.weight)
    return layer


def tokens(rank, step):
    return torch.randn(T, M, generator=torch.Generator().manual_seed(10 * step + rank)).double()


def by_hand(x, whole, place):
    """The layer's output, with expert j computed by expert place(j) of a state dict."""
    names = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")

    def expert(x, j):
        w1, b1, w2, b2 = (whole[f"experts.{place(j)}.{name}"] for name in names)
        return w2 @ torch.nn.functional.gelu(w1 @ x + b1) + b2

    config = MoEConfig(E, top_k=2, capacity_factor=0.0)
    return naive.layer(x, whole["gate.wg.weight"], expert, config)[0]


def _steps(options):
    """By step: output, and gradients of the experts here; each starts as in one process."""
    rank, _ = process_world()
    layer, found = make(**options), []
    for number in range(STEPS):
        torch.manual_seed(100 * number + rank)  # the first rank's counts
        step = sync_step(T, layer.step_settings(torch.float64), layer.groups)
        layer.zero_grad()
        y = layer(tokens(rank, number), step=step)
        y.square().sum().backward()
        grads = [p.grad for name, p in layer.named_parameters() if "experts" in name]
        found.append((y.detach(), torch.cat([g.flatten() for g in grads])))
    layer.eval()
    step = sync_step(T, layer.step_settings(torch.float64), layer.groups)
    return found, step.draw, layer(tokens(rank, 0), step=step).detach()


def outputs_by_hand(rank, number, whole):
    """{whether nothing is exchanged: output of the rank} of a step."""
    x, local = tokens(rank, number), E // 2
    stays = by_hand(x, whole, lambda j: rank * local + j % local)
    return {True: stays, False: by_hand(x, whole, lambda j: j)}


def equal(found, wanted):
    return torch.allclose(found, wanted, rtol=1e-9, atol=1e-9)


PADDED, RAGGED = {"capacity_factor": 2.0}, {"capacity_factor": 0.0, "exchange": "2dh"}


@pytest.mark.parametrize("options", [PADDED, RAGGED], ids=["padded", "ragged"])
def test_a_step_that_stays_is_computed_by_the_ranks_own_experts(options):
    """Experts then have the gradient of their own rank's tokens alone."""
    whole, stayed = make().state_dict(), []
    results = run_ranks(_steps, 2, options)
    for number in range(STEPS):
        stays = {}
        for rank, (found, _, _) in enumerate(results):
            wanted = outputs_by_hand(rank, number, whole)
            stays[rank] = [s for s, y in wanted.items() if equal(found[number][0], y)]
        assert stays[0] == stays[1] and len(stays[0]) == 1  # the ranks drew alike
        stayed += stays[0]
    assert set(stayed) == {True, False}
    number = stayed.index(True)
    for rank, (found, draw, y) in enumerate(results):
        leaves = {name: value.clone().requires_grad_() for name, value in whole.items()}
        outputs_by_hand(rank, number, leaves)[True].square().sum().backward()
        trained = [leaf.grad for name, leaf in leaves.items() if "experts" in name]
        total = sum(grad.square().sum() for grad in trained if grad is not None)
        assert found[number][1].square().sum().item() == pytest.approx(total.item(), rel=1e-9)
        # evaluation exchanges, and draws nothing
        assert draw is None and equal(y, outputs_by_hand(rank, 0, whole)[False])


def test_layers_draw_by_their_number_and_as_often_as_asked():
    groups = build_groups(E, simulate_world_size=E)
    layer = make(drop=0.3, groups=groups)
    choice, call = layer.exchange_choice, RouterCall(layer.config, True, T)

    def stays(draw, index, call=call):
        return choice.with_local_drop(call, draw, index) is not choice

    drawn = [[stays(draw, index) for index in range(2)] for draw in range(400)]
    first, second = torch.tensor(drawn).double().unbind(1)
    assert first.mean().item() == pytest.approx(0.3, abs=0.1)
    assert (first * second).mean().item() == pytest.approx(0.09, abs=0.05)
    evaluated = RouterCall(layer.config, False, T)
    assert not any(stays(draw, 0, evaluated) for draw in range(20)) and not stays(None, 0)


def test_alone_there_is_nothing_to_leave_out():
    dropped, plain = make(drop=0.9), make(drop=0.0)
    state = torch.random.get_rng_state()
    assert torch.equal(dropped(tokens(0, 0)), plain(tokens(0, 0)))
    assert torch.equal(torch.random.get_rng_state(), state)
