"""torch's FSDP2 (``fully_shard``) for models with experts: dense parameters are sharded.

A block is gathered while it computes. Experts stay on their ranks, whole or in slices. All
gradients are those of the mean of the ranks' losses, also with gradient accumulation
(``model.set_requires_gradient_sync(False)`` for all but the last backward pass of a step).
"""

from collections.abc import Iterable, Iterator

from torch import nn

from ..distributed import broadcast_from_owners_, is_sharded, process_world, shard_modules
from ..moe import MoELayer
from .data_parallel import expert_parameters, prepare_data_parallel


def shard_dense(
    model: nn.Module, blocks: Iterable[nn.Module] | None = None, *, mesh=None, **options
) -> nn.Module:
    """Shard the dense parameters of a model over the ranks (FSDP2). Collective.

    Make the optimizer afterwards: it steps this rank's shards. Dense parameters and buffers are
    broadcast from rank 0 first. In one process the model stays as it is. Needs torch 2.6, and
    activation checkpointing with ``use_reentrant=False``.

    >>> import torch
    >>> from fairseq_tutel.moe import MoELayer
    >>> blocks = torch.nn.ModuleList(MoELayer(8, num_experts=4) for _ in range(2))
    >>> model = shard_dense(torch.nn.Sequential(torch.nn.Linear(8, 8), *blocks))
    >>> optimizer = torch.optim.AdamW(model.parameters())

    Args:
        model (nn.Module): the model on its device, not wrapped, with or without MoE layers.
        blocks (iterable of nn.Module): modules that are gathered one at a time, inner ones first
            (default: the elements of the outermost ModuleLists). The rest is gathered together.
        mesh (DeviceMesh): mesh of all ranks (default: made here).
        **options: arguments of ``fully_shard``: ``mp_policy``, ``reshard_after_forward``,
            ``offload_policy`` (default: torch's).

    Returns:
        nn.Module: the model; its dense parameters are DTensors.
    """
    blocks = list(_blocks_of(model) if blocks is None else blocks)
    inside = set(model.modules())
    for block in blocks:
        if block not in inside:
            raise ValueError(f"blocks: a {type(block).__name__} is not a module of the model")
    if any(is_sharded(param) for param in model.parameters()):
        raise ValueError("the model is sharded already: shard_dense is called once, on a plain one")
    prepare_data_parallel(model)
    if process_world()[1] == 1:
        return model
    experts = set(expert_parameters(model))
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    of_experts = {buffer for layer in layers for buffer in layer.experts.buffers()}
    dense = [p.data for p in model.parameters() if p not in experts]
    dense += [buffer for buffer in model.buffers() if buffer not in of_experts]
    broadcast_from_owners_({0: [each for each in dense if not each.is_meta]})
    shard_modules(
        [*(block for block in blocks if block is not model), model], experts, mesh, **options
    )
    return model


def _blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of the outermost ModuleLists."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        elif not isinstance(child, MoELayer):
            yield from _blocks_of(child)
