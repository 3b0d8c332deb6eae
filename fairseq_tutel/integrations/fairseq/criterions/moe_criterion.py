"""Gate loss and metrics of criterions for models with MoE layers.

A criterion adds ``weight * sample_size * G`` to its own loss; G is the sum or mean of the layers'
losses. fairseq sums logging outputs over the ranks. Utilisation belongs to one forward pass of all
ranks, so before the sum a rank's outputs are joined into one with a row of counts per pass
(:func:`join_passes`).
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Optional

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.logging import metrics

from .... import moe
from ....config import GATE_LOSS_WEIGHTS
from ....config.options import at_least, check_ranges, option
from ....moe import MoEAux, RoutingCounts
from ....moe.load_bias import zero_counts
from ....moe.model import moe_layers
from ....training import AuxLosses, collect_aux
from .conditional_routing import Budget, BudgetOptions

_CMR = "cmr_gate_loss"  # of conditional routing
# counts of the routing in a logging output
_KEYS = tuple(f"moe_{name}" for name in RoutingCounts._fields)
_MAY_DROP, _SECOND = "moe_may_drop", "moe_second"  # batches with a capacity, a second choice
_RECORDS = "moe_exchange_records"  # of the layers, until the backward pass is over
_NULL = "moe_null"  # percentage of the choices that are null experts


def gate_loss_weight(default: float) -> Any:
    """Return the option of a weight; a preset or ``default`` decides if it is not given."""
    others = "".join(f"; --moe-preset {name}: {w}" for name, w in GATE_LOSS_WEIGHTS.items())
    return option(
        None,
        f"weight of the gate (load balance) loss (default: {default}{others})",
        at_least(0),
        group="balance",
    )


@dataclass
class GateLossOptions(BudgetOptions):
    """Options of fairseq's ``moe`` and ``nllb`` branches; a base of a criterion's dataclass."""

    moe_gate_loss_wt: Optional[float] = gate_loss_weight(1.0)
    moe_gate_loss_combine_method: ChoiceEnum(["sum", "average"]) = option(
        "average", "how the losses of the MoE layers are combined", group="balance"
    )


class MoECriterion:
    """Mixin for a stock criterion, named before it. Dense models get a gate loss of 0."""

    config: type  # dataclass of the options
    budget = Budget()  # without weight
    default_weight = 1.0  # Meta's
    _known = (0, False)  # number of a model, and whether it has MoE layers

    def set_gate_loss(
        self, weight: float | None, combine_method: str, transform: str = "none"
    ) -> None:
        """Set the options of the gate loss; raise ValueError for a weight out of range.

        The weight is ``default_weight`` if None, unless the trainer sets that of a preset.
        """
        check_ranges(SimpleNamespace(moe_gate_loss_wt=weight), GateLossOptions)
        self.gate_loss_weight = self.default_weight if weight is None else weight
        self.combine_method, self.transform = str(combine_method), str(transform)

    def gate_loss(self, reports: list[MoEAux], like: torch.Tensor) -> torch.Tensor:
        """Return G of a batch, an fp32 scalar with gradient."""
        total = combined_loss(reports, self.combine_method, like)
        return -total.log() if reports and self.transform == "neg_log" else total

    def run(self, model, sample: dict[str, Any]) -> tuple[Any, dict[str, Any] | None]:
        """Return the model's output, and its reports if the model does not return them itself."""
        collected = getattr(model, "moe_reports_are_collected", False)
        says = getattr(model, "moe_layers", None) is not None and not collected
        if says or not self._has_layers(model):
            return model(**sample["net_input"]), None
        with collect_aux(model) as aux:
            net_output = model(**sample["net_input"])
        return net_output, collected_extra(aux, model)

    def _has_layers(self, model) -> bool:
        if self._known[0] != id(model):
            self._known = id(model), bool(moe_layers(model))
        return self._known[1]

    def _reports(self, model, extra: dict[str, Any]) -> list[MoEAux]:
        """Return the reports in a model's output; raise ValueError if they are lost."""
        reports = extra.get("moe", [])
        if not reports and model.training and self._has_layers(model):
            raise ValueError(
                f"{type(model).__name__} has MoE layers, but returns no reports of them, so that "
                'their gate loss is lost: return {"moe": [aux, ...]} beside its output '
                "(training.collect_aux has the reports)"
            )
        return reports

    def add_gate_loss(
        self,
        loss: torch.Tensor,
        model,
        net_output,
        sample: dict[str, Any],
        collected: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, int, dict[str, Any]]:
        """Return (loss with the gate loss, sample size, logging output) of a batch.

        ``collected`` are the reports that :meth:`run` returned (default None: in ``net_output``).
        """
        sample_size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        # some models return a tensor or None beside their output
        extra = net_output[1] if isinstance(net_output[1], dict) else {}
        if collected is not None:
            extra = collected
        reports = self._reports(model, extra) if collected is None else extra["moe"]
        gate_loss = self.gate_loss(reports, like=loss)
        loss = loss + self.gate_loss_weight * sample_size * gate_loss
        distance = self.budget(reports, sample_size)
        if distance is not None:
            loss = loss + self.budget.weight * distance
        logging_output = {
            "loss": loss.data,
            "ntokens": sample["ntokens"],
            "nsentences": sample["target"].size(0),
            **routing_log(model, gate_loss, sample_size, extra | {"moe": reports}),
        }
        if distance is not None:
            logging_output[_CMR] = distance.data
        return loss, sample_size, logging_output


