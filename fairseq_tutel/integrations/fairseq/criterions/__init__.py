"""fairseq criterions for models with MoE layers; ``fairseq_tutel.register`` registers them."""

from .any_criterion import GateLoss
from .moe_criterion import MoECriterion
from .moe_cross_entropy import MoECrossEntropyCriterion
from .moe_label_smoothed_cross_entropy import MoELabelSmoothedCrossEntropyCriterion

# by name of `--criterion`
CRITERIONS = {
    "moe_cross_entropy": MoECrossEntropyCriterion,
    "moe_label_smoothed_cross_entropy": MoELabelSmoothedCrossEntropyCriterion,
}
