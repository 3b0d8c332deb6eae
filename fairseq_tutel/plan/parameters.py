"""Parameter counts of the model itself, built on torch's meta device."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from ..distributed import is_expert
from ..models import TransformerLMGPTMoE
from .settings import Settings


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters.

    Attributes:
        embeddings: of embeddings, final norm and output projection.
        dense_layer: of a layer with a dense FFN (the mean, where widths differ).
        moe_layer: of an MoE layer without the experts that it routes to: attention, norms, gate,
            shared expert.
        dense: of everything but the experts; every GPU holds all of it.
        expert: of one expert.
        experts: E, per MoE layer, over all GPUs.
        local_experts: e, per MoE layer and GPU.
        slices: S, GPUs that share each expert; 1 where each holds it whole.
        unsliced: of ``expert``, what each of them holds: the output's bias.
        moe_layers: number of MoE layers.
        largest: elements of the largest tensor on a GPU.
    """

    embeddings: int
    dense_layer: int
    moe_layer: int
    dense: int
    expert: int
    experts: int
    local_experts: int
    moe_layers: int
    largest: int
    slices: int = 1
    unsliced: int = 0

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
    return range(
        settings.model.moe_freq, settings.model.decoder_layers + 1, settings.model.moe_freq
    )


def count_parameters(settings: Settings) -> Parameters:
    """Count the parameters of one rank's model, which is built on the meta device.

    Raises:
        ValueError: the settings' r or placement is none of this number of GPUs and experts.
    """
    with torch.device("meta"):
        model = build_model(settings)
    sparse = model.moe_layers
    layers = [_count(layer.parameters()) for layer in model.decoder.layers]
    dense, local = _count(model.parameters())
    moe = [layers[i][0] for i in sparse]
    others = [own for i, (own, _) in enumerate(layers) if i not in sparse]
    groups = model.moe_groups
    local_experts = groups.num_local_experts if groups else 0
    slices, unsliced = groups.num_slices if groups else 1, settings.model.decoder_embed_dim
    held = local // (local_experts * len(sparse)) if sparse else unsliced
    return Parameters(
        embeddings=dense - sum(own for own, _ in layers),
        dense_layer=sum(others) // max(len(others), 1),
        moe_layer=moe[0] if moe else 0,
        dense=dense,
        expert=(held - unsliced) * slices + unsliced if sparse else 0,
        experts=groups.num_experts if groups else 0,
        local_experts=local_experts,
        moe_layers=len(sparse),
        largest=max(param.numel() for param in model.parameters()),
        slices=slices,
        unsliced=unsliced if sparse else 0,
    )


def possible_flows(settings: Settings) -> list[int]:
    """Every r of the settings' placement, the least change first."""
    slices = 1
    if settings.placement == "sliced":
        slices = settings.gpus // settings.exchange_peers
    return [r for r in range(1, slices + 1) if slices % r == 0] + [0]


def build_model(settings: Settings) -> TransformerLMGPTMoE:
    """The model of one rank of ``settings.gpus`` on torch's default device."""
    args = SimpleNamespace(**vars(settings.model))
    args.tokens_per_sample = settings.tokens_per_sample
    args.max_target_positions = None  # that of tokens_per_sample
    args.moe_simulate_world_size = settings.gpus if settings.gpus > 1 else 0
    task = SimpleNamespace(
        source_dictionary=_Dictionary(settings.vocabulary),
        target_dictionary=_Dictionary(settings.vocabulary),
    )
    logger = logging.getLogger(TransformerLMGPTMoE.__module__)
    level = logger.level
    logger.setLevel(logging.ERROR)  # that a rank is simulated is no news here
    try:
        return TransformerLMGPTMoE.build_model(args, task)
    finally:
        logger.setLevel(level)


class _Dictionary:
    """As much of fairseq's as a model asks for."""

    def __init__(self, size: int):
        self._size = size

    def __len__(self) -> int:
        return self._size

    def pad(self) -> int:
        return 1


def _count(params: Iterable[torch.nn.Parameter]) -> tuple[int, int]:
    """(dense, expert) numbers of distinct parameters."""
    sizes = {id(param): (param.numel(), is_expert(param)) for param in params}.values()
    local = sum(size for size, expert in sizes if expert)
    return sum(size for size, _ in sizes) - local, local


def dense_ffn_widths(settings: Settings) -> list[int]:
    """Hidden width of every dense FFN; a FLOP-matched model has wide ones in place of experts."""
    model = settings.model
    if model.moe_freq and settings.routing is None:
        wide = model.decoder_layers // model.moe_freq
        narrow = model.decoder_layers - wide
        return [model.alternate_decoder_ffn_embed_dim] * wide + [
            model.decoder_ffn_embed_dim
        ] * narrow
    count = model.decoder_layers - len(moe_layer_numbers(settings))
    return [model.decoder_ffn_embed_dim] * count