def combined_loss(reports: Sequence[MoEAux], method: str, like: torch.Tensor) -> torch.Tensor:
    """Return the sum or the average of the layers' losses, an fp32 scalar with gradient."""
    if not reports:
        return like.new_zeros((), dtype=torch.float32)
    losses = torch.stack([aux.loss for aux in reports])
    return losses.sum() if method == "sum" else losses.mean()


def collected_extra(aux: AuxLosses, model) -> dict[str, Any]:
    """Return what a model of ours gives beside its output, for a model whose calls were collected.

    Counts have a row per layer, also of layers that were not called, so that ranks can add them.
    """
    layers = moe_layers(model)
    extra: dict[str, Any] = {"moe": aux.with_gradients()}
    if len({layer.config.num_outputs for layer in layers.values()}) == 1:
        counts = [_counts_of(aux, name, layer) for name, layer in layers.items()]
        extra["moe_counts"] = RoutingCounts(*map(torch.stack, zip(*counts, strict=True)))
    if (counts := _bias_counts(aux, layers)) is not None:
        extra["moe_bias_counts"] = counts
    return extra


def _bias_counts(aux: AuxLosses, layers: dict[str, moe.MoELayer]) -> torch.Tensor | None:
    """Return counts for the load biases of all layers, zeros for those without gradients.

    None if no bias moves, or if a router that was called does not count.
    """
    moving = {n for n, layer in layers.items() if layer.training and layer.config.moves_load_bias}
    if not moving or any(each.bias_counts is None for name, each in aux.layers if name in moving):
        return None
    found = aux.bias_counts()
    zeros = (zero_counts(layer.gate) for layer in layers.values())
    return torch.stack([found.get(name, none) for name, none in zip(layers, zeros, strict=True)])


def _counts_of(aux: AuxLosses, name: str, layer: moe.MoELayer) -> RoutingCounts:
    """Return this rank's counts of all calls of a layer, without the dimension L."""
    groups, device = layer.groups, next(layer.parameters()).device
    experts, ranks = layer.config.num_experts, groups.world_size
    total = [torch.zeros(n, dtype=torch.int32, device=device) for n in (experts, experts, ranks)]
    total.append(torch.zeros((), dtype=torch.int32, device=device))
    for (of, report), r in zip(aux.layers, aux.parallelisms, strict=True):
        if of == name:
            found = moe.routing_counts([report], groups, r)
            total = [before + each[0] for before, each in zip(total, found, strict=True)]
    return RoutingCounts(*total)


def routing_log(
    model, gate_loss: torch.Tensor, sample_size: Any, extra: dict[str, Any]
) -> dict[str, Any]:
    """Return the entries of a logging output about the routing of a batch."""
    reports = extra["moe"]
    log = {
        "moe_loss": gate_loss.data * sample_size,
        "sample_size": sample_size,
        "batch_count": int(bool(reports)),  # layer drop may skip all MoE layers
        **_layer_mean_metrics(reports),
        _MAY_DROP: int(_has_capacity(model)),
        _SECOND: int(any(len(aux.num_routed_KE) > 1 for aux in reports)),
    }
    log[_RECORDS] = [aux.record for aux in reports if aux.record is not None]
    if not model.training:  # else gradients travel in the backward pass
        _finish_records([log])
    if "moe_counts" in extra:
        log.update(zip(_KEYS, extra["moe_counts"], strict=True))
    if "moe_bias_counts" in extra:
        log["moe_bias_counts"] = extra["moe_bias_counts"]
    return log


def log_moe_metrics(logging_outputs, with_loss: bool = True) -> dict[str, float]:
    """Log loss, gate loss and routing of an update; return the sums of all scalars by name.

    NOTE: synchronises once with the device; logged tensors would be read one by one.
    """
    _finish_records(logging_outputs)
    passes = logged_passes(logging_outputs)
    used = {} if passes is None else _utilisation_to_log(passes)
    total = _host_totals([*logging_outputs, used])
    size, batches = max(total["sample_size"], 1), max(total["batch_count"], 1)
    if with_loss:
        log_scalar("loss", total["loss"] / size / math.log(2), total["sample_size"])
    log_scalar("moe_gate_loss", total["moe_loss"] / size, total["sample_size"], 8)
    if _CMR in total:
        log_scalar(_CMR, total[_CMR] / size, total["sample_size"], 8)
    constant = _constant_metrics(total)
    for name in moe.METRIC_NAMES:
        if name not in constant:
            log_scalar(name, total[name] / batches, total["batch_count"])
    if _NULL in total:
        log_scalar(_NULL, total[_NULL] / batches, total["batch_count"], 2)
    for name in used:
        if name in moe.UTILISATION_NAMES and name not in constant:
            log_scalar(name, total[name], len(passes.slots), 2)
    for name, layers_name in zip(moe.WIRE_ERROR_NAMES, moe.WIRE_LAYERS_NAMES, strict=True):
        if layers := total[layers_name]:  # layers that encoded rows
            log_scalar(name, total[name] / layers, layers, 6)
    if layers := total[moe.HELP_LAYERS_NAME]:
        for name in moe.HELP_NAMES:
            log_scalar(name, total[name] / layers, layers)
    return total


