"""Find the built-in network of experts that computes what a block does."""

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..experts.ffn import ACTIVATIONS
from .probes import call_seeded, observe, same

GATED = {"swiglu": functional.silu, "geglu": functional.gelu}
_LAYERS = {2: ("fc1", "fc2"), 3: ("fc_gate", "fc1", "fc2")}


class Network(NamedTuple):
    """A built-in network that computes what a block does."""

    options: dict[str, Any]  # arguments of MoELayer
    tensors: dict[str, Tensor]  # weights of one expert, by their names in state dicts
    trained: set[str]  # names of those tensors that require gradients


class _Dropouts(TorchFunctionMode):
    """Mode that collects the probabilities of all dropouts, of modules and of functions."""

    def __init__(self):
        super().__init__()
        self.found: set[float] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (functional.dropout, torch.dropout):
            self.found.add(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        return func(*args, **kwargs)


def recognize(block: nn.Module, probe: nn.Module, x: Tensor) -> Network | None:
    """Return the built-in network that computes what a block does, with its weights, or None.

    Compare with ``probe``, a copy of the block with random weights: outputs in evaluation; outputs,
    gradients and the random numbers of dropout in training. Then compare outputs by the block's own
    weights, which may reach other limits of an activation.
    """
    names = _linear_layers(probe)
    if len(names) not in _LAYERS:
        return None
    params = list(probe.parameters())
    evaluated = call_seeded(probe.eval(), x)
    with _Dropouts() as dropouts:
        trained = observe(probe.train(), x, params)
    found = sorted({0.0, *(p for p in dropouts.found if p < 1)})
    pairs = [(inside, after) for inside in found for after in found]
    activations = ACTIVATIONS if len(names) == 2 else GATED
    for order in itertools.permutations(names):
        layers = _layers_of(probe, order)
        *firsts, (last, _) = layers
        shapes = {last.t().shape, *(first.shape for first, _ in firsts)}
        if shapes != {(last.shape[1], x.shape[-1])}:  # from M to F and from F to M
            continue
        for activation, pair in itertools.product(activations, pairs):
            compute = partial(_compute, layers, activations[activation])
            if same(call_seeded(partial(compute, (0.0, 0.0)), x), evaluated) and same(
                observe(partial(compute, pair), x, params), trained
            ):
                own = partial(_compute, _layers_of(block, order), activations[activation])
                if _same_by_weights(block, partial(own, (0.0, 0.0)), x):
                    return _describe(block, order, activation, pair)
    return None


@torch.no_grad()
def _same_by_weights(block: nn.Module, network: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Return whether a block and a network of its weights agree in evaluation, in their dtype."""
    x = x.to(next(block.parameters()))
    found, wanted = (call_seeded(f, x)[0] for f in (network, copy.deepcopy(block).eval()))
    tolerance = 1e-3 if x.dtype.itemsize >= 4 else 5e-2
    close = (found - wanted).norm(dim=-1) <= tolerance * wanted.norm(dim=-1)
    return bool((close | ~wanted.isfinite().all(-1)).all())  # half precision may overflow


def _linear_layers(probe: nn.Module) -> list[str]:
    """Return the names of the linear layers; [] unless they hold all weights, each once."""
    linears = {name: m for name, m in probe.named_modules() if _weight_and_bias(m) is not None}
    held = [id(p) for m in linears.values() for p in m.parameters(recurse=False)]
    everything = {id(param) for param in probe.parameters()}
    return list(linears) if len(held) == len(set(held)) and set(held) == everything else []


def _weight_and_bias(module: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Return a linear layer's weight [out, in] and bias (or None); None for any other module."""
    conv1d = type(module).__name__ == "Conv1D"  # the linear layer of transformers' GPT-2
    if not (isinstance(module, nn.Linear) or conv1d):
        return None
    params = dict(module.named_parameters(recurse=False))
    if "weight" not in params or not params.keys() <= {"weight", "bias"}:
        return None  # pruned or parametrized
    weight = params["weight"]
    return weight.t() if conv1d else weight, params.get("bias")


def _layers_of(module: nn.Module, names: Sequence[str]) -> list[tuple[Tensor, Tensor | None]]:
    """Return weight and bias of the linear layers of these names."""
    found = (_weight_and_bias(module.get_submodule(name)) for name in names)
    return [pair for pair in found if pair is not None]


def _compute(layers, activation, dropout: tuple[float, float], x: Tensor) -> Tensor:
    """Compute the network of one expert in plain torch."""
    *first, last = layers
    hidden, *gated = (functional.linear(x, *layer) for layer in first)
    hidden = activation(hidden)
    for each in gated:
        hidden = hidden * each
    hidden = functional.dropout(hidden, dropout[0])
    return functional.dropout(functional.linear(hidden, *last), dropout[1])


def _describe(
    block: nn.Module, order: Sequence[str], activation: str, dropout: tuple[float, float]
) -> Network | None:
    """Return the network with the block's weights.

    None if the block trains only one of two tensors that are one parameter of the experts.
    """
    gated = len(order) == 3
    tensors, trained = {}, set()
    layers = _layers_of(block, order)
    with_bias = not gated or any(bias is not None for _, bias in layers)
    for layer, (weight, bias) in zip(_LAYERS[len(order)], layers, strict=True):
        tensors[f"{layer}.weight"] = weight.detach()
        if with_bias:
            zeros = weight.new_zeros(len(weight))
            tensors[f"{layer}.bias"] = zeros if bias is None else bias.detach()
        for kind, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None and tensor.requires_grad:
                trained.add(f"{layer}.{kind}")
    stacked = [{f"{each}.{kind}" for each in ("fc_gate", "fc1")} for kind in ("weight", "bias")]
    if gated and any(len(pair & trained) == 1 for pair in stacked):
        return None
    options = {
        "hidden_dim": layers[-1][0].shape[1],
        "activation_dropout": dropout[0],
        "dropout": dropout[1],
    }
    if gated:
        options |= {"expert_network": activation, "expert_options": {"bias": with_bias}}
    else:
        options["activation"] = activation
    return Network(options, tensors, trained)
