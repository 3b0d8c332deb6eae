"""Updates of experts in the backward pass: the weights of usual steps, with less memory."""

import pytest
import torch
from helpers.distributed import run_ranks
from helpers.layers import M, tokens_of
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.distributed import build_groups, is_expert, process_world
from fairseq_tutel.moe import MoELayer

STEPS, LAYERS = 8, 3


class Model(nn.Module):
    def __init__(self, experts, dim=M, hidden=8, **options):
        super().__init__()
        groups = build_groups(experts, **options)
        make = lambda i: MoELayer(  # noqa: E731
            dim, experts, hidden, top_k=min(2, experts), capacity_factor=0, groups=groups, seed=i
        )
        torch.manual_seed(0)
        self.layers = nn.ModuleList(map(make, range(LAYERS)))
        self.head = nn.Linear(dim, dim)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def weights_after(in_backward, experts, **options):
    """Weights after steps whose learning rate changes, and the norm of each step."""
    model = Model(experts, **options)
    wrapped = training.wrap_data_parallel(model) if process_world()[1] > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    updates = training.update_in_backward(model, optimizer) if in_backward else None
    x, target, mine = tokens_of((9, 5), dtype=torch.float32)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        (wrapped(x[mine] + 0.01 * step) - target[mine]).square().sum().backward()
        grads = [p.grad for p in model.parameters() if is_expert(p)]
        assert all((grad is None) == in_backward for grad in grads)
        if updates is not None:
            norms.append(updates.take_sq_norm())
        else:
            groups = model.layers[0].groups
            norms.append(training.expert_grad_sq_norm(model.parameters(), groups))
        optimizer.step()
        schedule.step()
    state = optimizer.state_dict()["state"]
    return [p.detach() for p in model.parameters()], norms, dict(sorted(state.items()))


def _compare():
    """Rules of the average, replicas, recomputation: tests/integrations/fairseq."""
    for experts, options in ((4, {}), (1, {"placement": "sliced"})):
        usual, early = (weights_after(each, experts, **options) for each in (False, True))
        torch.testing.assert_close(early[0], usual[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(early[1:], usual[1:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_are_those_of_usual_steps(ranks):
    run_ranks(_compare, ranks)


def peak_bytes(in_backward):
    """Largest number of bytes that a step holds at once, by torch's own account."""
    model = Model(4, dim=64, hidden=512)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    if in_backward:
        training.update_in_backward(model, optimizer)
    x = torch.randn(2, 64)  # activations are small beside gradients
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        model(x).square().sum().backward()
        optimizer.step()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    of_experts = [p.numel() * 4 for layer in model.layers for p in layer.experts.parameters()]
    return peak, sum(of_experts)


def test_the_peak_is_lower_by_all_but_one_layers_gradients():
    peaks = {each: peak_bytes(each) for each in (False, True)}
    saved, total = peaks[False][0] - peaks[True][0], peaks[True][1]
    assert saved > 0.95 * total * (LAYERS - 1) / LAYERS


def test_what_needs_all_gradients_is_refused():
    model = Model(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="the optimizer does not have the experts' fc1_weight"):
        training.update_in_backward(model, torch.optim.SGD(model.head.parameters(), lr=0.1))
    updates = training.update_in_backward(model, optimizer)
    run = lambda: model(torch.randn(9, M)).square().sum().backward()  # noqa: E731
    run()
    with pytest.raises(ValueError, match="max_norm=1.0: update_in_backward has updated"):
        training.clip_grad_norm_(model, 1.0)
    with pytest.raises(RuntimeError, match="a second backward pass before optimizer.step()"):
        run()
    optimizer.step()
    run()
    updates.remove()
    run()
    assert model.layers[0].experts.fc1_weight.grad is not None
    training.clip_grad_norm_(model, 1.0)


def _not_averaged():
    model = Model(4)
    with pytest.raises(ValueError, match="not averaged over 2 ranks"):
        training.update_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
    training.prepare_data_parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training.shard_optimizer(optimizer)
    with pytest.raises(ValueError, match="shard_optimizer shares the steps"):
        training.update_in_backward(model, optimizer)


def test_ranks_that_would_drift_apart_are_refused():
    run_ranks(_not_averaged, 2)
