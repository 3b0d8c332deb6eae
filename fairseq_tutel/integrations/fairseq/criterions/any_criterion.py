"""Gate loss for any criterion of fairseq, beside a model whose MoE layers report to nobody.

Tasks may call the criterion several times in a step, call ``backward`` themselves, and read names
and metrics off the criterion. So it stays as it is: hooks on the instance collect the reports of
the MoE calls inside it, and add ``weight * sample_size * G`` to its loss. The sample size is the
criterion's, by which the trainer divides the gradients. Logging outputs stay as they are, too: the
printed loss has no gate loss in it, and the entries about the routing have a list of their own.
"""

from typing import Any

import torch

from ....training import collect_aux
from .moe_criterion import collected_extra, combined_loss, routing_log


class GateLoss:
    """Gate loss of a model, added to one criterion.

    Attributes:
        gate_loss_weight: weight of the gate loss.
        logs: entries about the routing, one for each call of the criterion; the reader empties it.
        ignored: whether the trainer ignores the present batch, which is a dummy.
    """

    default_weight = 0.01

    def __init__(self, model: Any, criterion: Any, combine_method: str):
        self._model, self._method = model, str(combine_method)
        self.gate_loss_weight = self.default_weight
        self._collecting: Any = None  # while the criterion runs
        self.logs: list[dict[str, Any]] = []
        self.ignored = False
        criterion.register_forward_pre_hook(self._begin)
        criterion.register_forward_hook(self._end, always_call=True)

    def __deepcopy__(self, memo: dict) -> "GateLoss":
        return self

    def take(self) -> list[dict[str, Any]]:
        """Return the entries since the last call."""
        logs, self.logs = self.logs, []
        return logs

    def _begin(self, criterion: Any, args: tuple) -> None:
        collecting = collect_aux(self._model)
        self._collecting = collecting, collecting.__enter__()

    def _end(self, criterion: Any, args: tuple, output: Any) -> Any:
        if self._collecting is None:
            return None
        (collecting, aux), self._collecting = self._collecting, None
        if output is None:  # the criterion failed: do not wait for other ranks
            collecting.__exit__(RuntimeError, RuntimeError(), None)
            return None
        collecting.__exit__(None, None, None)
        loss, sample_size, *others = output
        extra = collected_extra(aux, self._model)
        gate_loss = combined_loss(extra["moe"], self._method, loss)
        size = sample_size.detach() if torch.is_tensor(sample_size) else sample_size
        log = routing_log(self._model, gate_loss, size, extra)
        if self.ignored:
            log = {name: v if isinstance(v, list) else v * 0 for name, v in log.items()}
        self.logs.append(log)
        if not self._model.training or not self.gate_loss_weight or not extra["moe"]:
            return None
        return (loss + self.gate_loss_weight * sample_size * gate_loss, sample_size, *others)
