"""Experts in fairseq's data-parallel wrappers and optimizers.

``legacy_ddp`` skips parameters that are marked as experts, ``pytorch_ddp`` gets them as parameters
to ignore. After either has reduced the dense gradients, expert gradients follow one rule
(:mod:`fairseq_tutel.training`).
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from fairseq.distributed import LegacyDistributedDataParallel, ModuleProxyWrapper
from fairseq.optim import FairseqOptimizer
from fairseq.optim.composite import CompositeOptimizer
from fairseq.optim.fused_adam import FusedAdamV1
from torch.nn.parallel import DistributedDataParallel

from ....distributed import ExpertParallelGroups, copies_of, is_expert, max_over_replicas_
from ....training import leave_experts_out, reduce_expert_grads, shard_optimizer
from ....training.adam16 import Adam16

LEGACY_BACKENDS = ("legacy_ddp", "no_c10d")
PYTORCH_BACKENDS = ("pytorch_ddp", "c10d")


class MoEDistributedModel(ModuleProxyWrapper):
    """Wrapper of a model (``moe_groups``) for training on several ranks."""

    def __init__(self, dist_cfg, model, process_group, device: torch.device, normalization: str):
        model = model.to(device)
        # torch's wrapper refuses a model whose dense parameters are all frozen (LoRA)
        if dist_cfg.ddp_backend in LEGACY_BACKENDS or not trains_dense(model.parameters()):
            wrapped = LegacyDistributedDataParallel(model, process_group)
        else:  # of PYTORCH_BACKENDS; the trainer has refused all others
            wrapped = _pytorch_ddp(dist_cfg, model, process_group, device)
        super().__init__(wrapped)
        self._normalization = normalization

    def all_reduce_grads(self) -> None:
        """Reduce gradients once per update, after the last backward pass."""
        if isinstance(self.module, LegacyDistributedDataParallel):
            self.module.all_reduce_grads()
        model = self.module.module
        reduce_expert_grads(model.parameters(), model.moe_groups, self._normalization)


def trains_dense(params: Iterable[torch.nn.Parameter]) -> bool:
    """Return whether any trained parameter is not an expert's."""
    return any(param.requires_grad and not is_expert(param) for param in params)


def clip_experts_alone(optimizer: FairseqOptimizer) -> None:
    """Let an optimizer clip by the trainer's norm: without dense gradients fairseq takes zero."""
    inner: Any = optimizer
    for name in ("fp32_optimizer", "wrapped_optimizer"):  # of --fp16 and --bf16
        inner = getattr(inner, name, inner)

    def clip_grad_norm(max_norm, aggregate_norm_fn=None):
        grads = [param.grad for param in inner.params if param.grad is not None]
        norm = torch.zeros((), device=grads[0].device if grads else None)
        if aggregate_norm_fn is not None:
            norm = aggregate_norm_fn(norm)
        if max_norm > 0:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1)
            for grad in grads:
                grad.mul_(factor.to(grad.device))
        return norm

    inner.clip_grad_norm = clip_grad_norm


def _pytorch_ddp(dist_cfg, model, process_group, device):
    leave_experts_out(model)
    names = ("broadcast_buffers", "bucket_cap_mb", "find_unused_parameters")
    options = {name: getattr(dist_cfg, name) for name in (*names, "gradient_as_bucket_view")}
    if device.type == "cuda":  # DDP wants None on a CPU
        options |= {"device_ids": [dist_cfg.device_id], "output_device": dist_cfg.device_id}
    return DistributedDataParallel(model, process_group=process_group, **options)


def fit_to_slices(optimizer: FairseqOptimizer, name: str, groups: ExpertParallelGroups) -> None:
    """Make an optimizer step slices of experts as whole experts; ValueError if it cannot."""
    if groups.num_slices == 1:
        return
    inner = optimizer.optimizer
    if not _steps_each_weight(optimizer):
        raise ValueError(
            f"--optimizer {name} needs whole experts, and --moe-expert-placement sliced leaves "
            f"1/{groups.num_slices} of them: use --moe-expert-placement replicated, or adam or sgd"
        )
    if isinstance(inner, FusedAdamV1) and inner.use_fp16_stats:
        raise ValueError(
            "--fp16-adam-stats with apex's fused Adam has a scale per rank, which slices cannot "
            "have: drop it, or do without apex, which this package does not need"
        )
    halves = getattr(optimizer, "fp16_params", ())
    for half, copy in zip(halves, getattr(optimizer, "fp32_params", ()), strict=True):
        if is_expert(half):
            copy.copies = copies_of(half, groups)  # fairseq copies only the mark `expert`
    if isinstance(inner, Adam16):
        share_scales(inner, groups)


def _steps_each_weight(optimizer: FairseqOptimizer) -> bool:
    """Return whether an optimizer treats each weight separately; torch's Adagrad does."""
    return optimizer.supports_flat_params or isinstance(optimizer.optimizer, torch.optim.Adagrad)


def shard_states(optimizer: FairseqOptimizer, name: str) -> None:
    """Keep the state of each dense parameter on one rank (``--zero-sharding os``)."""
    if isinstance(optimizer.optimizer, CompositeOptimizer) or not _steps_each_weight(optimizer):
        raise ValueError(f"--zero-sharding os needs --optimizer adam, nag or sgd, not {name}")
    shard_optimizer(optimizer.optimizer)


def share_scales(optimizer: Adam16, groups: ExpertParallelGroups) -> None:
    """Give the fp16 statistics of slices the scales of the whole experts."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    cut = [p for p in params if is_expert(p) and copies_of(p, groups) < groups.num_replicas]
    optimizer.share_scales(cut, functools.partial(max_over_replicas_, groups=groups))
