"""fairseq criterions for models with MoE layers; importing this package registers them."""

from .moe_cross_entropy import MoECrossEntropyCriterion

__all__ = ["MoECrossEntropyCriterion"]
