"""A language model with experts as a folder for transformers.

Weights are written by safetensors, one file after the other, so that memory holds one file. It does
not import transformers.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from .errors import ExportError
from .source import ModelSource
from .tokenizer import TokenizerFiles, write_json

FILES = Path(__file__).parent / "huggingface_files"
_CODE = tuple(f"{name}_fairseq_moe.py" for name in ("configuration", "layers", "modeling"))
_CONFIG = {
    "architectures": ["FairseqMoEForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_fairseq_moe.FairseqMoEConfig",
        "AutoModel": "modeling_fairseq_moe.FairseqMoEModel",
        "AutoModelForCausalLM": "modeling_fairseq_moe.FairseqMoEForCausalLM",
    },
    "model_type": "fairseq_moe",
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
}


def export_huggingface(
    checkpoint: str | Path,
    folder: str | Path,
    tokenizer: TokenizerFiles | None = None,
    *,
    max_bytes: int = 5 * 10**9,
) -> Path:
    """Write a model and its tokenizer to a folder that transformers loads.

    ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`` loads the model.

    Args:
        checkpoint: a set or a merged file; it is not changed.
        folder: must be new or empty.
        tokenizer: files that split text (default None: words of the dictionary in the data that
            the checkpoint names).
        max_bytes: largest file of weights, unless one tensor is larger (default 5e9).

    Returns:
        ``folder``.

    Raises:
        ExportError: the model or its dictionary cannot be exported, or safetensors is missing.
            No folder is left.
        CheckpointError: the checkpoint cannot be read.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportError(f"{folder}: exists and is not an empty folder")
    _require_safetensors()
    source = ModelSource(checkpoint)
    config = source.config
    tokenizer = tokenizer or TokenizerFiles()
    symbols = tokenizer.symbols(source.options.data, config.vocab_size)
    with _appearing(folder) as new:
        _write_weights(source, new, max_bytes)
        dtype = str(source.dtypes["model.embed_tokens.weight"]).removeprefix("torch.")
        write_json(new / "config.json", {**_CONFIG, **asdict(config), "dtype": dtype})
        generation = {"eos_token_id": 2, "pad_token_id": 1, "bos_token_id": source.options.prompt}
        generation["suppress_tokens"] = [1]  # fairseq never generates padding
        write_json(new / "generation_config.json", generation)
        for name in _CODE:
            shutil.copyfile(FILES / name, new / name)
        prompt = symbols[source.options.prompt]
        tokenizer.write(new, symbols, prompt, config.max_position_embeddings)
    return folder


def _require_safetensors() -> None:
    if importlib.util.find_spec("safetensors") is None:
        raise ExportError("weights are written by safetensors: pip install safetensors")


def _write_weights(source: ModelSource, folder: Path, max_bytes: int) -> None:
    """Write files of at most ``max_bytes`` (or one tensor) each, and their index if several."""
    from safetensors.torch import save_file

    sizes = {
        name: shape.numel() * source.dtypes[name].itemsize for name, shape in source.shapes.items()
    }
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    file_of = {}
    for number, names in enumerate(shards, start=1):
        label = "model" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}"
        file_of |= dict.fromkeys(names, f"{label}.safetensors")
        path = folder / f"{label}.safetensors"
        save_file(source.tensors(names), path, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
        write_json(folder / "model.safetensors.index.json", index)


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """Yield a folder that gets its name when it is complete, and is removed after an error."""
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
