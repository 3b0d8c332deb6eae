"""A model with experts as a folder for transformers, which this package does not import."""

import importlib.util
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import ExportError
from .source import ModelSource
from .tokenizer import TokenizerFiles, write_json

FILES = Path(__file__).parent / "huggingface_files"


def export_huggingface(
    checkpoint: str | Path,
    folder: str | Path,
    tokenizer: TokenizerFiles | None = None,
    *,
    max_bytes: int = 5 * 10**9,
) -> Path:
    """Write a model and its tokenizer to a folder that transformers loads.

    ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`` loads a language model,
    ``AutoModelForSeq2SeqLM.from_pretrained(folder)`` a translation model.

    Args:
        checkpoint: a set or a merged file; CheckpointError if it cannot be read.
        folder: must be new or empty; it is returned.
        tokenizer: files that split text (default None: words of the dictionary in the data that
            the checkpoint names).
        max_bytes: largest file of weights, unless one tensor is larger (default 5e9).

    Raises:
        ExportError: the model or its dictionary cannot be exported, or safetensors is missing.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportError(f"{folder}: exists and is not an empty folder")
    if importlib.util.find_spec("safetensors") is None:
        raise ExportError("weights are written by safetensors: pip install safetensors")
    source = ModelSource(checkpoint)
    form, tokenizer = source.form, tokenizer or TokenizerFiles()
    symbols = form.symbols(tokenizer)
    with _appearing(folder) as new:
        _write_weights(source, new, max_bytes)
        dtype = str(source.dtypes[form.embedding]).removeprefix("torch.")
        for name, content in form.json_files(dtype).items():
            write_json(new / name, content)
        for name in form.code:
            shutil.copyfile(FILES / f"{name}.py", new / f"{name}.py")
        form.write_tokenizer(tokenizer, new, symbols)
        (new / "README.md").write_text(_card(source, folder.name), encoding="utf-8")
    return folder


def _card(source: ModelSource, name: str) -> str:
    """Return the model card: what the model is, and a program that loads it."""
    numbers = sum(shape.numel() for shape in source.shapes.values())
    about = f"`{source.options.architecture}` with {source.options.num_experts} experts in a layer"
    return (
        f"---\nlibrary_name: transformers\ntags: [mixture-of-experts, fairseq]\n---\n\n# {name}\n\n"
        f"{numbers:,} parameters, a model of fairseq ({about}). It drops no token.\n\n"
        f"```python\n{source.form.example(name)}```\n"
    )


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
    mode = folder.stat().st_mode & 0o666  # the umask's
    for number, names in enumerate(shards, start=1):
        label = "model" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}"
        file_of |= dict.fromkeys(names, f"{label}.safetensors")
        path = folder / f"{label}.safetensors"
        save_file(source.tensors(names), path, metadata={"format": "pt"})
        path.chmod(mode)  # safetensors lets the owner alone read it
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
        write_json(folder / "model.safetensors.index.json", index)


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """Yield a folder that gets its name when it is complete, and is removed after an error."""
    new = folder.absolute().with_name(f".{folder.name}.{secrets.token_hex(8)}")
    new.mkdir(parents=True)
    try:
        yield new
        if folder.exists():
            folder.rmdir()  # it was empty
        new.rename(folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
