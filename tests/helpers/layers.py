"""A small layer on ranks, its tokens, and what a pass through it gives."""

import functools

import torch
from helpers.assertions import assert_same_state
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairseq_tutel.distributed import build_groups, process_world
from fairseq_tutel.moe import MoELayer

M, HIDDEN = 6, 8
UNEVEN = (9, 0, 2, 13, 0, 8, 3, 11)  # tokens of each rank
# capacity factors that drop nothing, and evaluation
LAYOUTS = {"padded": (8.0, True), "ragged": (0.0, True), "evaluation": (1.0, False)}


class OwnExpert(nn.Sequential):
    """As a user may write one."""

    def __init__(self, number):
        torch.manual_seed(100 + number)
        super().__init__(nn.Linear(M, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, M))


def make_layer(groups, layout="ragged", dtype=torch.float64, own=False, **options):
    """One layer of a placement; its weights are the same whatever the exchange."""
    factor, training = LAYOUTS[layout]
    if own:
        options["experts"] = [OwnExpert(number) for number in groups.local_experts]
    options = {"capacity_factor": factor, "top_k": min(2, groups.num_experts), **options}
    hidden_dim = None if "experts" in options else HIDDEN
    torch.manual_seed(7)
    layer = MoELayer(M, groups.num_experts, hidden_dim, groups=groups, seed=3, **options)
    return layer.to(dtype).train(training)


def tokens_of(sizes=UNEVEN, dtype=torch.float64):
    """x and a target of all ranks, and which of them are this rank's."""
    rank, world_size = process_world()
    sizes = sizes[:world_size]
    torch.manual_seed(11)
    x, target = torch.randn(2, sum(sizes), M).to(dtype)
    return x, target, slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def run(layer, x, target, recompute=None, **options):
    """y, gradients of x and of parameters; ``recompute``: None, or whether it is reentrant."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    call = functools.partial(layer, **options)
    y = call(x) if recompute is None else checkpoint(call, x, use_reentrant=recompute)
    (y.float() * target.float()).sum().backward()
    grads = {name: param.grad for name, param in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


def compare_with_linear(exchange, experts, layout="ragged", dtype=torch.float64, **options):
    """A pass through a layer with this exchange is one with ``linear``, bit for bit."""
    x, target, rows = tokens_of(dtype=dtype)
    layers = [
        make_layer(build_groups(experts), layout, dtype, exchange=each, **options)
        for each in (exchange, "linear")
    ]
    assert layers[0].exchange.name != layers[1].exchange.name
    ours, linear = (run(layer, x[rows], target[rows]) for layer in layers)
    assert_same_state(ours, linear, str((exchange, experts, layout, dtype, options)))
    assert not len(ours["x"]) or ours["x"].any()
