"""What the MoE layers of a fairseq model have in common: options, placement, tuner, agreement,
reports."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq import hub_utils

from .... import ops
from ....config import EXPERTS, MoEConfig
from ....distributed import (
    ExpertParallelGroups,
    StepAgreement,
    build_groups,
    process_world,
    sync_stacks,
)
from ....moe import MoEAux, MoELayer, balance_over_ranks, routing_counts
from ....tuning import ExchangeTuner
from ..options.options import exchange_config, expert_storage, moe_config, tuned_fields
from .shared_decoding import decode_together

logger = logging.getLogger(__name__)


class Experts(NamedTuple):
    """Where the experts of a model are, and how tokens choose them."""

    groups: ExpertParallelGroups
    routing: MoEConfig


def place_experts(args: Any) -> Experts:
    """From a model's options; a collective call where torch.distributed is initialised. Raises
    ValueError for a number of experts that does not fit that of ranks, or impossible options.
    """
    world_size = max(process_world()[1], args.moe_simulate_world_size)
    num_experts = args.moe_expert_count or world_size
    if num_experts == 1 and not args.moe_expert_count:
        logger.warning(
            "1 expert per MoE layer (by default as many as ranks): equivalent to a dense model; "
            "--moe-expert-count states their number"
        )
    routing = moe_config(args, num_experts)
    groups = build_groups(
        num_experts,
        expert_parallel_size=args.moe_expert_parallel_size,
        simulate_world_size=args.moe_simulate_world_size,
        placement=str(args.moe_expert_placement),
    )
    if groups.simulated:
        logger.warning(
            "SIMULATION: this process is one rank of %d; all-to-alls are local copies and the "
            "losses mean nothing",
            groups.world_size,
        )
    ops.set_backend(str(args.moe_backend))
    return Experts(groups, routing)


def build_moe_layer(args: Any, cfg: Any, side: Any, experts: Experts, index: int) -> MoELayer:
    """Build the MoE layer of number ``index``, counted from 0 over all stacks of a model.

    ``args`` are the model's options, ``cfg`` is fairseq's TransformerConfig of them, and ``side``
    its part about the encoder or the decoder.
    """
    network = str(args.moe_expert_network)
    # of gated experts the activation of the model's other layers says nothing
    reads = EXPERTS.get(network).uses_activation or args.moe_shared_expert_ffn_dim
    return MoELayer(
        side.embed_dim,
        hidden_dim=args.moe_expert_ffn_dim or side.ffn_embed_dim,
        config=experts.routing,
        activation=str(cfg.activation_fn) if reads else "gelu",
        expert_network=network,
        expert_options=EXPERTS.options_of_flags(network, args),
        groups=experts.groups,
        shared_expert_dim=args.moe_shared_expert_ffn_dim,
        dropout=cfg.dropout,
        activation_dropout=cfg.activation_dropout or cfg.relu_dropout or 0.0,
        expert_storage=expert_storage(args),
        exchange=exchange_config(args),
        record_exchange_time=args.record_a2a_perf_stats,
        skip_exchange=args.dummy_a2a,
        layer_index=index,
    )


def make_tuner(args: Any, layers: Sequence[MoELayer]) -> ExchangeTuner | None:
    """The tuner of a model's layers, None where nothing is to be chosen. Collective. Raises
    ValueError where the file of ``--moe-tune-file`` cannot be read, or is not for this run.
    """
    fields, path = tuned_fields(args), args.moe_tune_file
    if not fields or not layers or (path is None and not layers[0].groups.needs_sync):
        return None
    how = {"steps": args.moe_tune_steps, "max_loss": args.moe_tune_max_loss}
    if path is None:
        return ExchangeTuner(layers, fields, **how)
    try:
        pinned = Path(path).read_text(encoding="utf-8")
        return ExchangeTuner(layers, fields, **how, pinned=pinned)
    except (OSError, ValueError) as error:
        raise ValueError(f"--moe-tune-file {path!r}: {error}") from None


def agree(
    stacks: Sequence[Sequence[MoELayer]],
    counts: Sequence[int],
    dtype: torch.dtype,
    tuner: ExchangeTuner | None,
    generating: bool,
) -> list[StepAgreement]:
    """Exchange token counts with the other ranks, once per forward pass for all layers.

    ``stacks``: MoE layers of each stack (a language model has one, an encoder-decoder two), of
    which ``counts`` has the tokens; ``tuner`` chooses the exchange in training; ``generating``:
    whether the pass computes one more token of each sentence, or only the encoder, which is a
    ValueError with experts that are spread over ranks.
    """
    sparse = [i for i, layers in enumerate(stacks) if layers]
    steps = list(map(StepAgreement, counts))
    if not sparse or not (groups := stacks[sparse[0]][0].groups).needs_sync:
        return steps
    if generating:
        raise ValueError(
            "the experts of this model are spread over "
            f"{groups.ep_size * groups.num_slices} ranks, which generate together by "
            "fairseq-generate or by generate() and sample() of from_pretrained, from language "
            "models; all else starts without torch.distributed (--distributed-world-size 1), and "
            "each process then loads all experts"
        )
    counts = [counts[i] for i in sparse]
    if tuner is not None:
        agreed = tuner.agree_stacks(counts, dtype)
    else:
        settings = [stacks[i][0].step_settings(dtype) for i in sparse]
        agreed = sync_stacks(counts, settings, groups)
    for i, step in zip(sparse, agreed, strict=True):
        steps[i] = step
    return steps


def reports_to_extra(
    reports: list[MoEAux], layers: Sequence[MoELayer], step: StepAgreement
) -> dict[str, Any]:
    """What a model returns beside its output, for the criterion: ``moe``, a :class:`MoEAux` per MoE
    layer; ``moe_counts``, this rank's :class:`~fairseq_tutel.moe.RoutingCounts` of them;
    ``moe_bias_counts``, what moves their load biases, in training if they have them.
    """
    if not reports:
        return {"moe": []}
    reports = balance_over_ranks(reports)
    exchange = step.exchange or layers[0].exchange_config
    extra = {"moe": reports, "moe_counts": routing_counts(reports, layers[0].groups, exchange.r)}
    if all(aux.bias_counts is not None for aux in reports):
        extra["moe_bias_counts"] = torch.stack([aux.bias_counts for aux in reports])
    return extra


class HubInterface(hub_utils.GeneratorHubInterface):
    """fairseq's, whose ranks generate together where they share experts: each gives sentences of
    its own, or none, and all of them call.
    """

    def generate(self, tokenized_sentences, *args: Any, **options: Any):
        """As the stock method."""
        with decode_together(self.models):
            if not len(tokenized_sentences):  # stock fails
                return []
            return super().generate(tokenized_sentences, *args, **options)


def pretrained(cls, *args: Any, **options: Any) -> HubInterface:
    """``from_pretrained`` of a model: as fairseq's, which prints the whole config."""
    loaded = hub_utils.from_pretrained(*args, **options)
    return HubInterface(loaded["args"], loaded["task"], loaded["models"])
