"""Several dense models in one set: check that they are alike, average their tensors.

:mod:`.upcycle` takes experts from each model, as Branch-Train-MiX does (arXiv 2403.07816).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layout import CheckpointError
from ..state import MODEL, options_of

# options that must be equal: sizes, and what changes the function without changing a shape
_SIDED = ("layers", "embed_dim", "ffn_embed_dim", "attention_heads", "normalize_before")
_SAME = (
    *("_name", "arch", "activation_fn", "no_scale_embedding", "no_token_positional_embeddings"),
    *(f"{side}_{name}" for side in ("encoder", "decoder") for name in _SIDED),
)


def check_alike(files: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise CheckpointError if dense models differ in architecture, sizes or dtypes.

    Args:
        files: path and shared state of each model, compared with the first model. An option that
            one of two states lacks is not compared; names and shapes of all tensors are.
    """
    (first, state), *others = files
    one, ours = options_of(state), state[MODEL]
    for other, other_state in others:
        two, theirs = options_of(other_state), other_state[MODEL]
        for name in _SAME:
            if None not in (one.get(name), two.get(name)) and one[name] != two[name]:
                what = "arch" if name == "_name" else name.replace("_", "-")
                _refuse(f"--{what}", first, one[name], other, two[name])
        for name in {**ours, **theirs}:
            forms = [_form(model.get(name)) for model in (ours, theirs)]
            if forms[0] != forms[1]:
                _refuse(name, first, forms[0], other, forms[1])


def _refuse(what: str, first: str, value: Any, other: str, other_value: Any) -> None:
    raise CheckpointError(
        f"models must be alike to become experts of one: {what} is {value} in {first}, but "
        f"{other_value} in {other}"
    )


def _form(tensor: Tensor | None) -> str:
    """Return dtype and shape of a parameter, as text."""
    if tensor is None:
        return "missing"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def average(models: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of each tensor, summed in fp64 and rounded once.

    Tensors that share memory in every model share it in the result. Integers are taken from the
    first model, and so is all of it if there is no other.

    Args:
        models: parameter name -> tensor of any shape, with equal names, shapes and dtypes.
    """
    if len(models) == 1:
        return dict(models[0])
    means: dict[Any, Tensor] = {}
    result = {}
    for name, value in models[0].items():
        tensors = [model[name] for model in models]
        tied = tuple((each.data_ptr(), each.shape, each.stride()) for each in tensors)
        if tied not in means:
            means[tied] = _mean(tensors) if value.is_floating_point() else value
        result[name] = means[tied]
    return result


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    """Return the mean of tensors of one shape, in their dtype."""
    total = tensors[0].double()
    for tensor in tensors[1:]:
        total = total + tensor
    return torch.div(total, len(tensors)).to(tensors[0].dtype)
