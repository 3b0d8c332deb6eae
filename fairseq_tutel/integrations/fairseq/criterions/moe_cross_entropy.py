"""``--criterion moe_cross_entropy``: cross entropy plus the balance loss of the MoE layers.

``loss = CE_sum + weight * sample_size * G``. G is the sum or mean of the layers' losses, or its
negative logarithm. The loss is logged in base 2, G as it is.
"""

import math
from dataclasses import dataclass

from fairseq import utils
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.dataclass import ChoiceEnum
from fairseq.logging import metrics

from ....config.options import option
from .conditional_routing import Budget
from .moe_criterion import GateLossOptions, MoECriterion, log_moe_metrics, log_scalar


@dataclass
class MoECrossEntropyCriterionConfig(GateLossOptions, CrossEntropyCriterionConfig):
    """Options of fairseq's ``moe`` branch."""

    moe_gate_loss_transform: ChoiceEnum(["none", "neg_log"]) = option(
        "none", "transformation of the combined gate loss", group="balance"
    )


class MoECrossEntropyCriterion(MoECriterion, CrossEntropyCriterion):
    """Cross entropy of a model with MoE layers."""

    config = MoECrossEntropyCriterionConfig

    def __init__(
        self,
        task,
        sentence_avg,
        moe_gate_loss_wt=None,
        moe_gate_loss_combine_method="average",
        moe_gate_loss_transform="none",
        cmr_gate_loss_wt=0.0,
        cmr_gate_loss_p=1.0,
        moe_cmr_xgpu=False,
    ):
        super().__init__(task, sentence_avg)
        self.set_gate_loss(moe_gate_loss_wt, moe_gate_loss_combine_method, moe_gate_loss_transform)
        self.budget = Budget(cmr_gate_loss_wt, cmr_gate_loss_p, moe_cmr_xgpu)

    def forward(self, model, sample, reduce=True):
        """Return (loss, sample size, logging output) of one batch, see the module docstring."""
        net_output, collected = self.run(model, sample)
        inner_loss, _ = self.compute_loss(model, net_output, sample, reduce=reduce)
        loss, sample_size, output = self.add_gate_loss(
            inner_loss, model, net_output, sample, collected
        )
        return loss, sample_size, {**output, "inner_loss": inner_loss.data}

    @staticmethod
    def reduce_metrics(logging_outputs) -> None:
        """Log the metrics of all ranks and batches of an update."""
        total = log_moe_metrics(logging_outputs)
        name, inner_loss = "inner_loss", total["inner_loss"] / math.log(2)
        log_scalar(name, inner_loss / max(total["sample_size"], 1), total["sample_size"])
        if total["sample_size"] != total["ntokens"]:
            name = "nll_loss"
            log_scalar(name, inner_loss / max(total["ntokens"], 1), total["ntokens"])
        metrics.log_derived("ppl", lambda m: utils.get_perplexity(m[name].avg))
