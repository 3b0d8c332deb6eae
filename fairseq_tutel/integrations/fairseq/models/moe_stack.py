"""Parts that the fairseq models with MoE layers share: layers, tuner, agreement, reports."""

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from fairseq import hub_utils
from fairseq.models import BaseFairseqModel

from .... import distributed, ops
from ....config import EXPERTS, ExpertConfig
from ....moe import MoEAux, MoELayer, balance_over_ranks, replace_ffn, routing_counts
from ....moe.model import moe_layers
from ....moe.replace.places import Match, matching, place_of
from ....training import add_lora
from ....tuning import ExchangeTuner
from ..options.benchmark import benchmark_of
from ..options.command_line import add_meta_flags
from ..options.data_tags import other_dictionary
from ..options.options import RunOptions
from .shared_decoding import SharedDecoding

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=torch.nn.Module)


def world_size(args: Any) -> int:
    """Return the number of ranks, simulated ones included, for a model's options."""
    return max(distributed.process_world()[1], benchmark_of(args).simulate_world_size)


class LayerFactory:
    """Builder of a model's MoE layers, numbered from 0 over all its stacks."""

    def __init__(self, run: RunOptions):
        """Place the experts; a collective call if torch.distributed is initialised."""
        from .. import register

        register()  # stock fairseq would average the experts of different ranks
        self._run, self._numbers = run, itertools.count()
        self.groups = distributed.build_groups(
            run.routing.num_experts,
            expert_parallel_size=run.args.moe_expert_parallel_size,
            simulate_world_size=run.benchmark.simulate_world_size,
            placement=str(run.args.moe_expert_placement),
        )
        if self.groups.simulated:
            text = "SIMULATION: this process is one rank of %d, and the losses mean nothing"
            logger.warning(text, self.groups.world_size)
        ops.set_backend(str(run.args.moe_backend))

    def build(self, cfg: Any, side: Any) -> MoELayer:
        """Build the next layer by a TransformerConfig and its part for the encoder or decoder."""
        run, experts = self._run, self._run.experts
        # gated experts ignore the activation of the model's other layers
        reads = EXPERTS.get(experts.expert_network).uses_activation or experts.shared_expert_dim
        of_model: dict[str, Any] = {"activation": str(cfg.activation_fn)} if reads else {}
        if not run.args.moe_lora_rank:
            # LoRA takes over the experts of the whole model and holds them by itself
            of_model["expert_storage"] = run.storage
        # some forks have no relu_dropout, the older name
        inside = cfg.activation_dropout or getattr(cfg, "relu_dropout", None) or 0.0
        of_model |= {"dropout": cfg.dropout, "activation_dropout": inside}
        return MoELayer(
            side.embed_dim,
            hidden_dim=run.args.moe_expert_ffn_dim or side.ffn_embed_dim,
            experts=dataclasses.replace(experts, **of_model),
            groups=self.groups,
            layer_index=next(self._numbers),
            **self._of_every_layer,
        )

    @property
    def _of_every_layer(self) -> dict[str, Any]:
        run = self._run
        return {
            "config": run.routing,
            "exchange": run.exchange,
            "record_exchange_time": run.benchmark.record_exchange_time,
            "skip_exchange": run.benchmark.skip_exchange,
        }

    def replace(self, model: torch.nn.Module, names: Match, copy_weights: bool) -> None:
        """Replace blocks of a model by MoE layers of the same network, unless options say other."""
        run, experts = self._run, self._run.experts
        decided_by_block = {"activation", "dropout", "activation_dropout", "expert_storage"}
        given = {
            field.name: getattr(experts, field.name)
            for field in dataclasses.fields(experts)
            if field.name not in decided_by_block
            and getattr(experts, field.name) != getattr(ExpertConfig(), field.name)
        }
        if not EXPERTS.get(experts.expert_network).uses_activation:
            given["activation"] = ExpertConfig.activation
        if run.storage != "stacked" and not run.args.moe_lora_rank:
            given["expert_storage"] = run.storage
        if run.args.moe_expert_ffn_dim:
            given["hidden_dim"] = run.args.moe_expert_ffn_dim
        if any(param.is_meta for param in model.parameters()):
            self._put_by_sizes(model, names, given)
        else:
            given |= {"copy_weights": copy_weights, "groups": self.groups, **self._of_every_layer}
            replace_ffn(model, names, run.routing.num_experts, **given)
        for layer in moe_layers(model).values():
            layer.layer_index = next(self._numbers)

    def _put_by_sizes(self, model: torch.nn.Module, names: Match, given: Mapping[str, Any]) -> None:
        """Replace blocks on the meta device, where nothing can tell what they compute."""
        for place in [place_of(model, *each) for each in matching(model, names)]:
            first = getattr(place.block, "first", None)
            if not isinstance(first, torch.nn.Linear):
                raise ValueError(
                    f"{place.name} is {type(place.block).__name__}, and not the two linear layers "
                    "of a transformer: only the built model can tell what its experts hold"
                )
            how = {"hidden_dim": first.out_features, **given, **self._of_every_layer}
            place.put(model, MoELayer(first.in_features, groups=self.groups, **how))


