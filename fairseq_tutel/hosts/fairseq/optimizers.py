"""What fairseq's optimizers must know where each rank has a slice of an expert."""

from __future__ import annotations

import functools

import torch
from fairseq.optim import FairseqOptimizer
from fairseq.optim.fused_adam import FusedAdamV1

from ...distributed import ExpertParallelGroups, copies_of, is_expert, max_over_replicas_
from ...optim.adam16 import Adam16


def fit_to_slices(optimizer: FairseqOptimizer, name: str, groups: ExpertParallelGroups) -> None:
    """Make an optimizer step slices of experts as it would step the whole ones.

    Args:
        optimizer: as the trainer has built it, over half weights or not.
        name: ``--optimizer``, for errors.
        groups: placement of the experts; nothing is done where they are not in slices.

    Raises:
        ValueError: an optimizer that needs all weights of a tensor for the update of one, or for
            what it keeps of one.
    """
    if groups.num_slices == 1:
        return
    # fairseq's word for optimizers that treat each weight by itself; torch's Adagrad does
    inner = optimizer.optimizer
    if not (optimizer.supports_flat_params or isinstance(inner, torch.optim.Adagrad)):
        raise ValueError(
            f"--optimizer {name} needs all weights of an expert for the update of each, and with "
            f"--moe-expert-placement sliced every rank has 1/{groups.num_slices} of them: use "
            "--moe-expert-placement replicated, or an optimizer such as adam, nag or sgd"
        )
    if isinstance(inner, FusedAdamV1) and inner.use_fp16_stats:
        raise ValueError(
            "--fp16-adam-stats with apex's fused Adam has a scale per rank, and with "
            "--moe-expert-placement sliced several ranks have parts of one statistic: drop "
            "--fp16-adam-stats, or do without apex, which this package does not need for it"
        )
    halves = getattr(optimizer, "fp16_params", ())
    for half, copy in zip(halves, getattr(optimizer, "fp32_params", ()), strict=True):
        if is_expert(half):
            copy.copies = copies_of(half, groups)  # fairseq takes `expert` over, and no more
    if isinstance(inner, Adam16):
        share_scales(inner, groups)


def share_scales(optimizer: Adam16, groups: ExpertParallelGroups) -> None:
    """Have the fp16 statistics of slices the scales of the whole experts."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    cut = [p for p in params if is_expert(p) and copies_of(p, groups) < groups.num_replicas]
    optimizer.share_scales(cut, functools.partial(max_over_replicas_, groups=groups))
