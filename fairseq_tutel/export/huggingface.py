"""A language model with experts as a folder for transformers.

Weights go from the checkpoint's files to those of the folder one expert at a time; nothing is
imported that is not needed to train: neither transformers nor safetensors.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .description import ModelDescription
from .errors import ExportError
from .source import ModelSource
from .tensor_files import TensorFiles
from .tokenizer import TokenizerFiles, write_json

FILES = Path(__file__).parent / "huggingface_files"
_MODULES = {
    "AutoConfig": "configuration_fairseq_moe.FairseqMoEConfig",
    "AutoModel": "modeling_fairseq_moe.FairseqMoEModel",
    "AutoModelForCausalLM": "modeling_fairseq_moe.FairseqMoEForCausalLM",
}


def export_huggingface(
    checkpoint: str | Path,
    folder: str | Path,
    tokenizer: TokenizerFiles | None = None,
    *,
    max_bytes: int = 5 * 10**9,
) -> Path:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)``
    loads, with a tokenizer beside the model.

    Args:
        checkpoint: a set or a merged file; it is only read.
        folder: must not exist, or be empty.
        tokenizer: files that the text went through in training; by default the dictionary of the
            data that the checkpoint names, for text in words.
        max_bytes: of one file of weights.

    Returns:
        ``folder``.

    Raises:
        ExportError: the model, or its dictionary, cannot be exported; nothing is left then.
        CheckpointError: the checkpoint cannot be read.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportError(f"{folder}: exists and is not an empty folder")
    source = ModelSource(checkpoint)
    model = source.description
    tokenizer = tokenizer or TokenizerFiles()
    symbols = tokenizer.symbols(source.options.data, model.vocab_size)
    with _appearing(folder) as new:
        with TensorFiles(new, source.shapes, source.dtypes, max_bytes) as tensors:
            for name, start, values in source.pieces():
                tensors.write(name, start, values)
        dtype = str(source.dtypes["model.embed_tokens.weight"]).removeprefix("torch.")
        write_json(new / "config.json", _config(model, dtype))
        write_json(new / "generation_config.json", _generation(model))
        for name in ("configuration", "modeling"):
            shutil.copyfile(FILES / f"{name}_fairseq_moe.py", new / f"{name}_fairseq_moe.py")
        tokenizer.write(new, symbols, symbols[model.prompt], model.max_positions)
    return folder


def _config(model: ModelDescription, dtype: str) -> dict:
    moe = model.moe
    return {
        "architectures": ["FairseqMoEForCausalLM"],
        "auto_map": _MODULES,
        "model_type": "fairseq_moe",
        "dtype": dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.model_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "ffn_dim": model.ffn_dim,
        "activation_function": model.activation,
        "moe_layers": list(model.moe_layers),
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_ffn_dim": moe.hidden_dim,
        "expert_network": moe.network,
        "expert_bias": moe.bias,
        "shared_expert_dim": moe.shared_dim,
        "score_function": moe.score_function,
        "norm_topk_prob": moe.normalized,
        "router_load_bias": moe.load_bias,
        "router_fp32": moe.gating_fp32,
        "routed_scale": float(moe.routed_scale),
        "moe_output_scale": float(moe.output_scale),
        "max_position_embeddings": model.max_positions,
        "position_embedding": model.positions,
        "scale_embedding": model.scale_embedding,
        "final_layer_norm": model.final_norm,
        "tie_word_embeddings": model.tied,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
    }


def _generation(model: ModelDescription) -> dict:
    """fairseq never generates padding."""
    return {
        "bos_token_id": model.prompt,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "suppress_tokens": [1],
    }


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A folder that has its name once it is complete, and is gone after an error."""
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.absolute().parent))
    try:
        yield new
        new.chmod(0o777 & ~_umask())
        if folder.exists():
            folder.rmdir()  # it was empty
        new.rename(folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
