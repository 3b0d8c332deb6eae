"""Parameter counts of the model itself, built on torch's meta device."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary

from ..distributed import ExpertParallelGroups, is_expert
from ..integrations.fairseq.models import TransformerLMGPTMoE
from ..moe.experts import StackedExperts
from .settings import Settings


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters."""

    embeddings: int  # of embeddings, final norm and output projection
    dense_layer: int  # of a layer with a dense FFN (the mean, where widths differ)
    dense: int  # of everything but the experts; every GPU holds all of it
    moe_layers: int  # number of MoE layers
    largest: int  # elements of the largest tensor on a GPU
    moe_layer: int = 0  # of an MoE layer without the experts that it routes to
    experts: int = 0  # E, per MoE layer, over all GPUs
    local_experts: int = 0  # e, per MoE layer and GPU
    expert: int = 0  # of one expert
    products: int = 0  # of ``expert``, the elements of its matrices
    unsliced: int = 0  # of ``expert``, what each GPU that shares it holds: the output's bias
    hidden: int = 0  # numbers that an expert keeps of a row: inputs and output of its activation
    slices: int = 1  # S, GPUs that share each expert; 1 where each holds it whole
    # placement of the experts, of rank 0; None in a dense model
    groups: ExpertParallelGroups | None = dataclasses.field(default=None, compare=False)

    @property
    def local(self) -> int:
        """Expert parameters on one GPU."""
        held = self.sliceable // self.slices + self.unsliced
        return held * self.local_experts * self.moe_layers

    @property
    def sliceable(self) -> int:
        """Numbers of an expert that belong to a hidden unit."""
        return self.expert - self.unsliced

    @property
    def per_gpu(self) -> int:
        """All parameters on one GPU."""
        return self.dense + self.local

    @property
    def total(self) -> int:
        """Distinct parameters of the model."""
        return self.dense + self.expert * self.experts * self.moe_layers


def moe_layer_numbers(settings: Settings) -> range:
    """Numbers, from 1, of the layers with experts."""
    if settings.routing is None:
        return range(0)
    every = settings.model.moe_freq
    return range(every, settings.model.decoder_layers + 1, every)


def dense_ffn_widths(settings: Settings) -> list[int]:
    """Hidden width of every dense FFN; a FLOP-matched model has wide ones in place of experts."""
    model = settings.model
    sparse = model.decoder_layers // model.moe_freq if model.moe_freq else 0
    wide = [] if settings.routing else [model.alternate_decoder_ffn_embed_dim] * sparse
    return wide + [model.decoder_ffn_embed_dim] * (model.decoder_layers - sparse)


def count_parameters(settings: Settings) -> Parameters:
    """Count the parameters of one rank's model, which is built on the meta device. Raises
    ValueError if the settings' r or placement is none of this number of GPUs and experts.
    """
    with torch.device("meta"):
        model = build_model(settings)
    sparse, groups = model.moe_layers, model.moe_groups
    layers, dense = [_count_dense(layer) for layer in model.decoder.layers], _count_dense(model)
    others = [own for i, own in enumerate(layers) if i not in sparse]
    counted = Parameters(
        embeddings=dense - sum(layers),
        dense_layer=sum(others) // max(len(others), 1),
        dense=dense,
        moe_layers=len(sparse),
        largest=max(param.numel() for param in model.parameters()),
    )
    if not sparse:
        return counted
    number, layer = next(iter(sparse.items()))
    return dataclasses.replace(
        counted,
        moe_layer=layers[number],
        experts=groups.num_experts,
        local_experts=groups.num_local_experts,
        slices=groups.num_slices,
        groups=groups,
        **expert_sizes(layer.experts),
    )


def expert_sizes(experts: StackedExperts) -> dict[str, int]:
    """Sizes of one whole expert, as its network states them."""
    dim, units = experts.model_dim, experts.hidden_dim
    numbers, flops = experts.count(dim, units, experts.options)
    whole = [each for each in experts.layout.values() if each.slice_dim is None]
    return {
        "expert": numbers,
        "unsliced": sum(len(each.names) * math.prod(each.shape(dim, units)) for each in whole),
        "products": flops // 2,
        # each matrix has as many hidden numbers of a row at one of its ends
        "hidden": flops // 2 // dim,
    }


def build_model(settings: Settings) -> TransformerLMGPTMoE:
    """The model of one rank of ``settings.gpus`` on torch's default device."""
    args = SimpleNamespace(**vars(settings.model))
    args.tokens_per_sample = settings.tokens_per_sample
    args.max_target_positions = None  # that of tokens_per_sample
    args.moe_simulate_world_size = settings.gpus if settings.gpus > 1 else 0
    dictionary = Dictionary()
    dictionary.symbols = [""] * settings.vocabulary  # of which their number counts
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    logger = logging.getLogger(TransformerLMGPTMoE.__module__.rpartition(".")[0])
    level = logger.level
    logger.setLevel(logging.ERROR)  # that a rank is simulated is no news here
    try:
        return TransformerLMGPTMoE.build_model(args, task)
    finally:
        logger.setLevel(level)


def _count_dense(module: torch.nn.Module) -> int:
    return sum(param.numel() for param in module.parameters() if not is_expert(param))
