"""The options that a checkpoint stores, and the model that they describe."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .. import register
from ..config import ExpertConfig
from .description import ModelDescription, activation_name, describe_moe
from .errors import ExportError

logger = logging.getLogger(__name__)

ARCHITECTURE = "transformer_lm_gpt_moe"
# options of fairseq's decoders whose parts the exported model does not have
_UNSUPPORTED = (
    "layernorm_embedding", "use_stable_embedding", "scale_attn", "scale_fc", "scale_heads",
    "scale_resids", "decoder_xformers_att_config", "character_embeddings", "adaptive_input",
    "adaptive_softmax_cutoff", "base_layers", "quant_noise_pq", "quant_noise_scalar",
)  # fmt: skip
_BOS, _EOS = 0, 2  # in every dictionary of fairseq


@dataclass(frozen=True)
class StoredOptions:
    """``model``: with all options of the architecture; ``task``: what its own options say."""

    model: SimpleNamespace
    task: Mapping[str, Any]
    num_experts: int

    @property
    def data(self) -> Path | None:
        """The data-bin that the model was trained on, as the training command named it."""
        folders = str(self.task.get("data") or "").split(":")
        return Path(folders[0]) if folders[0] else None

    def describe(self, weights: Mapping[str, Any]) -> ModelDescription:
        """The model; sizes of tables are those of the weights. Raises ExportError."""
        from ..integrations.fairseq.options.fields import values_of
        from ..integrations.fairseq.options.options import moe_config, moe_frequencies

        model = self.model
        for name in _UNSUPPORTED:
            if getattr(model, name, None):
                flag = f"--{name.replace('_', '-')}"
                raise ExportError(f"a model with {flag} cannot be exported")
        dim = model.decoder_embed_dim
        for name in ("decoder_input_dim", "decoder_output_dim"):
            if getattr(model, name) not in (None, dim):
                flag = f"--{name.replace('_', '-')}"
                raise ExportError(
                    f"{flag} {getattr(model, name)}, which differs from --decoder-embed-dim {dim}, "
                    "cannot be exported"
                )
        if int(self.task.get("output_dictionary_size", -1)) >= 0:
            raise ExportError("a model with --output-dictionary-size cannot be exported")
        config = moe_config(model, self.num_experts)
        if config.capacity(2**20, training=False) is not None:
            logger.warning(
                "the model evaluates with a capacity; the exported one drops nothing, as fairseq's "
                "generation"
            )
        experts = ExpertConfig(**values_of(ExpertConfig, model))
        moe = describe_moe(
            config,
            model_dim=dim,
            hidden_dim=model.moe_expert_ffn_dim or model.decoder_ffn_embed_dim,
            network=experts.expert_network,
            network_options=experts.expert_options,
            activation=str(model.activation_fn),
            shared_dim=experts.shared_expert_dim,
        )
        layers, (_, freq) = model.decoder_layers, moe_frequencies(model)
        learned = bool(model.decoder_learned_pos)
        max_positions = model.max_target_positions or model.tokens_per_sample
        return ModelDescription(
            vocab_size=weights["decoder.embed_tokens.weight"].shape[0],
            model_dim=dim,
            ffn_dim=model.decoder_ffn_embed_dim,
            num_layers=layers,
            num_heads=model.decoder_attention_heads,
            activation=activation_name(str(model.activation_fn)),
            moe_layers=tuple(i for i in range(layers) if (i + 1) % freq == 0),
            moe=moe,
            positions="none"
            if model.no_token_positional_embeddings
            else "learned"
            if learned
            else "sinusoidal",
            max_positions=int(max_positions),
            scale_embedding=not model.no_scale_embedding,
            final_norm=not model.no_decoder_final_norm,
            tied=bool(model.share_decoder_input_output_embed),
            prompt=_BOS if self.task.get("add_bos_token") else _EOS,
        )


def read_options(state: Mapping[str, Any], num_experts: int, path: str) -> StoredOptions:
    """From the state of a checkpoint without experts. Raises ExportError for another architecture,
    ImportError where fairseq, which knows the options' defaults, is not installed.
    """
    register()
    from ..integrations.fairseq.models import ARCHITECTURES
    from ..integrations.fairseq.programs.evaluation import with_options_of_today

    cfg = with_options_of_today(dict(state), path)["cfg"]
    stored = {name: cfg.model[name] for name in cfg.model}
    name = stored.get("_name")
    if name != ARCHITECTURE:
        raise ExportError(
            f"{path}: a model of the architecture {name} cannot be exported, only one of "
            f"{ARCHITECTURE}"
        )
    defaults = vars(ARCHITECTURES[ARCHITECTURE].schema())
    given = {key: value for key, value in stored.items() if value is not None}
    # interpolations of a default name other parts of the config
    defaults = {
        key: value
        for key, value in defaults.items()
        if not (isinstance(value, str) and value.startswith("${"))
    }
    for key in ("max_target_positions", "tokens_per_sample"):
        defaults[key] = cfg.task.get(key)
    return StoredOptions(
        SimpleNamespace(**{**defaults, **given}),
        {key: cfg.task[key] for key in cfg.task},
        num_experts,
    )
