"""Weights of a dense model in a model of the same architecture with experts."""

from collections.abc import MutableMapping
from typing import Any

from torch import Tensor, nn

from ....distributed import experts_of_ffn
from ....moe import MoELayer, parts_of_ffn


def copy_into_experts(model: Any, weights: MutableMapping[str, Tensor], path: str) -> None:
    """Start every expert as the dense block of its layer; routers stay as they were drawn.

    The blocks in ``weights`` are replaced by the model's own entries, so that the whole loads
    strictly. Raise ValueError for a block that is not in the file, or of another size.
    """
    model.upgrade_state_dict(weights)  # the names of older checkpoints
    mine = model.state_dict()
    # a stack that languages share has several names, and both state dicts have all of them
    modules = model.named_modules(remove_duplicate=False)
    layers = {name: layer for name, layer in modules if isinstance(layer, MoELayer)}
    for name, layer in layers.items():
        names = _dense_names(model, name, path)
        if missing := [of for of in names.values() if of not in weights]:
            raise ValueError(f"{path} is dense, and lacks {missing[0]} for experts of {name}")
        ffn = {key: weights.pop(of) for key, of in names.items()}
        try:
            slots = range(layer.groups.num_local_experts)
            layer.experts.load_state_dict(experts_of_ffn(ffn, slots))
        except RuntimeError as error:
            reason = str(error).split("\n")[1].strip()
            raise ValueError(
                f"{path} is dense, and cannot become experts of {name}: {reason}"
            ) from None
    for key in mine:
        if any(key.startswith(f"{name}.") for name in layers):
            weights[key] = mine[key]


def _dense_names(model: nn.Module, name: str, path: str) -> dict[str, str]:
    """Return tensors of an expert -> those of the layer's block in a dense model."""
    layer = name.rpartition(".")[0]
    parts = parts_of_ffn(model.get_submodule(layer))
    if parts is None:
        raise ValueError(
            f"{path} is dense, and the names of {name} in it are not known: only blocks that "
            "--moe-freq chooses can start as dense ones"
        )
    linear = {"fc1": parts[0], "fc2": parts[-1]}
    return {
        f"{ours}.{kind}": f"{layer}.{theirs}.{kind}"
        for ours, theirs in linear.items()
        for kind in ("weight", "bias")
    }
