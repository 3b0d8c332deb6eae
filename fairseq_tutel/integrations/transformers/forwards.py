"""Forward passes and generations of a trainer: their padding, and their number on all ranks."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ...moe.model import moe_layers
from ...moe.padding import Padding
from ...moe.requests import Request, open_requests
from ...training.lora import inside_peft


class Forwards:
    """Context that hands the attention mask of each forward pass to the model's MoE layers.

    Args:
        model (nn.Module): the model as it is called, wrapped or not.
        skip_padding (bool): padding goes to no expert.

    Attributes:
        counts_padding: whether a pass had padding that the layers count as tokens.
        has_aux_loss: whether the model returned a balance loss of its own.
    """

    def __init__(self, model: nn.Module, skip_padding: bool):
        self._model, self._skip = model, skip_padding
        self._layers = list(moe_layers(model).values())
        # decoders get other tokens than those of the mask
        self._has_encoder = getattr(
            getattr(inside_peft(model), "config", None), "is_encoder_decoder", False
        )
        self._passes: list[tuple[ExitStack, Padding | None]] = []
        self.counts_padding = self.has_aux_loss = False

    def __enter__(self) -> "Forwards":
        begin, end = self._model.register_forward_pre_hook, self._model.register_forward_hook
        self._hooks = begin(self._begin, with_kwargs=True), end(self._end, always_call=True)
        return self

    def __exit__(self, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        mask, stack, padding = kwargs.get("attention_mask"), ExitStack(), None
        if torch.is_tensor(mask) and mask.dim() == 2 and not mask.all():
            if self._has_encoder:
                self.counts_padding = True
            else:
                padding = Padding(mask.bool(), self._skip)
                requests = {x: Request({"padding": padding}, lambda *_: None) for x in self._layers}
                stack.enter_context(open_requests(requests))
        self._passes.append((stack, padding))

    def _end(self, module: nn.Module, args: tuple, output: Any) -> None:
        stack, padding = self._passes.pop()
        stack.close()
        self.counts_padding |= padding is not None and not padding.fits
        self.has_aux_loss |= getattr(output, "aux_loss", None) is not None


@contextmanager
def generate_together(model: nn.Module) -> Iterator[None]:
    """Make ``generate`` go on until all ranks have ended, because MoE layers wait for all ranks."""
    inside: Any = inside_peft(model)
    if not any(layer.groups.world_size > 1 for layer in moe_layers(model).values()):
        yield
        return
    generate = inside.generate
    inside.generate = lambda *args, **kwargs: generate(*args, **{**kwargs, "synced_gpus": True})
    try:
        yield
    finally:
        del inside.generate
