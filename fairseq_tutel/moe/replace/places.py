"""Find the blocks that are replaced, and put MoE layers in their places."""

import copy
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..layer import MoELayer
from .probes import call_seeded, make_probe, same

Match = str | Callable[[str, nn.Module], bool] | Collection[str]

# Layers whose feed-forward network is no module of its own: torch's and fairseq's transformers.
_PARTS_OF_LAYERS = (
    ("linear1", "activation", "dropout", "linear2"),
    ("fc1", "activation_fn", "activation_dropout_module", "fc2"),
    ("fc1", "activation_fn", "dropout2", "fc2"),  # fairseq's wav2vec 2.0 and HuBERT
    ("intermediate", "output.dense"),  # BERT's of transformers: two modules
    ("w_1", "activation", "dropout1", "w_2"),  # a half-step FFN of fairseq's conformers
)
# How such a layer may be called: the network alone (transformers' BERT), an encoder's, an encoder's
# with a padding mask, a decoder's, a decoder's with two encoders, one of two channels, one of an
# image's height and width (Swin's), one of images [B, H, W, M].
_Call = Callable[[Any, Tensor], Any]
_CALLS: tuple[_Call, ...] = (
    lambda layer, x: layer.feed_forward_chunk(x),
    lambda layer, x: layer(x),
    lambda layer, x: layer(x, None),
    lambda layer, x: layer(x, x),
    lambda layer, x: layer(x, x, None, x),
    lambda layer, x: layer([x, x]),
    lambda layer, x: layer(x, (1, x.shape[1])),
    lambda layer, x: layer(x[:, None]),
)
_CALLS_OF_PAIRS: tuple[_Call, ...] = (
    lambda layer, x: layer.output(layer.intermediate(x), x),
    lambda layer, x: layer.output(layer.intermediate(x)),
)


class FeedForward(nn.Module):
    """The parts of a layer from its first to its second linear layer, as one module."""

    def __init__(self, first: nn.Module, activation: Callable, dropout: nn.Module, second):
        super().__init__()
        self.first, self.dropout, self.second = first, dropout, second
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.dropout(self.activation(self.first(x))))


class Place(NamedTuple):
    """Place of one block in the model."""

    name: str  # of the module that becomes the MoE layer
    block: nn.Module  # the feed-forward block that the MoE layer replaces
    parent: nn.Module  # the module that holds it
    emptied: tuple[str, ...] = ()  # the parent's other parts of the block; they become identities

    def check_parts(self, x: Tensor) -> None:
        """Raise ValueError if a layer computes anything else between its two linear layers.

        Run a copy of the layer before and after its parts move into one module.
        """
        if not self.emptied:
            return
        name, _, first = self.name.rpartition(".")
        before = make_probe(name, self.parent)
        after = copy.deepcopy(before)
        _put_parts(after, (first, *self.emptied), _join_parts(after, (first, *self.emptied)))
        kind = type(self.parent).__name__
        names = ", ".join((first, *self.emptied))
        call = _call_of(before.eval(), x)
        if isinstance(call, Exception):
            raise ValueError(
                f"{name}: {kind} cannot be called as layer(x), layer(x, None) or layer(x, "
                f"memory) ({call}): match a module with its feed-forward network alone"
            )
        for training in (False, True):
            wanted, found = (_outcome(call, each.train(training), x) for each in (before, after))
            if isinstance(wanted, Exception) or isinstance(found, Exception):
                reason = f" ({wanted if isinstance(wanted, Exception) else found})"
            elif same(found, wanted):
                continue
            else:
                reason = ""
            raise ValueError(
                f"{name}: {kind} computes something else between {names}, such as a norm "
                f"(--scale-fc of fairseq){reason}: an MoE layer cannot replace them"
            )

    def put(self, model: nn.Module, layer: nn.Module) -> None:
        """Replace the block by the MoE layer."""
        _put_parts(self.parent, (self.name.rpartition(".")[2], *self.emptied), layer)
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder) and layer in module.modules():
                module.use_nested_tensor = False  # only torch's fused layers take nested tensors


def matching(model: nn.Module, match: Match) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the outermost modules that match, in the order of the model."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if isinstance(match, str):
        names = [name for name in modules if re.search(match, name)]
    elif callable(match):
        names = [name for name, module in modules.items() if match(name, module)]
    else:
        names = list(match)
        if missing := [name for name in names if name not in modules]:
            raise ValueError(f"{type(model).__name__} has no modules {missing}")
    names = [name for name in names if name]
    if not names:
        linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
        raise ValueError(
            f"nothing in {type(model).__name__} matches {match!r}; linear layers in it: "
            + ", ".join([*linear[:8], *["..."] * (len(linear) > 8)])
        )
    outermost = [n for n in names if not any(n.startswith(f"{other}.") for other in names)]
    return [(name, modules[name]) for name in outermost]


