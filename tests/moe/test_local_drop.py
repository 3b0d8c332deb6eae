"""Local drop: what a layer computes in a step whose tokens stay, and that ranks draw alike."""

import pytest
import torch
from helpers.distributed import run_ranks

from fairseq_tutel.distributed import process_world, sync_step
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.moe.local_drop import stays_local

M, E, T, STEPS = 4, 4, 6, 8


def make(drop=0.5, **options):
    layer = MoELayer(M, E, 6, seed=1, local_drop=drop, top_k=2, **options).double()
    torch.manual_seed(3)
    torch.nn.init.normal_(layer.gate.wg.weight)
    return layer


def tokens(rank, step):
    return torch.randn(T, M, generator=torch.Generator().manual_seed(10 * step + rank)).double()


def by_hand(x_TM, gate, experts, place):
    """Top-2 with softmaxed logits, the expert of number j computed by experts[place(j)]."""
    y = torch.zeros_like(x_TM)
    for t, x in enumerate(x_TM):
        best = (gate @ x).topk(2)
        for share, j in zip(best.values.softmax(0), best.indices.tolist(), strict=True):
            w1, b1, w2, b2 = experts[place(j)]
            y[t] += share * (w2 @ torch.nn.functional.gelu(w1 @ x + b1) + b2)
    return y


def _names(e):
    return [f"experts.{e}.{n}" for n in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")]


def _steps(weights, options):
    """By step: whether it stayed, output and gradients of the experts here."""
    rank, world_size = process_world()
    layer, local = make(**options), E // world_size
    mine = {
        new: weights[old]
        for e in range(local)
        for new, old in zip(_names(e), _names(rank * local + e), strict=True)
    }
    layer.load_state_dict({**layer.state_dict(), **mine})
    found = []
    for number in range(STEPS):
        torch.manual_seed(100 * number + rank)  # the first rank's counts
        step = sync_step(T, layer.step_settings(torch.float64), layer.groups)
        layer.zero_grad()
        y = layer(tokens(rank, number), step=step)
        y.square().sum().backward()
        grads = [p.grad for name, p in layer.named_parameters() if "experts" in name]
        stayed = stays_local(layer._resolve(step, None, None, None, None), step, layer.layer_index)
        found.append((stayed, y.detach(), torch.cat([g.flatten() for g in grads])))
    layer.eval()
    step = sync_step(T, layer.step_settings(torch.float64), layer.groups)
    return found, step.draw, layer(tokens(rank, 0), step=step).detach()


@pytest.mark.parametrize(
    "options",
    [{"capacity_factor": 2.0}, {"capacity_factor": 0.0, "exchange": "2dh"}],
    ids=["padded", "ragged"],
)
def test_a_step_that_stays_is_computed_by_the_ranks_own_experts(options):
    whole = make().state_dict()
    results = run_ranks(_steps, 2, whole, options)
    experts = [[whole[name] for name in _names(e)] for e in range(E)]
    gate, local = whole["gate.wg.weight"], E // 2
    for number in range(STEPS):
        stays = [found[number][0] for found, _, _ in results]
        assert stays[0] == stays[1]  # the ranks drew alike
        for rank, (found, _, _) in enumerate(results):
            here = (lambda j, r=rank: r * local + j % local) if stays[0] else (lambda j: j)
            want = by_hand(tokens(rank, number), gate, experts, here)
            torch.testing.assert_close(found[number][1], want, rtol=1e-9, atol=1e-9)
    assert {found[0] for found in results[0][0]} == {True, False}
    for rank, (_, draw, y) in enumerate(results):  # evaluation exchanges, and draws nothing
        want = by_hand(tokens(rank, 0), gate, experts, lambda j: j)
        assert draw is None
        torch.testing.assert_close(y, want, rtol=1e-9, atol=1e-9)


def test_gradients_of_a_step_that_stays():
    """Experts have that of their own rank's tokens alone."""
    whole = make().state_dict()
    results = run_ranks(_steps, 2, whole, {"capacity_factor": 2.0})
    gate, local = whole["gate.wg.weight"], E // 2
    number = next(i for i in range(STEPS) if results[0][0][i][0])
    for rank, (found, _, _) in enumerate(results):
        mine = [[whole[name].clone().requires_grad_() for name in _names(rank * local + e)]
                for e in range(local)]  # fmt: skip
        y = by_hand(tokens(rank, number), gate, mine, lambda j: j % local)
        y.square().sum().backward()
        total = sum(p.grad.double().square().sum() for expert in mine for p in expert)
        assert found[number][2].square().sum().item() == pytest.approx(total.item(), rel=1e-9)


def test_layers_draw_by_their_number_and_as_often_as_asked():
    layer = make(drop=0.3)
    call = layer._resolve(None, None, None, None, None)

    class Call:
        config, training, communicates = call.config, True, True

    class Step:
        pass

    drawn = []
    for Step.draw in range(400):
        drawn.append([stays_local(Call, Step, index) for index in range(2)])
    first, second = torch.tensor(drawn).double().unbind(1)
    assert first.mean().item() == pytest.approx(0.3, abs=0.1)
    assert (first * second).mean().item() == pytest.approx(0.09, abs=0.05)
    Step.draw = None
    assert not stays_local(Call, Step, 0)


def test_alone_there_is_nothing_to_leave_out():
    dropped, plain = make(drop=0.9), make(drop=0.0)
    state = torch.random.get_rng_state()
    assert torch.equal(dropped(tokens(0, 0)), plain(tokens(0, 0)))
    assert torch.equal(torch.random.get_rng_state(), state)
