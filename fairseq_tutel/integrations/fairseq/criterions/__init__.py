"""fairseq criterions for models with MoE layers; importing this package registers them."""

from .moe_criterion import MoECriterion
from .moe_cross_entropy import MoECrossEntropyCriterion, MoECrossEntropyCriterionConfig
from .moe_label_smoothed_cross_entropy import (
    MoELabelSmoothedCrossEntropyCriterion,
    MoELabelSmoothedCrossEntropyCriterionConfig,
)

# name of `--criterion` -> dataclass of its options
CRITERIONS = {
    "moe_cross_entropy": MoECrossEntropyCriterionConfig,
    "moe_label_smoothed_cross_entropy": MoELabelSmoothedCrossEntropyCriterionConfig,
}

__all__ = [
    "CRITERIONS",
    "MoECriterion",
    "MoECrossEntropyCriterion",
    "MoECrossEntropyCriterionConfig",
    "MoELabelSmoothedCrossEntropyCriterion",
    "MoELabelSmoothedCrossEntropyCriterionConfig",
]
