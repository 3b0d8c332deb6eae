"""A translation model as transformers' own class NllbMoe; the folder has no code."""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..checkpoint import split_key
from ..checkpoint.folders import SPECIAL_IDS, nllb_tensors
from ..config.options import as_flag
from .errors import ExportError
from .options import StoredOptions
from .tokenizer import TokenizerFiles

logger = logging.getLogger(__name__)

# fairseq-generate's default for the longest translation, with the symbol before it and </s>
_MAX_LENGTH = 202
# options -> the values that NllbMoe has
_FIXED = {
    "moe_expert_network": "ffn",
    "moe_score_function": "softmax",
    "moe_num_expert_groups": 1,
    "moe_shared_expert_ffn_dim": 0,
    "moe_load_bias": "none",
    "moe_route_scale": 1.0,
    "moe_fom": 0.0,
    "moe_unnormalized_weights": False,
    "encoder_normalize_before": True,
    "decoder_normalize_before": True,
    "no_decoder_final_norm": False,
    "encoder_learned_pos": False,
    "decoder_learned_pos": False,
    "no_token_positional_embeddings": False,
    "share_all_embeddings": True,
    "moe_cmr": False,
}


class Nllb:
    """Encoder-decoder with experts: a form; ``config`` has the fields of NllbMoeConfig."""

    embedding = "model.shared.weight"
    copies = ("decoder.embed_tokens.weight", "decoder.output_projection.weight")
    code = ()

    def __init__(self, options: StoredOptions, weights: Mapping[str, Any]):
        self._options = options
        self.config, self._router_fp32 = _describe(options, weights)
        self.tensors = nllb_tensors(self.config)
        # dense tensors first, then expert by expert: a file of weights has few of them
        order = sorted(self.tensors, key=lambda key: split_key(key)[1] if split_key(key) else -1)
        stored = (self.tensors[key] for key in order)
        self.shapes = {place.name: torch.Size(shape) for place, shape in stored}
        logger.warning(
            "NllbMoe of transformers 5 sends all tokens to experts 0 and 1. Use transformers 4.57, "
            "or call fairseq_tutel.integrations.transformers.repair_nllb_moe() first"
        )

    def json_files(self, dtype: str) -> dict[str, dict[str, Any]]:
        ids = {**SPECIAL_IDS, "decoder_start_token_id": SPECIAL_IDS["eos_token_id"]}
        config = {
            "architectures": ["NllbMoeForConditionalGeneration"],
            "model_type": "nllb-moe",
            "is_encoder_decoder": True,
            **ids,
            **vars(self.config),
            "router_dtype": "float32" if self._router_fp32 else dtype,
            "dtype": dtype,
        }
        generation = {**ids, "max_length": _MAX_LENGTH, "suppress_tokens": [1]}
        return {"config.json": config, "generation_config.json": generation}

    def example(self, folder: str) -> str:
        return f'''\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from fairseq_tutel.integrations.transformers import repair_nllb_moe

repair_nllb_moe()  # transformers 5.0 to 5.24 send all tokens to experts 0 and 1
tokenizer = AutoTokenizer.from_pretrained("{folder}")
model = AutoModelForSeq2SeqLM.from_pretrained("{folder}", dtype="auto")
text = tokenizer("__SOURCE__ words to translate", return_tensors="pt")  # the two languages' tokens
target = tokenizer.convert_tokens_to_ids("__TARGET__")
print(tokenizer.batch_decode(model.generate(**text, forced_bos_token_id=target), skip_special_tokens=True))
'''  # noqa: E501

    def symbols(self, tokenizer: TokenizerFiles) -> list[str]:
        task, name = self._options.task, "dict.txt"
        languages = _languages(task)
        if languages or task.get("source_lang"):
            name = f"dict.{languages[0] if languages else task['source_lang']}.txt"
        tokens = [f"__{language}__" for language in languages]
        if str(task.get("lang_tok_style") or "multilingual") != "multilingual":
            raise ExportError(f"--lang-tok-style {task['lang_tok_style']} cannot be exported")
        return tokenizer.symbols(self._options.data, self.config.vocab_size, name, tokens)

    def write_tokenizer(self, tokenizer: TokenizerFiles, folder: Path, symbols: list[str]) -> None:
        tokens = [f"__{language}__" for language in _languages(self._options.task)]
        tokenizer.write_for_translation(
            folder, symbols, tokens, self.config.max_position_embeddings
        )


