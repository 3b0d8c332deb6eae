"""Data parallelism around a model with experts: dense gradients are reduced, experts' are not.

Both of fairseq's wrappers are used as they are. ``legacy_ddp`` skips parameters marked as experts
by itself; ``pytorch_ddp`` gets them as parameters to ignore, in the initial broadcast too. After
either has reduced the dense gradients, expert gradients follow one rule
(:mod:`fairseq_tutel.hosts`).
"""

from __future__ import annotations

import torch
from fairseq.distributed import LegacyDistributedDataParallel, ModuleProxyWrapper
from torch.nn.parallel import DistributedDataParallel

from .. import leave_experts_out, reduce_expert_grads

LEGACY_BACKENDS = ("legacy_ddp", "no_c10d")
PYTORCH_BACKENDS = ("pytorch_ddp", "c10d")


class MoEDistributedModel(ModuleProxyWrapper):
    """Wrap a model for training on several ranks.

    Args:
        dist_cfg: fairseq's ``distributed_training`` config.
        model: has ``moe_groups``.
        process_group: of all data-parallel ranks.
        device: where the model goes.
        normalization: ``--moe-normalize-expert-grad``.
    """

    def __init__(self, dist_cfg, model, process_group, device: torch.device, normalization: str):
        model = model.to(device)
        if dist_cfg.ddp_backend in LEGACY_BACKENDS:
            wrapped = LegacyDistributedDataParallel(model, process_group)
        else:  # of PYTORCH_BACKENDS; the trainer has refused all others
            wrapped = _pytorch_ddp(dist_cfg, model, process_group, device)
        super().__init__(wrapped)
        self._normalization = normalization

    def all_reduce_grads(self) -> None:
        """Called by fairseq's trainer once per update, after the last backward pass."""
        if isinstance(self.module, LegacyDistributedDataParallel):
            self.module.all_reduce_grads()
        model = self.module.module
        reduce_expert_grads(model.parameters(), model.moe_groups, self._normalization)


def _pytorch_ddp(dist_cfg, model, process_group, device):
    on_gpu = device.type == "cuda"
    leave_experts_out(model)
    return DistributedDataParallel(
        model,
        device_ids=[dist_cfg.device_id] if on_gpu else None,  # DDP wants None on a CPU
        output_device=dist_cfg.device_id if on_gpu else None,
        broadcast_buffers=dist_cfg.broadcast_buffers,
        bucket_cap_mb=dist_cfg.bucket_cap_mb,
        process_group=process_group,
        find_unused_parameters=dist_cfg.find_unused_parameters,
        gradient_as_bucket_view=dist_cfg.gradient_as_bucket_view,
    )