def place_of(model: nn.Module, name: str, block: nn.Module) -> Place:
    """Return the place of a block, or of the feed-forward network inside a transformer layer.

    Raise ValueError for a block that cannot be replaced.
    """
    place = Place(name, block, model.get_submodule(name.rpartition(".")[0]))
    if (names := parts_of_ffn(block)) is not None:
        place = Place(f"{name}.{names[0]}", _join_parts(block, names), block, names[1:])
    _check_contents(model, name, place)
    return place


def layers_with_ffn(model: nn.Module) -> list[str]:
    """Return the names of the layers whose feed-forward network is known, and still dense."""
    found = []
    for name, module in model.named_modules():
        parts = parts_of_ffn(module)
        if parts and not isinstance(getattr(module, parts[0]), MoELayer):
            found.append(name)
    return found


def parts_of_ffn(layer: nn.Module) -> tuple[str, ...] | None:
    """Return the names of a layer's parts from its first to its second linear layer, or None."""
    found = None
    for names in _PARTS_OF_LAYERS:
        # a feed-forward block may have the same parts, but a layer has more (attention, norms)
        has_more = len(list(layer.children())) > 4 or "output.dense" in names  # BERT's has 3
        if has_more and all(_has_part(layer, each) for each in names):
            found = names
    return found


def _check_contents(model: nn.Module, name: str, place: Place) -> None:
    """Raise ValueError for convolutions, for MoE layers, and for weights used outside the block."""
    block = place.block
    mine = {id(param) for param in block.parameters()}
    inside = {id(module) for module in block.modules()}
    named = list(model.named_modules(remove_duplicate=False))
    # a model may have a whole stack under several names, as one encoder of several languages
    parts = (place.name.rpartition(".")[2], *place.emptied)
    same = [f"{at}.{part}" for at, module in named if module is place.parent for part in parts]
    same = [name, *(each.removeprefix(".") for each in same)]
    for other, module in named:
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and id(module) in inside:
            raise ValueError(f"{name}: {other} is a convolution; experts see one token at a time")
        if isinstance(module, MoELayer) and id(module) in inside:
            raise ValueError(f"{name} has experts already ({other})")
        within = any(other == each or other.startswith(f"{each}.") for each in same)
        for each, param in module.named_parameters(recurse=False):
            if id(param) in mine and not within:
                raise ValueError(f"{name} shares weights with {other}.{each}: they are tied")


def _has_part(layer: nn.Module, path: str) -> bool:
    owner, _, leaf = path.rpartition(".")
    found = layer if not owner else getattr(layer, owner, None)
    return hasattr(found, leaf)


def _join_parts(layer: nn.Module, names: tuple[str, ...]) -> nn.Module:
    parts = [getattr(layer.get_submodule(o), leaf) for o, _, leaf in _split(names)]
    joined = nn.Sequential(*parts) if len(parts) == 2 else FeedForward(*parts)
    return joined.train(layer.training)


def _split(names: tuple[str, ...]) -> list[tuple[str, str, str]]:
    return [each.rpartition(".") for each in names]


def _put_parts(layer: nn.Module, names: tuple[str, ...], first: nn.Module) -> None:
    if isinstance(layer, nn.TransformerEncoderLayer):
        layer.activation_relu_or_gelu = 0  # torch's fused evaluation reads weights itself
    setattr(layer, names[0], first)
    for owner, _, leaf in _split(names[1:]):
        setattr(layer.get_submodule(owner), leaf, nn.Identity())


def _call_of(layer: nn.Module, x: Tensor) -> _Call | Exception:
    """Return the first way of calling a layer that works, or the first error."""
    # layers of transformers pass the first module's output to the second, however they are called
    known = type(layer).__module__.startswith("transformers.models.")
    calls = (*_CALLS, *_CALLS_OF_PAIRS) if known else _CALLS
    errors = []
    for call in calls:
        found = _outcome(call, layer, x)
        if not isinstance(found, Exception):
            return call
        errors.append(found)
    return next((each for each in errors if not isinstance(each, AttributeError)), errors[0])


def _outcome(call: _Call, layer: nn.Module, x: Tensor) -> list[Tensor] | Exception:
    """Return the first output of a layer and the random numbers that come next, or the error."""
    try:
        y, *drawn = call_seeded(lambda x: call(layer, x), x)
    except Exception as error:
        return error
    while isinstance(y, tuple | list) and y:
        y = y[0]
    if isinstance(y, Tensor) and y.shape[-1] == x.shape[-1]:
        return [y, *drawn]
    return TypeError("it returns no tensor [..., M]")
