"""Everything but experts spread over the ranks: torch's FSDP2 for a model with experts.

    model = training.shard_dense(Model())               after init_process_group
    optimizer = torch.optim.AdamW(model.parameters())   afterwards: it steps this rank's parts

Weights, gradients and optimizer state of dense parameters are 1/W each; a block is gathered while
it computes. Experts stay where they are, whole or in slices, and their gradients follow the rule of
the others: that of the mean of the ranks' losses, while each is accumulated, too
(``model.set_requires_gradient_sync(False)`` for all but the last backward pass of a step).
``clip_grad_norm_`` has one norm over both, ``save_checkpoint`` and ``full_state_dict`` whole
tensors; ``load_checkpoint`` takes a set of any number of ranks, sharded or not.

Against ``shard_optimizer``, which spreads optimizer state alone: less memory, and two gathers of
every block in a step instead of one broadcast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from ..distributed import broadcast_from_owners_, is_sharded, process_world, shard_modules
from ..moe import MoELayer
from .data_parallel import expert_parameters, prepare_data_parallel


def shard_dense(
    model: nn.Module, blocks: Iterable[nn.Module] | None = None, *, mesh=None, **options
) -> nn.Module:
    """Shard all of a model but its experts. Collective; in one process it changes nothing.

    Dense parameters and buffers become those of rank 0 first, as DistributedDataParallel does it.
    Activation checkpointing inside of it is the non-reentrant one.

    Args:
        model: with :class:`~fairseq_tutel.moe.MoELayer` s, on its device; not wrapped.
        blocks: modules of the model that are gathered one at a time, the inner ones first; by
            default the elements of its outermost ModuleLists. What is in none is gathered with the
            model.
        mesh: a DeviceMesh of all ranks; made if None.
        options: of ``fully_shard``: ``mp_policy``, ``reshard_after_forward``, ``offload_policy``.

    Returns:
        The model, whose dense parameters are DTensors now.

    Raises:
        ValueError: a block is not in the model, the model is sharded already, or see
            :func:`~.data_parallel.prepare_data_parallel`.
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
    _take_from_first(model, experts)
    shard_modules(
        [*(block for block in blocks if block is not model), model], experts, mesh, **options
    )
    return model


def _blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        elif not isinstance(child, MoELayer):
            yield from _blocks_of(child)


def _take_from_first(model: nn.Module, experts: set[nn.Parameter]) -> None:
    own = {
        buffer for m in model.modules() if isinstance(m, MoELayer) for buffer in m.experts.buffers()
    }
    shared = [p.data for p in model.parameters() if p not in experts]
    shared += [buffer for buffer in model.buffers() if buffer not in own]
    broadcast_from_owners_({0: [each for each in shared if not each.is_meta]})
