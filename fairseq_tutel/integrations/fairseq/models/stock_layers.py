"""Prepare stock layers around MoE layers: padding masks, checkpointing, layer drop.

A stock layer calls its MoE layer as it called ``fc1``: with tokens [seq, batch, M] and nothing
else. So its ``forward`` is wrapped (:class:`_LayerCall`), and hooks give the MoE layer the padding
mask, batch first. Hooks of the stock layer would not see a recomputation.

fairseq's activation checkpointing runs a layer first without gradients, which the gate loss would
not survive. torch's own takes its place.

Layer drop draws by seed, update and call, so that all ranks skip the same layers. Otherwise they
would wait for each other's experts.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from fairseq.data.data_utils import numpy_seed
from fairseq.modules import LayerDropModuleList
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from ....moe import MoELayer
from ....moe.model import moe_layers

# arguments of a layer with the mask of its own tokens, [batch, seq]; the first one counts
_MASKS = ("self_attn_padding_mask", "encoder_padding_mask")
_LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def prepare_layers(model: nn.Module) -> None:
    """Prepare all stock layers and stacks that hold MoE layers, in place."""
    # the same on all ranks; on the CPU, as a model may be built on the meta device
    seed = int(torch.randint(2**31, (), device="cpu"))
    for name, layer in moe_layers(model).items():
        around = list(_around(model, name))
        owner = next((each for each in around if _mask_argument(each)), None)
        if owner is not None:
            call = vars(owner).get("moe_call") or _LayerCall(owner)
            layer.register_forward_pre_hook(call.before, with_kwargs=True)
            layer.register_forward_hook(call.after)
            layer.moe_call = call
        for each in around:
            _checkpoint_by_torch(each)
            _drop_alike(each, seed)


def padding_of_call(layer: MoELayer) -> torch.Tensor | None:
    """Return the mask that the stock layer around an MoE layer has in its present call."""
    call = vars(layer).get("moe_call")
    return None if call is None else call.mask


def _around(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """Yield the modules around a module, from the innermost to the model."""
    while name:
        name = name.rpartition(".")[0]
        yield model.get_submodule(name)


def _mask_argument(layer: nn.Module) -> str | None:
    if isinstance(layer, nn.ModuleList):
        return None
    known = inspect.signature(type(layer).forward).parameters
    return next((name for name in _MASKS if name in known), None)


class _LayerCall:
    """Padding mask of the present call of a stock layer; copies of the layer have their own."""

    def __init__(self, layer: nn.Module):
        stock = vars(layer).get("precheckpoint_forward", layer.forward)
        self.mask: torch.Tensor | None = None
        self._name, self._signature = _mask_argument(layer), inspect.signature(stock)
        run = functools.partial(self._run, stock)
        if "precheckpoint_forward" in vars(layer):
            layer.precheckpoint_forward = run  # _checkpoint_by_torch takes it from there
        else:
            layer.forward = run
        layer.moe_call = self

    def _run(self, stock: Callable, *args: Any, **kwargs: Any) -> Any:
        before = self.mask
        self.mask = self._signature.bind(*args, **kwargs).arguments.get(self._name)
        try:
            return stock(*args, **kwargs)
        finally:
            self.mask = before

    def before(self, layer: MoELayer, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Give the tokens batch first, as Meta's layers get them, and the mask."""
        x = args[0].transpose(0, 1)
        mask = self.mask
        fits = mask is not None and mask.shape == x.shape[:-1]
        if fits and layer.config.use_pad_mask:
            kwargs = {"pad_mask": mask, **kwargs}
        return (x, *args[1:]), kwargs

    def after(self, layer: MoELayer, args: tuple, y: torch.Tensor) -> torch.Tensor:
        """Put the tokens back into the order of the stock layer."""
        return y.transpose(0, 1)


def _checkpoint_by_torch(layer: nn.Module) -> None:
    """Replace fairseq's checkpointing of a layer by torch's, which keeps the gate loss."""
    stock = vars(layer).get("precheckpoint_forward")
    if stock is not None:
        _, offload = layer.forward.args  # of fairseq's partial, or of this one
        layer.forward = functools.partial(_checkpointed, stock, offload)


def _checkpointed(stock: Callable, offload: bool, *args: Any, **kwargs: Any) -> Any:
    """Run a layer, and keep its inputs alone, in the CPU's memory with ``offload``."""
    with save_on_cpu() if offload else contextlib.nullcontext():
        return checkpoint(stock, *args, use_reentrant=False, **kwargs)


class _Draws(nn.Module):
    """Counter of the calls of a stack in an update; models pass the update's number on to it."""

    def __init__(self, seed: int):
        super().__init__()
        self._seed, self._update, self._call = seed, 0, 0

    def set_num_updates(self, number: int) -> None:
        """Begin an update; fairseq repeats this for each of its batches."""
        if number != self._update:
            self._update, self._call = number, 0

    def next(self) -> tuple[int, int, int]:
        """Return seeds of the next call."""
        self._call += 1
        return self._seed, self._update, self._call


class _DropAlike(LayerDropModuleList):
    """fairseq's list with layer drop, with equal draws on all ranks."""

    moe_draws: Callable[[], _Draws]

    def __iter__(self) -> Iterator[nn.Module]:
        layers = list(nn.ModuleList.__iter__(self))
        if not self.training:
            return iter(layers)
        with numpy_seed(*self.moe_draws().next()):
            kept = np.random.random(len(layers)) > self.p
        return iter([layer for layer, keep in zip(layers, kept, strict=True) if keep])


def _drop_alike(stack: nn.Module, seed: int) -> None:
    """Let a stack with layer drop skip the same layers on all ranks."""
    if "moe_draws" in stack._modules or isinstance(stack, LayerDropModuleList):
        return
    lists = [each for each in stack.children() if type(each) is LayerDropModuleList]
    by_numpy = [name for name in _LAYER_DROPS if getattr(stack, name, 0)]
    if not lists and not (by_numpy and hasattr(stack, "layers")):
        return
    draws = stack.moe_draws = _Draws(seed)
    for each in lists:
        each.__class__ = _DropAlike
        each.moe_draws = functools.partial(getattr, stack, "moe_draws")
    if not lists:
        name = "extract_features" if hasattr(stack, "extract_features") else "forward"
        setattr(stack, name, functools.partial(_run_seeded, draws, getattr(stack, name)))


def _run_seeded(draws: _Draws, stock: Callable, *args: Any, **kwargs: Any) -> Any:
    if not draws.training:
        return stock(*args, **kwargs)
    with numpy_seed(*draws.next()):
        return stock(*args, **kwargs)
