"""Every optimizer of torch: its state is taken apart by expert and joined for other ranks."""

import copy

import pytest
import torch
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.checkpoint.layout import select_experts, split_dense_expert
from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import Experts
from fairseq_tutel.training import StateNames

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd without momentum": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.9),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
}


class Model(nn.Module):
    def __init__(self, numbers):
        super().__init__()
        self.dense = nn.Linear(3, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.experts = Experts(numbers, 3, 5, seed=1)


def step(model, optimizer, number):
    """With gradients that depend on the expert alone."""
    for name, param in model.named_parameters():
        if param.requires_grad:
            generator = torch.Generator().manual_seed(100 * number + len(name))
            grad = torch.randn((4, *param.shape[1:]), generator=generator)
            is_expert = name.startswith("experts.")
            param.grad = grad[[*model.experts.expert_ids]] if is_expert else torch.ones_like(param)
    optimizer.step()


def trained(numbers, make, steps):
    torch.manual_seed(0)
    model = Model(numbers)
    optimizer = make(model.parameters())
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer, StateNames.of_optimizer(optimizer, model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_follows_experts(name):
    """Two ranks of two experts -> one of four -> two again; each goes on as if always there."""
    make = OPTIMIZERS[name]
    whole, optimizer, _ = trained(range(4), make, 3)
    joined = {}
    for rank in range(2):
        model, part, names = trained(range(2 * rank, 2 * rank + 2), make, 2)
        named = names.to_named(part.state_dict())
        dense, experts = split_dense_expert(named["named_state"])
        shifted = select_experts(experts, first=2 * rank, wanted=range(4))
        joined |= dense | shifted
    stored = {**named, "named_state": joined}
    both, both_optimizer, names = trained(range(4), make, 2)  # its weights; state is overwritten
    both_optimizer.state.clear()
    both_optimizer.load_state_dict(names.from_named(stored, both_optimizer.state_dict()))
    step(both, both_optimizer, 2)
    torch.testing.assert_close(both.state_dict(), whole.state_dict())
    again = names.to_named(both_optimizer.state_dict())["named_state"]
    wanted = trained(range(4), make, 3)[2].to_named(optimizer.state_dict())["named_state"]
    assert again.keys() == wanted.keys()


def test_state_that_mixes_experts_stays_with_them():
    """torch's Adafactor keeps, for biases, means over the experts of a rank."""

    make = lambda params: torch.optim.Adafactor(params, lr=0.1)  # noqa: E731
    whole, _, _ = trained(range(4), make, 3)
    model, optimizer, names = trained(range(4), make, 2)
    named = names.to_named(optimizer.state_dict())
    optimizer.state.clear()
    optimizer.load_state_dict(names.from_named(named, optimizer.state_dict()))
    step(model, optimizer, 2)
    torch.testing.assert_close(model.state_dict(), whole.state_dict())
    _, fewer, names = trained(range(2), make, 2)
    with pytest.raises(ValueError, match="_bias mixes the 4 experts .* holds 2: .*weights alone"):
        names.from_named(named, fewer.state_dict())


def test_a_state_is_saved_through_transforms(tmp_path):
    """One's own, last, sees whole tensors and changes what is written."""
    model, optimizer, names = trained(range(4), OPTIMIZERS["adamw"], 1)
    place = build_groups(4)
    seen = []

    def halve_moments(state, groups, what):
        seen.append((groups.num_experts, what))
        for values in state["last_optimizer_state"]["named_state"].values():
            if values:  # not frozen
                values["exp_avg"] = values["exp_avg"] / 2
        return state

    path, named = str(tmp_path / "m.pt"), names.to_named(optimizer.state_dict())
    wanted = copy.deepcopy(named["named_state"])
    state = {"model": model.state_dict(), "last_optimizer_state": named}
    training.save_state(path, state, place, [*training.SAVE_TRANSFORMS, halve_moments])
    assert seen == [(4, f"saving {path}")]
    stored = training.load_state(path, place)["last_optimizer_state"]["named_state"]
    for name, values in wanted.items():
        for key in ("exp_avg", "exp_avg_sq") if values else ():
            assert torch.equal(stored[name][key], values[key] / (1 + (key == "exp_avg"))), name
