"""Let a tuner choose the exchange of MoE layers that agree one by one, as those of ``NAME_moe`` do.

Which layers a pass calls, and with how many tokens, is known to the dense model alone. So each call
agrees by itself. The first call of a pass asks the tuner; the others take its exchange and timer. A
pass ends when the model is called again, or a layer that it has called.
"""

import dataclasses
from typing import Any

import torch
from torch import nn

from ....distributed import StepAgreement, sync_step
from ....moe import MoELayer
from ....moe.model import moe_layers
from ....moe.recomputation import is_recomputing, recalled
from ....tuning import ExchangeTuner
from ..options.options import RunOptions
from .moe_stack import make_tuner


def tune_passes(model: Any, run: RunOptions) -> None:
    """Tune all layers of a model as its options say, those of a part from a checkpoint included.

    Collective with an ``auto``. Raise ValueError if one tuner cannot serve the layers.
    """
    layers = list(moe_layers(model).values())
    widths = dict.fromkeys(layer.model_dim for layer in layers)
    if run.tuned and len(widths) > 1:
        raise ValueError(
            f"'auto' for {' and '.join(run.tuned)}: the layers are {' and '.join(map(str, widths))}"
            " wide, and one tuner measures layers of one width: give values, or choose layers of "
            "one width by --moe-blocks"
        )
    tuner = make_tuner(run, layers)
    if tuner is not None:
        for module in model.modules():
            vars(module).pop("exchange_tuner", None)  # of a part
        model.exchange_tuner = tuner
        _TunedPasses(model, layers, tuner)


def tuner_of(model: nn.Module) -> ExchangeTuner | None:
    """Return the tuner of a model, or of a part of it."""
    found = (vars(module).get("exchange_tuner") for module in model.modules())
    return next((tuner for tuner in found if tuner is not None), None)


class _TunedPasses:
    """Hooks of a tuned model and its layers; each layer belongs to the last one that took it."""

    def __init__(self, model: nn.Module, layers: list[MoELayer], tuner: ExchangeTuner):
        self._tuner, self._called = tuner, set[MoELayer]()
        self._step: StepAgreement | None = None  # of the first call of the pass
        model.register_forward_pre_hook(self._begin)
        for layer in layers:
            if (hook := vars(layer).get("moe_tuned")) is not None:
                hook.remove()
            layer.moe_tuned = layer.register_forward_pre_hook(self._give_step, with_kwargs=True)

    def _begin(self, model: nn.Module, args: tuple) -> None:
        if not is_recomputing():
            self._called.clear()

    def _give_step(self, layer: MoELayer, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        x = args[0]
        count = x.shape[:-1].numel()
        # a recomputation has the exchanges of the run that it repeats
        step = recalled((self, layer), lambda: self._agree(layer, count, x.dtype))
        return args, {**kwargs, "step": step}

    def _agree(self, layer: MoELayer, count: int, dtype: torch.dtype) -> StepAgreement | None:
        is_first = not self._called or layer in self._called
        if is_first:
            self._called.clear()
        self._called.add(layer)
        if is_first:
            self._step = self._tuner.agree(count, dtype)
            return self._step
        if not layer.training or self._step is None:
            return None  # the layer agrees by itself, on its own exchange
        chosen = {"exchange": self._step.exchange, "timer": self._step.timer}
        settings = layer.step_settings(dtype, exchange=self._step.exchange)
        return dataclasses.replace(sync_step(count, settings, layer.groups), **chosen)
