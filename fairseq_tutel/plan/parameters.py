"""Parameter counts of the model itself, built on torch's meta device."""

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY, BaseFairseqModel

from ..distributed import ExpertParallelGroups, is_expert, share_out
from ..integrations.fairseq.models.any_architecture import stack_of
from ..integrations.fairseq.models.transformer_stacks import MoEStack
from ..moe import MoELayer
from ..moe.experts import StackedExperts
from ..moe.model import moe_layers
from .settings import Settings, is_encoder_decoder

# layers, and the MoE layers of some of them by number
_Stack = tuple[list[torch.nn.Module], dict[int, list[MoELayer]]]


@dataclass(frozen=True)
class StackParameters:
    """Parameter counts of one stack of layers."""

    dense_layer: int  # in a layer with a dense FFN (the mean if widths differ)
    moe_layers: int = 0  # number of MoE layers
    moe_layer: int = 0  # in an MoE layer, without the routed experts
    local: int = 0  # in the experts of an MoE layer on one GPU
    expert: int = 0  # in one expert
    products: int = 0  # in the matrices of one expert
    unsliced: int = 0  # in one expert, on each GPU that shares the expert: the output's bias
    hidden: int = 0  # numbers that an expert keeps per row: inputs and output of its activation

    @property
    def sliceable(self) -> int:
        """Numbers of an expert that belong to a hidden unit."""
        return self.expert - self.unsliced


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of the model."""

    embeddings: int  # in embeddings, final norms and output projection
    dense: int  # in everything but the experts, on every GPU
    largest: int  # elements of the largest tensor on a GPU
    # dense parameters with statistics on the GPU that has most of them, with --zero-sharding
    owned: int = field(compare=False)
    stacks: tuple[StackParameters, ...]  # in the order of Settings.stacks
    experts: int = 0  # E, per MoE layer, over all GPUs
    local_experts: int = 0  # e, per MoE layer and GPU
    slices: int = 1  # S, GPUs that share each expert; 1 if experts are whole
    # placement of rank 0's experts; None in a dense model
    groups: ExpertParallelGroups | None = field(default=None, compare=False)

    @property
    def moe_layers(self) -> int:
        """Number of MoE layers."""
        return sum(stack.moe_layers for stack in self.stacks)

    @property
    def local(self) -> int:
        """Expert parameters on one GPU."""
        return sum(stack.local * stack.moe_layers for stack in self.stacks)

    @property
    def per_gpu(self) -> int:
        """All parameters on one GPU."""
        return self.dense + self.local

    @property
    def total(self) -> int:
        """Distinct parameters of the model."""
        each = sum(stack.expert * stack.moe_layers for stack in self.stacks)
        return self.dense + self.experts * each


def count_parameters(settings: Settings) -> Parameters:
    """Count the parameters of one rank's model, built on the meta device.

    Raises:
        ValueError: r or the placement does not fit the number of GPUs and experts.
    """
    with torch.device("meta"):
        model = build_model(settings)
    sides = [getattr(model, stack.side) for stack in settings.stacks]
    found = [(list(side.layers), {n: [each] for n, each in side.moe_layers.items()})
             for side in sides]  # fmt: skip
    return _count(model, settings.gpus, found)


def count_model(model: torch.nn.Module, gpus: int) -> Parameters:
    """Count the parameters of a model of any architecture, by the stacks that have MoE layers."""
    found: dict[str, dict[int, list[MoELayer]]] = {}
    for name, layer in moe_layers(model).items():
        stack, number = stack_of(name)
        found.setdefault(stack, {}).setdefault(number, []).append(layer)
    modules = [model.get_submodule(stack) for stack in found]
    layers = [list(each) if isinstance(each, torch.nn.ModuleList) else [each] for each in modules]
    return _count(model, gpus, list(zip(layers, found.values(), strict=True)))


def _count(model: torch.nn.Module, gpus: int, stacks: list[_Stack]) -> Parameters:
    groups = getattr(model, "moe_groups", None)
    dense = _count_dense(model)
    layers = sum(_count_dense(layer) for each, _ in stacks for layer in each)
    counted = Parameters(
        embeddings=dense - layers,
        dense=dense,
        largest=max(param.numel() for param in model.parameters()),
        owned=_most_owned(model, gpus),
        stacks=tuple(_count_stack(*each, groups) for each in stacks),
    )
    if groups is None:
        return counted
    return replace(
        counted,
        experts=groups.num_experts,
        local_experts=groups.num_local_experts,
        slices=groups.num_slices,
        groups=groups,
    )


def _most_owned(model: torch.nn.Module, gpus: int) -> int:
    sizes = [param.numel() for param in model.parameters() if not is_expert(param)]
    loads = [0] * gpus
    for size, owner in zip(sizes, share_out(sizes, gpus), strict=True):
        loads[owner] += size
    return max(loads)


def _count_stack(
    stack: list[torch.nn.Module],
    sparse: dict[int, list[MoELayer]],
    groups: ExpertParallelGroups | None,
) -> StackParameters:
    layers = [_count_dense(layer) for layer in stack]
    others = [own for i, own in enumerate(layers) if i not in sparse]
    counted = StackParameters(dense_layer=sum(others) // max(len(others), 1))
    if not sparse:
        return counted
    number, (layer, *_) = next(iter(sparse.items()))
    sizes = expert_sizes(layer.experts)
    moe = {"moe_layers": sum(map(len, sparse.values())), "moe_layer": layers[number]}
    counted = replace(counted, **moe, **sizes)
    held = counted.sliceable // groups.num_slices + counted.unsliced
    return replace(counted, local=held * groups.num_local_experts)


def expert_sizes(experts: StackedExperts) -> dict[str, int]:
    """Return the sizes of one whole expert, as its network states them."""
    dim, units = experts.model_dim, experts.hidden_dim
    numbers, flops = experts.count(dim, units, experts.options)
    whole = [each for each in experts.layout.values() if each.slice_dim is None]
    return {
        "expert": numbers,
        "unsliced": sum(len(each.names) * math.prod(each.shape(dim, units)) for each in whole),
        "products": flops // 2,
        "hidden": experts.kept_per_row(dim),
    }


def build_model(settings: Settings) -> BaseFairseqModel:
    """Build the model of one rank of ``settings.gpus`` on torch's default device."""
    args = SimpleNamespace(**vars(settings.model))
    if not is_encoder_decoder(args):
        args.tokens_per_sample = settings.tokens_per_sample
        args.max_target_positions = None  # the model then uses tokens_per_sample
    args.moe_benchmark, args.moe_simulate_world_size = None, 0
    if settings.gpus > 1:
        args.moe_benchmark = f"simulate_world_size={settings.gpus}"
    dictionary = Dictionary()
    dictionary.symbols = [""] * settings.vocabulary  # only the number of symbols matters
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    model = ARCH_MODEL_REGISTRY[args._name]
    with without_messages():
        return model.build_model(args, task)


@contextlib.contextmanager
def without_messages() -> Iterator[None]:
    """Build models inside the block without messages, such as those about simulated ranks."""
    logger = logging.getLogger(MoEStack.__module__.rpartition(".")[0])
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _count_dense(module: torch.nn.Module) -> int:
    return sum(param.numel() for param in module.parameters() if not is_expert(param))
