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
from .description import ModelConfig, describe_layer
from .errors import ExportError

logger = logging.getLogger(__name__)

ARCHITECTURE = "transformer_lm_gpt_moe"
# options of fairseq's decoders that add parts which the exported model lacks
_UNSUPPORTED = (
    "layernorm_embedding", "use_stable_embedding", "scale_attn", "scale_fc", "scale_heads",
    "scale_resids", "decoder_xformers_att_config", "character_embeddings", "adaptive_input",
    "adaptive_softmax_cutoff", "base_layers", "quant_noise_pq", "quant_noise_scalar",
)  # fmt: skip
_BOS, _EOS = 0, 2  # in every dictionary of fairseq


@dataclass(frozen=True)
class StoredOptions:
    """Options in a checkpoint.

    Attributes:
        model: all options of the architecture.
        task: what the task's own options say.
        num_experts: experts of a layer, over all ranks.
    """

    model: SimpleNamespace
    task: Mapping[str, Any]
    num_experts: int

    @property
    def data(self) -> Path | None:
        """Data-bin that the model was trained on, as the training command named it."""
        folders = str(self.task.get("data") or "").split(":")
        return Path(folders[0]) if folders[0] else None

    @property
    def prompt(self) -> int:
        """Number of the symbol that stands before every text: that of ``</s>``, or of ``<s>``."""
        return _BOS if self.task.get("add_bos_token") else _EOS

    def describe(self, weights: Mapping[str, Any]) -> ModelConfig:
        """Return the model's config; the vocabulary's size is that of the weights.

        Raises:
            ExportError: names an option that cannot be exported.
        """
        from ..integrations.fairseq.options.fields import values_of
        from ..integrations.fairseq.options.options import moe_config, moe_frequencies

        self._refuse_unsupported()
        model = self.model
        config = moe_config(model, self.num_experts)
        if config.capacity(2**20, training=False) is not None:
            logger.warning(
                "the model evaluates with a capacity; the exported one drops nothing, as fairseq's "
                "generation"
            )
        experts = ExpertConfig(**values_of(ExpertConfig, model))
        layer = describe_layer(
            config,
            model_dim=model.decoder_embed_dim,
            hidden_dim=model.moe_expert_ffn_dim or model.decoder_ffn_embed_dim,
            network=experts.expert_network,
            network_options=experts.expert_options,
            activation=str(model.activation_fn),
            shared_dim=experts.shared_expert_dim,
            shared_gate=experts.shared_expert_gate,
        )
        layers, (_, freq) = model.decoder_layers, moe_frequencies(model)
        positions = "learned" if model.decoder_learned_pos else "sinusoidal"
        return ModelConfig(
            **vars(layer),
            vocab_size=weights["decoder.embed_tokens.weight"].shape[0],
            num_hidden_layers=layers,
            num_attention_heads=model.decoder_attention_heads,
            ffn_dim=model.decoder_ffn_embed_dim,
            moe_layers=tuple(i for i in range(layers) if (i + 1) % freq == 0),
            max_position_embeddings=int(model.max_target_positions or model.tokens_per_sample),
            position_embedding="none" if model.no_token_positional_embeddings else positions,
            scale_embedding=not model.no_scale_embedding,
            final_layer_norm=not model.no_decoder_final_norm,
            tie_word_embeddings=bool(model.share_decoder_input_output_embed),
        )

    def _refuse_unsupported(self) -> None:
        model, dim = self.model, self.model.decoder_embed_dim
        for name in _UNSUPPORTED:
            if getattr(model, name, None):
                raise ExportError(f"a model with {_flag(name)} cannot be exported")
        if rank := getattr(model, "moe_lora_rank", 0):
            raise ExportError(
                f"a model with --moe-lora-rank {rank} is exported once it is merged: python -m "
                "fairseq_tutel.checkpoint merge-lora PATH OUT"
            )
        for name in ("decoder_input_dim", "decoder_output_dim"):
            if getattr(model, name) not in (None, dim):
                raise ExportError(
                    f"{_flag(name)} {getattr(model, name)}, which differs from "
                    f"--decoder-embed-dim {dim}, cannot be exported"
                )
        if int(self.task.get("output_dictionary_size", -1)) >= 0:
            raise ExportError("a model with --output-dictionary-size cannot be exported")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def read_options(state: Mapping[str, Any], num_experts: int, path: str) -> StoredOptions:
    """Return the options in the state of a checkpoint without experts.

    Raises:
        ExportError: the model has another architecture.
        ImportError: fairseq, which knows the options' defaults, is not installed.
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
