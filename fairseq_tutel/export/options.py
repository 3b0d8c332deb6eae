"""The options that a checkpoint stores."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .. import register
from ..config import PRESETS, ExpertConfig
from ..config.options import as_flag
from .description import LayerConfig, describe_layer
from .errors import ExportError

logger = logging.getLogger(__name__)

# of fairseq's stacks, parts that the exported models lack
_UNSUPPORTED = (
    "layernorm_embedding", "use_stable_embedding", "scale_attn", "scale_fc", "scale_heads",
    "scale_resids", "decoder_xformers_att_config", "character_embeddings", "adaptive_input",
    "adaptive_softmax_cutoff", "base_layers", "quant_noise_pq", "quant_noise_scalar",
    "cross_self_attention", "no_cross_attention",
)  # fmt: skip
_BOS, _EOS = 0, 2  # in every dictionary of fairseq


@dataclass(frozen=True)
class StoredOptions:
    """Options in a checkpoint."""

    architecture: str  # name of the model in fairseq
    model: SimpleNamespace  # all options of the architecture
    task: Mapping[str, Any]
    num_experts: int  # of a layer, over all ranks

    @property
    def data(self) -> Path | None:
        """Data-bin that the model was trained on, as the training command named it."""
        folders = str(self.task.get("data") or "").split(":")
        return Path(folders[0]) if folders[0] else None

    @property
    def prompt(self) -> int:
        """Number of the symbol that stands before every text: that of ``</s>``, or of ``<s>``."""
        return _BOS if self.task.get("add_bos_token") else _EOS

    def refuse_unsupported(self, *sides: str) -> None:
        """Raise ExportError for an option of these stacks that no export has a place for."""
        model = self.model
        for name in _UNSUPPORTED:
            if getattr(model, name, None):
                raise ExportError(f"a model with {as_flag(name)} cannot be exported")
        if rank := getattr(model, "moe_lora_rank", 0):
            merge = "python -m fairseq_tutel.checkpoint merge-lora PATH OUT"
            raise ExportError(f"merge a model with --moe-lora-rank {rank} first: {merge}")
        first, *others = (f"{side}_embed_dim" for side in sides)
        for name in (*others, "decoder_input_dim", "decoder_output_dim"):
            if (found := getattr(model, name)) not in (None, getattr(model, first)):
                raise ExportError(
                    f"{as_flag(name)} {found} cannot be exported: it differs from {as_flag(first)}"
                )

    def describe_layer(self, hidden_dim: int) -> LayerConfig:
        """Return the config of the layers with experts of this width; warn of a capacity."""
        from ..integrations.fairseq.options.fields import values_of
        from ..integrations.fairseq.options.options import moe_config

        model = self.model
        config = moe_config(model, self.num_experts)
        if config.capacity(2**20, training=False) is not None:
            logger.warning(
                "the model evaluates with a capacity; the export drops nothing, as in generation"
            )
        experts = ExpertConfig(**values_of(ExpertConfig, model))
        return describe_layer(
            config,
            model_dim=model.decoder_embed_dim,
            hidden_dim=hidden_dim,
            network=experts.expert_network,
            network_options=experts.expert_options,
            activation=str(model.activation_fn),
            shared_dim=experts.shared_expert_dim,
            shared_gate=experts.shared_expert_gate,
        )


def read_options(
    state: Mapping[str, Any], num_experts: int, path: str, architectures: Collection[str]
) -> StoredOptions:
    """Return a state's options; ExportError if the model has none of these architectures."""
    register()
    from ..integrations.fairseq.models import ARCHITECTURES
    from ..integrations.fairseq.models.transformer_fields import fill_sizes
    from ..integrations.fairseq.options.options import moe_config
    from ..integrations.fairseq.programs.evaluation import with_options_of_today

    cfg = with_options_of_today(dict(state), path)["cfg"]
    stored = {name: cfg.model[name] for name in cfg.model}
    name = stored.get("_name")
    if name not in architectures:
        known = " or ".join(architectures)
        raise ExportError(f"{path}: architecture {name} cannot be exported, only {known}")
    given = {key: value for key, value in stored.items() if value is not None}
    defaults = {
        key: value
        for key, value in vars(ARCHITECTURES[name].schema()).items()
        if not str(value).startswith("${")  # names another part of the config
    }
    task = cfg.task if isinstance(cfg.task, Mapping) else vars(cfg.task)
    for key in ("max_source_positions", "max_target_positions", "tokens_per_sample"):
        defaults[key] = task.get(key, defaults.get(key))
    model = SimpleNamespace(**{**defaults, **given})
    if hasattr(model, "encoder_layers"):
        fill_sizes(model)
    routing = moe_config(model, num_experts)
    for field in PRESETS["meta"]:  # not given: the preset's
        setattr(model, f"moe_{field}", getattr(routing, field))
    return StoredOptions(name, model, {key: task[key] for key in task}, num_experts)