def with_lora(model: Model, run: RunOptions) -> Model:
    """Give the experts low-rank updates and freeze the rest, if ``--moe-lora-rank`` asks for it."""
    if rank := run.args.moe_lora_rank:
        storage = "same" if run.storage == "stacked" else run.storage
        add_lora(model, rank, run.args.moe_lora_alpha, storage=storage)
    return model


def make_tuner(run: RunOptions, layers: Sequence[MoELayer]) -> ExchangeTuner | None:
    """Return the tuner of a model's layers; None if there is nothing to choose. Collective."""
    if not run.tuned or not layers:
        return None
    how = {"steps": run.args.moe_tune_steps, "max_loss": run.args.moe_tune_max_loss}
    file = run.args.moe_tune_file
    if file is None:
        needed = layers[0].groups.needs_sync
        return ExchangeTuner(layers, run.tuned, **how) if needed else None
    try:
        pinned = Path(file).read_text(encoding="utf-8")
        return ExchangeTuner(layers, run.tuned, **how, pinned=pinned)
    except (OSError, ValueError) as error:
        raise ValueError(f"--moe-tune-file {file!r}: {error}") from None


def agree(
    stacks: Sequence[Sequence[MoELayer]],
    counts: Sequence[int],
    dtype: torch.dtype,
    tuner: ExchangeTuner | None,
    generating: bool,
) -> list[distributed.StepAgreement]:
    """Exchange token counts with the other ranks, once per forward pass for all layers.

    ``stacks`` and ``counts`` are MoE layers and tokens of each stack. ``generating``: the pass
    computes one more token per sentence, or only the encoder; ValueError if experts are spread.
    """
    sparse = [i for i, layers in enumerate(stacks) if layers]
    steps = list(map(distributed.StepAgreement, counts))
    if not sparse or not (groups := stacks[sparse[0]][0].groups).needs_sync:
        return steps
    if generating:
        raise ValueError(
            f"the experts are spread over {groups.ep_size * groups.num_slices} ranks, which "
            "generate together only from language models, by fairseq-generate or generate() and "
            "sample() of from_pretrained: leave moe_expert_parallel_size out of --model-overrides, "
            "or give 1, so that each rank has all experts"
        )
    counts = [counts[i] for i in sparse]
    if tuner is not None:
        agreed = tuner.agree_stacks(counts, dtype)
    else:
        settings = [stacks[i][0].step_settings(dtype) for i in sparse]
        agreed = distributed.sync_stacks(counts, settings, groups)
    for i, step in zip(sparse, agreed, strict=True):
        steps[i] = step
    return steps


def reports_to_extra(
    reports: list[MoEAux], layers: Sequence[MoELayer], step: distributed.StepAgreement
) -> dict[str, Any]:
    """Return what a model gives to the criterion beside its output.

    ``moe`` holds a :class:`MoEAux` per MoE layer, ``moe_counts`` this rank's RoutingCounts, and
    ``moe_bias_counts`` what moves load biases, in training of layers that have them.
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
    """fairseq's interface, whose methods all ranks that share experts call together."""

    def generate(self, tokenized_sentences, *args: Any, **options: Any):
        """Generate as the stock method does."""
        with SharedDecoding(self.models):
            if not len(tokenized_sentences):  # stock fails
                return []
            return super().generate(tokenized_sentences, *args, **options)


class MoEModel:
    """Mixin of a fairseq model with MoE layers, to be named before the stock class."""

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> HubInterface:
        """Load a model as fairseq's method does, without printing the whole config."""
        from .. import register

        register()
        loaded = hub_utils.from_pretrained(*args, **options)
        return HubInterface(loaded["args"], loaded["task"], loaded["models"])

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Add the flags of the flat dataclass, and those of Meta's branches."""
        BaseFairseqModel.add_args.__func__(cls, parser)
        add_meta_flags(parser)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any):
        """Load as stock does; ValueError if the weights are of another dictionary."""
        for name, mine in self.named_parameters():
            if name.endswith("embed_tokens.weight") and name in state_dict:
                rows, symbols = len(state_dict[name]), len(mine)
                if rows != symbols:
                    raise ValueError(other_dictionary(rows, symbols))
        return super().load_state_dict(state_dict, *args, **options)

    @property
    def moe_groups(self) -> distributed.ExpertParallelGroups | None:
        """Placement of the experts; None without MoE layers."""
        return next((layer.groups for layer in self.moe_layers.values()), None)
