"""Several dense models in one set: check that they are alike, average their tensors.

:mod:`.upcycle` takes experts from each model, as Branch-Train-MiX does (arXiv 2403.07816).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layout import check_same, form
from ..state import MODEL, options_of

# options of dense models: sizes, and what changes the function without changing a shape
_SIDED = (
    *("layers", "embed_dim", "ffn_embed_dim", "attention_heads", "normalize_before"),
    "learned_pos",
)
OF_FUNCTION = (
    *(f"{side}_{name}" for side in ("encoder", "decoder") for name in _SIDED),
    *("decoder_input_dim", "decoder_output_dim", "activation_fn", "layernorm_embedding"),
    *("share_all_embeddings", "share_decoder_input_output_embed", "merge_src_tgt_embed"),
    *("no_scale_embedding", "no_token_positional_embeddings", "no_decoder_final_norm"),
    *("no_cross_attention", "cross_self_attention", "scale_attn", "scale_heads"),
)


def check_alike(files: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise CheckpointError if models, (path, shared state) each, differ from the first one."""
    (first, state), *others = files
    for other, other_state in others:
        both = options_of(state), options_of(other_state)
        names = ("_name", "arch", *OF_FUNCTION)
        stated = [name for name in names if None not in (each.get(name) for each in both)]
        where = f"models must be alike to become experts of one: {other}"
        check_same(_forms(other_state, stated), _forms(state, stated), where, first)


def _forms(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    """Return some options by flag, and the form of each tensor by name."""
    options = options_of(state)
    flags = {name: "arch" if name == "_name" else name.replace("_", "-") for name in names}
    stated = {f"--{flag}": str(options[name]) for name, flag in flags.items()}
    return stated | {name: form(tensor) for name, tensor in state[MODEL].items()}


def average(models: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of each tensor of alike models, summed in fp64 and rounded once.

    Tensors that share memory in every model share it in the result. Integers are the first model's.
    """
    if len(models) == 1:
        return dict(models[0])
    means: dict[Any, Tensor] = {}
    result = {}
    for name, value in models[0].items():
        tensors = [model[name] for model in models]
        tied = tuple((each.data_ptr(), each.shape, each.stride()) for each in tensors)
        if tied not in means:
            means[tied] = value
            if value.is_floating_point():
                total = sum(each.double() for each in tensors)
                means[tied] = torch.div(total, len(tensors)).to(value.dtype)
        result[name] = means[tied]
    return result
