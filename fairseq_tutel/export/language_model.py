"""A language model as a class whose code is in the folder (``huggingface_files``)."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..checkpoint.folders import SPECIAL_IDS, language_model_tensors
from .description import ModelConfig
from .errors import ExportError
from .options import StoredOptions
from .tokenizer import TokenizerFiles
from .twin import InferenceModel


class LanguageModel:
    """Decoder with experts: a form of ``source.FORMS``; ``config`` is a :class:`ModelConfig`."""

    embedding = "model.embed_tokens.weight"
    copies: tuple[str, ...] = ()
    code = tuple(f"{name}_fairseq_moe" for name in ("configuration", "layers", "modeling"))

    def __init__(self, options: StoredOptions, weights: Mapping[str, Any]):
        self._options = options
        self.config = _describe(options, weights)
        self.tensors = language_model_tensors(self.config)
        self.shapes = {k: v.shape for k, v in InferenceModel(self.config).state_dict().items()}
        if self.config.tie_word_embeddings:
            self.copies = ("decoder.output_projection.weight",)

    def json_files(self, dtype: str) -> dict[str, dict[str, Any]]:
        kinds = {"AutoConfig": "configuration_fairseq_moe.FairseqMoEConfig"}
        for auto, name in (("AutoModel", "Model"), ("AutoModelForCausalLM", "ForCausalLM")):
            kinds[auto] = f"modeling_fairseq_moe.FairseqMoE{name}"
        config = {
            "architectures": ["FairseqMoEForCausalLM"],
            "auto_map": kinds,
            "model_type": "fairseq_moe",
            **SPECIAL_IDS,
            **asdict(self.config),
            "dtype": dtype,
        }
        generation = {
            "eos_token_id": 2,
            "pad_token_id": 1,
            "bos_token_id": self._options.prompt,
            "suppress_tokens": [1],  # fairseq never generates padding
        }
        return {"config.json": config, "generation_config.json": generation}

    def example(self, folder: str) -> str:
        return f'''\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("{folder}", trust_remote_code=True, dtype="auto")
prompt = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**prompt, max_new_tokens=40), skip_special_tokens=True))
'''

    def symbols(self, tokenizer: TokenizerFiles) -> list[str]:
        return tokenizer.symbols(self._options.data, self.config.vocab_size)

    def write_tokenizer(self, tokenizer: TokenizerFiles, folder: Path, symbols: list[str]) -> None:
        prompt = symbols[self._options.prompt]
        tokenizer.write(folder, symbols, prompt, self.config.max_position_embeddings)


def _describe(options: StoredOptions, weights: Mapping[str, Any]) -> ModelConfig:
    from ..integrations.fairseq.options.options import moe_frequencies

    model = options.model
    options.refuse_unsupported("decoder")
    if int(options.task.get("output_dictionary_size", -1)) >= 0:
        raise ExportError("a model with --output-dictionary-size cannot be exported")
    layer = options.describe_layer(model.moe_expert_ffn_dim or model.decoder_ffn_embed_dim)
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