def _languages(task: Mapping[str, Any]) -> list[str]:
    """Return the languages of a multilingual task, in the order of its dictionary."""
    given = task.get("langs")
    if not given and task.get("lang_pairs"):
        pairs = task["lang_pairs"]
        pairs = pairs.split(",") if isinstance(pairs, str) else pairs
        given = sorted({language for pair in pairs for language in pair.split("-")})
    return (given.split(",") if isinstance(given, str) else list(given)) if given else []


def _describe(options: StoredOptions, weights: Mapping[str, Any]) -> tuple[SimpleNamespace, bool]:
    """Return the fields of NllbMoeConfig, and whether the router computes in fp32."""
    from ..integrations.fairseq.options.options import moe_frequencies

    model = options.model
    options.refuse_unsupported("encoder", "decoder")
    for name, value in _FIXED.items():
        found = getattr(model, name)
        if isinstance(value, bool) and bool(found) != value:
            raise _no_place(f"a model {'without' if value else 'with'} {as_flag(name)}")
        if not isinstance(value, bool) and found != value:
            raise _no_place(f"{as_flag(name)} {found}")
    widths = {getattr(model, f"{side}_ffn_embed_dim") for side in ("encoder", "decoder")}
    if model.moe_expert_ffn_dim and widths != {model.moe_expert_ffn_dim}:
        raise _no_place(f"--moe-expert-ffn-dim {model.moe_expert_ffn_dim} beside other FFNs")
    layer = options.describe_layer(model.encoder_ffn_embed_dim)
    if layer.num_experts_per_tok != 2:
        raise _no_place(f"--moe-top-k {layer.num_experts_per_tok}")
    frequencies = moe_frequencies(model)
    fields = {
        "vocab_size": weights["encoder.embed_tokens.weight"].shape[0],
        "d_model": model.encoder_embed_dim,
        "max_position_embeddings": max(
            int(getattr(model, f"max_{which}_positions") or 1024) for which in ("source", "target")
        ),
        "activation_function": layer.activation_function,
        "scale_embedding": not model.no_scale_embedding,
        "num_experts": layer.num_experts,
        # training alone
        "dropout": model.dropout,
        "attention_dropout": model.attention_dropout,
        "activation_dropout": model.activation_dropout or getattr(model, "relu_dropout", 0.0),
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        # evaluation multiplies by the rest
        "moe_token_dropout": model.moe_eom,
        # nothing is dropped, so that padding takes nobody's place
        "moe_eval_capacity_token_fraction": 1.0,
        "router_ignore_padding_tokens": True,
        "second_expert_policy": "all",
        "normalize_router_prob_before_dropping": model.moe_normalize_gate_prob_before_dropping,
        "batch_prioritized_routing": model.moe_batch_prioritized_routing,
        "router_bias": False,
        "tie_word_embeddings": True,
    }
    for side, freq in zip(("encoder", "decoder"), frequencies, strict=True):
        dense = f"alternate{'_decoder' if side == 'decoder' else ''}_ffn_embed_dim"
        if freq and getattr(model, dense) > 0:
            raise _no_place(f"{as_flag(dense)} {getattr(model, dense)}")
        fields |= {
            f"{side}_layers": getattr(model, f"{side}_layers"),
            f"{side}_attention_heads": getattr(model, f"{side}_attention_heads"),
            f"{side}_ffn_dim": getattr(model, f"{side}_ffn_embed_dim"),
            f"{side}_sparse_step": freq,
        }
    return SimpleNamespace(**fields), layer.router_fp32


def _no_place(what: str) -> ExportError:
    return ExportError(f"{what} cannot be exported: transformers' NllbMoe has no place for it")
