"""``--criterion moe_label_smoothed_cross_entropy`` of fairseq's ``nllb`` branch, for translation.

``loss = (1 - eps) * NLL_sum + eps / V * S + weight * sample_size * G``, with conditional routing
``+ cmr_weight * sample_size * C`` (:mod:`.conditional_routing`). S is the sum of -log p over all V
symbols and all targets; stock's ``label_smoothed_cross_entropy`` spreads eps over V - 1 symbols.
"""

import math
from dataclasses import dataclass
from typing import Optional

from fairseq import utils
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.logging import metrics

from .conditional_routing import Budget
from .moe_criterion import (
    GateLossOptions,
    MoECriterion,
    gate_loss_weight,
    log_moe_metrics,
    log_scalar,
)


@dataclass
class MoELabelSmoothedCrossEntropyCriterionConfig(
    GateLossOptions, LabelSmoothedCrossEntropyCriterionConfig
):
    """Options of fairseq's ``nllb`` branch, with its defaults."""

    moe_gate_loss_wt: Optional[float] = gate_loss_weight(0.0)


class MoELabelSmoothedCrossEntropyCriterion(MoECriterion, LabelSmoothedCrossEntropyCriterion):
    """Label-smoothed cross entropy of a model with MoE layers."""

    config = MoELabelSmoothedCrossEntropyCriterionConfig
    default_weight = 0.0

    def __init__(
        self,
        task,
        sentence_avg,
        label_smoothing=0.0,
        ignore_prefix_size=0,
        report_accuracy=False,
        moe_gate_loss_wt=None,
        moe_gate_loss_combine_method="average",
        cmr_gate_loss_wt=0.0,
        cmr_gate_loss_p=1.0,
        moe_cmr_xgpu=False,
    ):
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)
        self.set_gate_loss(moe_gate_loss_wt, moe_gate_loss_combine_method)
        self.budget = Budget(cmr_gate_loss_wt, cmr_gate_loss_p, moe_cmr_xgpu)

    def forward(self, model, sample, reduce=True):
        """Return (loss, sample size, logging output) of one batch, see the module docstring."""
        net_output, collected = self.run(model, sample)
        smoothed, nll_loss = self.compute_loss(model, net_output, sample, reduce=reduce)
        loss, sample_size, output = self.add_gate_loss(
            smoothed, model, net_output, sample, collected
        )
        output["nll_loss"] = nll_loss.data
        if self.report_accuracy:
            output["n_correct"], output["total"] = self.compute_accuracy(model, net_output, sample)
        return loss, sample_size, output

    def compute_loss(self, model, net_output, sample, reduce=True):
        """Return (smoothed loss, NLL): scalars, or [targets, 1] without ``reduce``."""
        log_prob, target = self.get_lprobs_and_target(model, net_output, sample)
        log_prob_NV, target_N = log_prob.flatten(0, -2), target.flatten()  # a fork's are [B, T, V]
        padding_N1 = target_N.eq(self.padding_idx)[:, None]
        nll_N1 = -log_prob_NV.gather(1, target_N[:, None]).masked_fill(padding_N1, 0)
        all_N1 = -log_prob_NV.sum(1, keepdim=True).masked_fill(padding_N1, 0)
        if reduce:
            nll_N1, all_N1 = nll_N1.sum(), all_N1.sum()
        return (1 - self.eps) * nll_N1 + self.eps / log_prob_NV.shape[1] * all_N1, nll_N1

    @classmethod
    def reduce_metrics(cls, logging_outputs) -> None:
        """Log the metrics of all ranks and batches of an update."""
        total = log_moe_metrics(logging_outputs)
        nll_loss = total["nll_loss"] / math.log(2) / max(total["ntokens"], 1)
        log_scalar("nll_loss", nll_loss, total["ntokens"])
        metrics.log_derived("ppl", lambda m: utils.get_perplexity(m["nll_loss"].avg))
        if total["total"] > 0:
            metrics.log_scalar("total", total["total"])
            metrics.log_scalar("n_correct", total["n_correct"])
            metrics.log_derived("accuracy", _accuracy)


def _accuracy(meters) -> float:
    """Return the percentage of targets whose symbol is the most probable one."""
    total = meters["total"].sum
    return round(100.0 * meters["n_correct"].sum / total, 3) if total > 0 else float("nan")
