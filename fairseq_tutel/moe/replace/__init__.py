"""Turn feed-forward blocks of a model into MoE layers.

    places.py     find the blocks, and put the layers in
    probes.py     run a copy of a block: its width, and whether it treats tokens one by one
    recognize.py  find the built-in network that computes what a block does

A block is known by what it computes, not by its class. Random weights are drawn into a copy, the
copy is run in evaluation and in training, and its outputs and gradients are compared with those of
the built-in experts. So are the block's outputs by its own weights. If no built-in network gives
the same numbers, every expert is a copy of the block, and the copies run one after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...config import ExpertConfig
from ...distributed import ExpertParallelGroups, build_groups, experts_of_ffn
from ..experts import StackedExperts
from ..layer import MoELayer
from .places import Match, Place, layers_with_ffn, matching, parts_of_ffn, place_of
from .probes import check_block, check_copies, check_tokens, fit_width, make_probe
from .recognize import Network, recognize

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..typed_options import BlockOptions

_EXPERTS = ("experts", "expert_fn")
# Arguments of MoELayer that the block decides unless the caller gives them.
_NETWORK = ("hidden_dim", "activation", "expert_network", "expert_options", *_EXPERTS)


def replace_ffn(
    model: nn.Module,
    match: Match,
    num_experts: int,
    *,
    copy_weights: bool = False,
    groups: ExpertParallelGroups | None = None,
    seed: int | None = None,
    **moe: Unpack[BlockOptions],
) -> dict[str, nn.Module]:
    """Replace feed-forward blocks of a model by MoE layers, in place.

    Call it before you build the optimizer and before you wrap the model for data parallelism. If
    one block is refused, the model stays as it was. ``moe/README.md`` has an example.

    A block is a module that maps each token to one of the same width, [..., M] -> [..., M]. It may
    also be a whole layer of torch's or fairseq's transformer, or one of transformers with two
    modules, such as BERT's: then ``linear1`` (``fc1``, ``intermediate``) becomes the MoE layer,
    and activation, dropout and ``linear2`` (``fc2``, ``output.dense``) become identities. The MoE
    layer takes the block's dtype, device, training mode and dropout. ``nn.TransformerEncoder`` no
    longer uses nested tensors: its output at padding is no longer zero in evaluation.

    Args:
        model (nn.Module): the model that holds the blocks.
        match (str or function or list of str): which blocks: a regular expression that is searched
            in dotted names, a function of (name, module), or names; of nested ones the outermost.
        num_experts (int): E, the experts of a layer over all ranks.
        copy_weights (bool): start every expert as the block, and keep ``requires_grad`` (default
            False: draw new weights, all trained). The first output of the model is unchanged if
            ``top_k`` > 1, no pair is dropped (``capacity_factor=0``), and no null experts, shared
            expert, ``route_scale`` or ``unnormalized_weights`` are asked for; with ``top_k=1`` it
            is weighted by the gate's probability. Biases that the block lacks stay zero. All ranks
            need the same weights.
        groups (ExpertParallelGroups): placement of the experts (default: all ranks; collective).
        seed (int): seed of new weights (default: drawn from torch's generator).
        **moe: further arguments of :class:`MoELayer`, such as ``top_k`` and ``capacity_factor``
            (default: MoELayer's). ``hidden_dim``, ``activation``, ``expert_network``,
            ``expert_options`` (default: the block's), ``experts`` and ``expert_fn`` make the
            experts another network; they are refused with ``copy_weights``. So are ``dropout`` and
            ``activation_dropout`` (default: the block's) for experts that are copies.

    Returns:
        dict: name of each MoE layer -> the module that was there.

    Raises:
        ValueError: nothing matches, or a block cannot be replaced. The message names the block: it
            mixes tokens, changes the width or (in place) its input, has convolutions, hooks, tied
            weights, weights of several dtypes, on several devices, quantized or on the meta device.
    """
    given = [name for name in _NETWORK if name in moe]
    if copy_weights and given:
        raise ValueError(f"copy_weights takes the block as it is: leave out {', '.join(given)}")
    with torch.inference_mode(False):  # or the new parameters could not be trained
        places = [place_of(model, name, block) for name, block in matching(model, match)]
        groups = build_groups(num_experts) if groups is None else groups
        common = {"num_experts": num_experts, "groups": groups, "seed": seed}
        layers = [_make_layer(place, copy_weights, common, dict(moe)) for place in places]
    for place, layer in zip(places, layers, strict=True):
        place.put(model, layer)
    return {place.name: place.block for place in places}


def every_other(model: nn.Module, match: Match, start: int = 1) -> list[str]:
    """Return the names of every second matching block, for ``match`` of :func:`replace_ffn`.

    Args:
        model (nn.Module): the model that holds the blocks.
        match (str or function or list of str): as in :func:`replace_ffn`.
        start (int): index of the first name (default 1, as in GShard and SwinV2-MoE).
    """
    return [name for name, _ in matching(model, match)][start::2]


def _make_layer(
    place: Place, copy_weights: bool, common: dict[str, Any], moe: dict[str, Any]
) -> MoELayer:
    """Return the MoE layer that replaces a block."""
    block, name = place.block, place.name
    check_block(name, block)
    probe = make_probe(name, block)
    x = fit_width(name, probe)
    place.check_parts(x)
    network = recognize(block, probe, x)
    if network is None:
        check_tokens(name, probe, x)
    if network is None and not any(each in moe for each in _NETWORK):
        if unused := [each for each in ("dropout", "activation_dropout") if each in moe]:
            raise ValueError(
                f"{name}: leave out {' and '.join(unused)}: no built-in experts compute what "
                f"{type(block).__name__} does, and copies of it have its own dropout"
            )
        check_copies(name, probe, x)
        layer = MoELayer(x.shape[-1], expert_fn=_copier(block, copy_weights), **common, **moe)
    else:
        options = network.options if network else {}
        if any(each in moe for each in _EXPERTS):
            options = {}
            if network and isinstance(moe.get("experts"), ExpertConfig):
                options = {"hidden_dim": network.options["hidden_dim"]}
        layer = MoELayer(x.shape[-1], **common, **{**options, **moe})
    if network is not None and copy_weights:
        _load(layer, network)
    first = next(block.parameters())
    return layer.to(first.device, first.dtype).train(block.training)


def _load(layer: MoELayer, network: Network) -> None:
    """Start every expert as the block, with the block's ``requires_grad``."""
    slots, bank = range(layer.groups.num_local_experts), layer.experts
    bank.load_state_dict(experts_of_ffn(network.tensors, slots))
    if not isinstance(bank, StackedExperts):
        return  # held for evaluation only
    for name, stacked in bank.layout.items():
        trained = any(single in network.trained for single in stacked.names)
        getattr(bank, name).requires_grad_(trained)


def _copier(block: nn.Module, copy_weights: bool) -> Callable[[], nn.Module]:
    """Return a function that copies the block, or draws its tensors by their mean and deviation."""

    @torch.no_grad()
    def make() -> nn.Module:
        expert = copy.deepcopy(block)
        for param in () if copy_weights else expert.parameters():
            param.requires_grad_()
            if param.numel() > 1 and (deviation := float(param.float().std())) > 0:
                param.normal_(float(param.float().mean()), deviation)
        return expert

    return make
