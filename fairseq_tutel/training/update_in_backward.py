"""Update experts inside the backward pass, so that their gradients never exist all at once."""

from __future__ import annotations

import functools

import torch
from torch import nn

from ..distributed import ExpertParallelGroups, sum_tensor_over_ranks_
from ..moe.model import moe_layers
from .gradients import reduce_expert_grads, sq_norm_of_copies

_MARK = "updates_in_backward"  # attribute of a parameter; other files ask for it


def update_in_backward(
    model: nn.Module, optimizer: torch.optim.Optimizer, reduce: str | None = None
) -> BackwardUpdates:
    """Update each expert tensor as soon as its gradient is complete, and free the gradient.

    ``optimizer.step()`` then steps the other parameters. Weights are those of usual steps if the
    optimizer steps each tensor by itself, as SGD and Adam do.

    >>> from fairseq_tutel.moe import MoELayer
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), MoELayer(8, num_experts=4))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> updates = update_in_backward(model, optimizer)
    >>> model(torch.randn(16, 8)).square().mean().backward()
    >>> model[1].experts.fc1_weight.grad is None
    True
    >>> optimizer.step()  # the other parameters

    Make one backward pass per step, without a GradScaler, and do not clip:
    :func:`~.gradients.clip_grad_norm_` refuses it.

    Args:
        model (nn.Module): the model on its device, wrapped or not. On several ranks,
            :func:`~.data_parallel.wrap_data_parallel` or ``prepare_data_parallel`` had it before.
        optimizer (torch.optim.Optimizer): the optimizer of the experts, and of any others.
        reduce (str): None (default): gradients arrive averaged, as after ``prepare_data_parallel``.
            Otherwise the normalisation of :func:`~.gradients.reduce_expert_grads`, which is applied
            to each gradient.

    Returns:
        BackwardUpdates: call ``remove()`` to go back to usual steps.

    Raises:
        ValueError: the optimizer lacks an expert's tensor, or shares its state among ranks
            (``shard_optimizer``); or ranks would not average gradients.
        RuntimeError: in a second backward pass before ``optimizer.step()``.
    """
    return BackwardUpdates(model, optimizer, reduce)


class BackwardUpdates:
    """Hooks that update a model's experts; :func:`update_in_backward` makes one.

    Attributes:
        factor: multiplies each gradient before its update (default 1.0), such as ranks / tokens.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, reduce: str | None):
        self.factor: float | torch.Tensor = 1.0
        self._optimizer, self._reduce = optimizer, reduce
        if getattr(optimizer, "optimizer_shards", None) is not None:
            raise ValueError(
                "update_in_backward steps tensors, shard_optimizer shares the steps: use only one"
            )
        self._group_of = {
            param: i for i, group in enumerate(optimizer.param_groups) for param in group["params"]
        }
        self._updated: set[nn.Parameter] = set()
        self._is_inside = False
        self._sq_norm: torch.Tensor | None = None
        layers = moe_layers(model).values()
        self._num_replicas = max((layer.groups.num_replicas for layer in layers), default=1)
        found = [
            (name, param, layer.groups)
            for layer in layers
            for name, param in layer.experts.named_parameters()
            if param.requires_grad
        ]
        for each in found:
            self._check(*each)
        self._params = [param for _, param, _ in found]
        self._handles = [optimizer.register_step_post_hook(self._after_step)]
        for _, param, groups in found:
            vars(param)[_MARK] = True
            hook = functools.partial(self._update, groups=groups)
            self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def _check(self, name: str, param: nn.Parameter, groups: ExpertParallelGroups) -> None:
        if param not in self._group_of:
            raise ValueError(f"the optimizer does not have the experts' {name}")
        alone = groups.world_size == 1 or groups.simulated
        if self._reduce is None and not (alone or getattr(param, "averages_grad", False)):
            raise ValueError(
                f"the experts' {name} is not averaged over {groups.world_size} ranks: call "
                "prepare_data_parallel(model) before, or give reduce="
            )

    @torch.no_grad()
    def _update(self, param: nn.Parameter, groups: ExpertParallelGroups) -> None:
        if param in self._updated:
            raise RuntimeError(
                "a second backward pass before optimizer.step(), which update_in_backward excludes"
            )
        self._updated.add(param)
        if self._reduce is not None:
            reduce_expert_grads([param], groups, self._reduce)
        sq_norm = sq_norm_of_copies([param], groups, param.device)
        self._sq_norm = sq_norm if self._sq_norm is None else self._sq_norm + sq_norm
        assert param.grad is not None  # the hook runs after it is there
        param.grad.mul_(self.factor)
        all_groups = self._optimizer.param_groups
        group = {**all_groups[self._group_of[param]], "params": [param]}
        self._optimizer.param_groups, self._is_inside = [group], True
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups, self._is_inside = all_groups, False
        param.grad = None

    def _after_step(self, optimizer, args, kwargs) -> None:
        if not self._is_inside:  # the host's own step
            self._updated.clear()

    def take_sq_norm(self) -> torch.Tensor:
        """Return the squared L2 norm of the gradients since the last call, before the factor.

        Collective. It counts the experts of all ranks, replicas once; fp32 scalar.
        """
        total = torch.zeros((), dtype=torch.float64) if self._sq_norm is None else self._sq_norm
        self._sq_norm = None
        return (sum_tensor_over_ranks_(total) / self._num_replicas).float()

    def remove(self) -> None:
        """Leave the experts to ``optimizer.step()`` again."""
        for handle in self._handles:
            handle.remove()
        for param in self._params:
            vars(param).pop(_MARK, None)
