"""Record which experts a model's tokens go to, and route another pass by the record."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..moe import MoELayer
from ..moe.model import moe_layers
from ..moe.requests import LayerCall, Request, open_requests


@contextmanager
def record_choices(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Record the choices of a model's MoE layers in a forward pass, or in a generation.

    README.md has an example. Each rank records its own tokens. A pass that activation
    checkpointing recomputes is not recorded again.

    Args:
        model (nn.Module): the model, wrapped or not.

    Yields:
        dict: choices [..., K] by layer name, int16 (int32 from 32767 experts) on the layer's
        device; :mod:`fairseq_tutel.moe.given_choices` explains negative numbers. Of a layer that is
        called several times, a list with the choices of each call.
    """
    found: dict[str, Any] = {}
    layers = moe_layers(model).items()
    asked = {
        layer: Request({"recorder": None}, _recorder(found, name, layer)) for name, layer in layers
    }
    with open_requests(asked):
        yield found


def choices_of_sequences(
    choices: Mapping[str, Any], shape: Sequence[int], beam_indices: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Join the choices of a generation with a cache: one row for each token of its sequences.

    >>> from fairseq_tutel.moe import MoELayer
    >>> layer = MoELayer(8, num_experts=4, top_k=2)
    >>> with record_choices(layer) as choices:  # as ``generate`` calls it, for two sequences
    ...     for tokens in (3, 1, 1):
    ...         _ = layer(torch.randn(2, tokens, 8))
    >>> choices_of_sequences(choices, (2, 6))[""].shape
    torch.Size([2, 6, 2])

    Args:
        choices (dict): the result of :func:`record_choices` around ``generate``: a call for the
            prompts, then one for each new token.
        shape (list of int): shape of the final sequences, [B, T].
        beam_indices (Tensor): integers [B, new tokens], the row that a token was chosen in, as
            transformers returns it after a beam search (default None: rows stay in their places).

    Returns:
        dict: choices [B, T, K] by layer name. The last token's are -1: no pass had it as input.

    Raises:
        ValueError: the calls are not those of a generation with a cache.
    """
    joined: dict[str, torch.Tensor] = {}
    batch, length = shape
    for name, calls in choices.items():
        calls = calls if isinstance(calls, list) else [calls]
        sizes = [call.shape[:-1].numel() for call in calls]
        rows = batch if beam_indices is None else sizes[-1] if len(calls) > 1 else len(calls[0])
        if set(sizes[1:]) - {rows} or sizes[0] % rows or sum(sizes) < rows * (length - 1):
            raise ValueError(
                f"layer {name!r} has calls with {sizes} tokens, and the sequences are "
                f"{list(shape)}: record all of generate(use_cache=True), and nothing else"
            )
        top_k = calls[0].shape[-1]
        every = torch.cat([call.reshape(rows, -1, top_k) for call in calls], 1)[:, : length - 1]
        if beam_indices is not None:
            every = _follow_beams(every, beam_indices.to(every.device), sizes[0] // rows)
        joined[name] = torch.nn.functional.pad(every, (0, 0, 0, 1), value=-1)
    return joined


def _follow_beams(choices: torch.Tensor, beams: torch.Tensor, prompt: int) -> torch.Tensor:
    """Return the rows of final sequences: each token's from the row that went on with it."""
    steps = torch.arange(choices.shape[1], device=choices.device) - (prompt - 1)
    row = beams.clamp(min=0)[:, steps.clamp(min=0)]
    return choices.gather(0, row[..., None].expand(-1, -1, choices.shape[2]))


def _recorder(found: dict[str, Any], name: str, layer: MoELayer):
    small = torch.int16 if layer.config.num_outputs < 2**15 - 1 else torch.int32

    def record(call: LayerCall, _: object) -> None:
        assert call.choices is not None  # the request asked for them
        choices = call.choices.to(small)
        if name not in found:
            found[name] = choices
        elif isinstance(found[name], list):
            found[name].append(choices)
        else:
            found[name] = [found[name], choices]

    return record


@contextmanager
def replay_choices(model: nn.Module, choices: Mapping[str, Any]) -> Iterator[None]:
    """Route a forward pass by recorded choices, and its recomputations by activation checkpointing.

    Weights come from the model's gates.

    Args:
        model (nn.Module): the model, wrapped or not.
        choices (dict): the result of :func:`record_choices` or :func:`choices_of_sequences`, on any
            device: of a layer that is called several times, a list. Layers that it lacks choose by
            themselves.

    Raises:
        ValueError: the model lacks a layer that ``choices`` has.
        RuntimeError: a layer was called less often than ``choices`` says, or a list is for several
            calls in one activation checkpoint.
    """
    layers = moe_layers(model)
    if unknown := [name for name in choices if name not in layers]:
        raise ValueError(f"choices has {unknown}, the model's MoE layers are {list(layers)}")
    asked = {layers[name]: _Replay(given) for name, given in choices.items()}
    with open_requests(asked):
        yield
    left = [name for name in choices if asked[layers[name]].left]
    if left:
        raise RuntimeError(
            f"replay_choices has choices for the layers {left}, which were not called: call "
            "them inside the block, or leave out their choices"
        )


class _Replay(Request):
    """Request for the choices of one layer, of each call in turn."""

    def __init__(self, given: Any):
        self.left = list(given) if isinstance(given, list) else [given]
        super().__init__({"choices": self.left[0]}, self._took)

    def _took(self, *_: Any) -> None:
        if len(self.left) > 1:
            self.arguments = {"choices": self.left[1]}
        del self.left[:1]
