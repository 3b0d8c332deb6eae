"""``--criterion moe_cross_entropy``: cross entropy plus the balance loss of the MoE layers.

``loss = CE_sum + weight * sample_size * G`` with G the sum or mean of the layers' losses, or its
negative logarithm. Logged per token (or sentence) in base 2 like fairseq's other criterions, but G
as it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from fairseq import utils
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.dataclass import ChoiceEnum
from fairseq.logging import metrics

from ..moe import (
    METRIC_NAMES,
    UTILISATION_NAMES,
    WIRE_ERROR_NAMES,
    WIRE_LAYERS_NAMES,
    MoEAux,
    routing_metrics,
    wire_errors,
)
from ..ranges import at_least, check_ranges, ranges_of
from .routing_logs import counts_to_log, logged_passes, utilisation_to_log

_NULL = "moe_null"  # percentage of the choices that are null experts, where there are such


@dataclass
class MoECrossEntropyCriterionConfig(CrossEntropyCriterionConfig):
    """Options of fairseq's ``moe`` branch."""

    moe_gate_loss_wt: float = field(
        default=1.0,
        metadata={"help": "weight of the gate (load balance) loss", "range": at_least(0)},
    )
    moe_gate_loss_combine_method: ChoiceEnum(["sum", "average"]) = field(
        default="average", metadata={"help": "how the losses of the MoE layers are combined"}
    )
    moe_gate_loss_transform: ChoiceEnum(["none", "neg_log"]) = field(
        default="none", metadata={"help": "transformation of the combined gate loss"}
    )


@register_criterion("moe_cross_entropy", dataclass=MoECrossEntropyCriterionConfig)
class MoECrossEntropyCriterion(CrossEntropyCriterion):
    """Cross entropy of a language model with MoE layers; dense models get a gate loss of 0."""

    def __init__(
        self,
        task,
        sentence_avg,
        moe_gate_loss_wt=1.0,
        moe_gate_loss_combine_method="average",
        moe_gate_loss_transform="none",
    ):
        super().__init__(task, sentence_avg)
        check_ranges(
            SimpleNamespace(moe_gate_loss_wt=moe_gate_loss_wt),
            ranges_of(MoECrossEntropyCriterionConfig),
        )
        self.gate_loss_weight = moe_gate_loss_wt
        self.combine_method = str(moe_gate_loss_combine_method)
        self.transform = str(moe_gate_loss_transform)

    def forward(self, model, sample, reduce=True):
        """Return (loss, sample size, logging output) of one batch, see the module docstring."""
        net_output = model(**sample["net_input"])
        inner_loss, _ = self.compute_loss(model, net_output, sample, reduce=reduce)
        sample_size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        # some models return a tensor or None beside their output
        extra = net_output[1] if isinstance(net_output[1], dict) else {}
        reports = extra.get("moe", [])
        gate_loss = self.gate_loss(reports, like=inner_loss)
        # broadcasts over the tokens where the inner loss is not reduced
        loss = inner_loss + self.gate_loss_weight * sample_size * gate_loss
        logging_output = {
            "loss": loss.data,
            "inner_loss": inner_loss.data,
            "moe_loss": gate_loss.data * sample_size,
            "ntokens": sample["ntokens"],
            "nsentences": sample["target"].size(0),
            "sample_size": sample_size,
            "batch_count": 1,
            **layer_mean_metrics(reports),
            **wire_errors(reports),
        }
        if "moe_counts" in extra:
            logging_output.update(counts_to_log(extra["moe_counts"]))
        if "moe_bias_counts" in extra:
            logging_output["moe_bias_counts"] = extra["moe_bias_counts"]
        return loss, sample_size, logging_output

    def gate_loss(self, reports: list[MoEAux], like: torch.Tensor) -> torch.Tensor:
        """G of a batch, fp32 scalar with gradient."""
        if not reports:
            return like.new_zeros((), dtype=torch.float32)
        losses = torch.stack([aux.loss for aux in reports])
        total = losses.sum() if self.combine_method == "sum" else losses.mean()
        return -total.log() if self.transform == "neg_log" else total

    @staticmethod
    def reduce_metrics(logging_outputs) -> None:
        """Log the metrics of all ranks and batches of an update.

        NOTE: one synchronisation with the device; logged tensors would be read one by one.
        """
        passes = logged_passes(logging_outputs)
        used = {} if passes is None else utilisation_to_log(passes)
        names = ("loss", "inner_loss", "moe_loss", "sample_size", "ntokens", "batch_count")
        names += (_NULL,) + METRIC_NAMES + WIRE_ERROR_NAMES + WIRE_LAYERS_NAMES + tuple(used)
        total = _host_totals([*logging_outputs, used], names)
        sample_size, ntokens = total["sample_size"], total["ntokens"]
        batches = total["batch_count"]
        bits = 1.0 / max(sample_size, 1) / math.log(2)
        metrics.log_scalar("loss", total["loss"] * bits, sample_size, round=3)
        metrics.log_scalar(
            "moe_gate_loss", total["moe_loss"] / max(sample_size, 1), sample_size, round=8
        )
        for name in METRIC_NAMES:
            metrics.log_scalar(name, total[name] / max(batches, 1), batches, round=3)
        if any(_NULL in log for log in logging_outputs):
            metrics.log_scalar(_NULL, total[_NULL] / max(batches, 1), batches, round=2)
        for name in UTILISATION_NAMES if used else ():
            if name != "moe_util_slot" or total["padded_rows"] > 0:
                metrics.log_scalar(name, total[name], len(passes.slots), round=2)
        for name, layers_name in zip(WIRE_ERROR_NAMES, WIRE_LAYERS_NAMES, strict=True):
            if layers := total[layers_name]:  # where something was encoded
                metrics.log_scalar(name, total[name] / layers, layers, round=6)
        metrics.log_scalar("inner_loss", total["inner_loss"] * bits, sample_size, round=3)
        perplexity_of = "inner_loss"
        if sample_size != ntokens:
            metrics.log_scalar(
                "nll_loss", total["inner_loss"] / max(ntokens, 1) / math.log(2), ntokens, round=3
            )
            perplexity_of = "nll_loss"
        metrics.log_derived("ppl", lambda m: utils.get_perplexity(m[perplexity_of].avg))


def _host_totals(logging_outputs: Sequence[dict], names: Sequence[str]) -> dict[str, float]:
    """Sums over logging outputs by name, 0 for what none of them has.

    All tensors are read back to the host in one piece; their sums are fp64.
    """
    totals = dict.fromkeys(names, 0.0)
    tensors = []
    for log in logging_outputs:
        for name in names:
            value = log.get(name, 0)
            if torch.is_tensor(value):
                tensors.append((name, value))
            else:
                totals[name] += value
    if tensors:
        values = torch.stack([value.reshape(()).double() for _, value in tensors]).tolist()
        for (name, _), value in zip(tensors, values, strict=True):
            totals[name] += value
    return totals


def layer_mean_metrics(reports: list[MoEAux]) -> dict[str, torch.Tensor]:
    """Mean over the MoE layers of every metric; empty without MoE layers."""
    if not reports:
        return {}
    means = torch.stack(routing_metrics(reports)).mean(1)
    found = dict(zip(METRIC_NAMES, means.unbind(), strict=True))
    if reports[0].num_null_KN is not None:
        found[_NULL] = torch.stack([aux.null_share for aux in reports]).mean()
    return found
