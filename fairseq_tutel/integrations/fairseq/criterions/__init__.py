"""fairseq criterions for models with MoE layers; ``fairseq_tutel.register`` registers them."""

from typing import NamedTuple

from .moe_criterion import MoECriterion
from .moe_cross_entropy import MoECrossEntropyCriterion, MoECrossEntropyCriterionConfig
from .moe_label_smoothed_cross_entropy import (
    MoELabelSmoothedCrossEntropyCriterion,
    MoELabelSmoothedCrossEntropyCriterionConfig,
)


class Criterion(NamedTuple):
    """Criterion and the dataclass of its options."""

    criterion: type
    config: type


# by name of `--criterion`
CRITERIONS = {
    "moe_cross_entropy": Criterion(MoECrossEntropyCriterion, MoECrossEntropyCriterionConfig),
    "moe_label_smoothed_cross_entropy": Criterion(
        MoELabelSmoothedCrossEntropyCriterion, MoELabelSmoothedCrossEntropyCriterionConfig
    ),
}