def log_scalar(name: str, value: float, weight: float, digits: int = 3) -> None:
    """Log a mean with this weight, rounded to so many digits."""
    metrics.log_scalar(name, value, weight, round=digits)


def _has_capacity(model) -> bool:
    """Return whether any layer limits its capacity; True if unknown."""
    layers = getattr(model, "moe_layers", None)
    configs = [layer.config for layer in layers.values()] if layers else []
    return not configs or any(config.capacity(1, model.training) is not None for config in configs)


def _constant_metrics(total: dict[str, float]) -> set[str]:
    """Return the metrics that the options fix at 0 or 100; these are not logged."""
    clocks = (name for name in moe.METRIC_NAMES if name.startswith("all_to_all"))
    constant = {name for name in clocks if not total[name]}
    if not total[_MAY_DROP]:
        constant |= {"overflow_expert1", "overflow_expert2", "moe_drop"}
    if not total[_SECOND]:
        constant |= {name for name in moe.METRIC_NAMES if "2" in name or "overflow" in name}
    if not total["padded_rows"]:
        constant.add("moe_util_slot")
    if total["ranks"] == 1:
        constant.add("moe_util_rank")
    return constant


def _host_totals(logs: Sequence[dict]) -> defaultdict[str, float]:
    """Return the fp64 sums of the scalars of logging outputs by name, read back at once."""
    totals: defaultdict[str, float] = defaultdict(float)
    tensors = []
    for name, value in (entry for log in logs for entry in log.items()):
        if not torch.is_tensor(value):
            totals[name] += value
        elif value.dim() == 0:
            tensors.append((name, value))
    if tensors:
        values = torch.stack([value.double() for _, value in tensors]).tolist()
        for (name, _), value in zip(tensors, values, strict=True):
            totals[name] += value
    return totals


def _layer_mean_metrics(reports: list[MoEAux]) -> dict[str, torch.Tensor]:
    """Return the mean over the MoE layers of every metric; empty without MoE layers."""
    if not reports:
        return {}
    found = dict(zip(moe.METRIC_NAMES, moe.routing_metrics(reports).mean(1).unbind(), strict=True))
    if reports[0].num_null_KN is not None:
        found[_NULL] = torch.stack([aux.null_share for aux in reports]).mean()
    return found


def join_passes(logs: Sequence[dict[str, Any]], fillers: int = 0) -> None:
    """Move the counts of all logs of one rank into the first log, one row per pass: [U, L, ...].

    Rows of zeros come first for ``fillers`` passes, in which other ranks may have had batches.
    """
    _finish_records(logs)
    if not logs or _KEYS[0] not in logs[0]:
        return
    for key in _KEYS:
        rows = [log.pop(key) for log in logs]
        empty = [torch.zeros_like(rows[0])] * fillers
        logs[0][key] = torch.stack([*empty, *rows])


def _finish_records(logs: Sequence[dict[str, Any]]) -> None:
    """Replace the records of the exchanges by errors on the wire and by what helpers did."""
    for log in logs:
        records = log.pop(_RECORDS, ())
        log.update({**moe.wire_errors(records), **moe.help_counts(records)})


def logged_passes(logs: Sequence[dict[str, Any]]) -> RoutingCounts | None:
    """Return the counts of all passes of all ranks, [U, L, ...]; None without MoE layers."""
    found = [RoutingCounts(*(log[key] for key in _KEYS)) for log in logs if _KEYS[0] in log]
    if not found:
        return None
    dims = RoutingCounts(load=2, kept=2, received=2, slots=1)  # dimensions of one pass
    fields = zip(zip(*found, strict=True), dims, strict=True)
    flat = ([part.reshape(-1, *part.shape[-dim:]) for part in parts] for parts, dim in fields)
    return RoutingCounts(*map(torch.cat, flat))


def _utilisation_to_log(passes: RoutingCounts) -> dict[str, torch.Tensor | int]:
    """Return means over the calls of layers of every metric, ``padded_rows`` and ``ranks``."""
    called = passes.load.any(-1)  # layer drop skips some
    found = torch.stack(moe.utilisation(passes)).where(called, torch.nan)
    names = dict(zip(moe.UTILISATION_NAMES, found.flatten(1).nanmean(1).nan_to_num(), strict=True))
    return {**names, "padded_rows": passes.slots.sum(), "ranks": passes.received.shape[-1]}
