"""What fairseq raises for a user's error, and the line that is printed instead.

fairseq ends in an assertion, a KeyError or an error of a library that it called for many a wrong
option or file. Each entry of ``_TABLE`` names the error, the function on the way to it, and the
line to print instead; an error without an entry keeps its traceback. None of these is specific to
models with experts.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from .programs import program

_LANGUAGE_MODEL = "for a language model give --task language_modeling"


@dataclass(frozen=True)
class _UserError:
    """kind: of the error; function: of fairseq's, which raised it (below: or something that it
    called); pattern: begins its message; line: the line to print, made of the error, the pattern's
    match and the function's variables."""

    kind: type[BaseException]
    function: str
    pattern: str
    line: Callable[[Any, re.Match, Mapping[str, Any]], str]
    below: bool = False


def explain(error: BaseException, trace: TracebackType | None) -> str | None:
    """The line for an error that ended a program of fairseq's, None without an entry."""
    frames = {frame.f_code.co_name: frame for frame, _ in traceback.walk_tb(trace)}
    raised_in = next(reversed(list(traceback.walk_tb(trace))), (None, 0))[0]
    for entry in _TABLE:
        frame = frames.get(entry.function)
        match = re.match(entry.pattern, str(error), re.DOTALL)
        if not isinstance(error, entry.kind) or frame is None or match is None:
            continue
        if entry.below or frame is raised_in:
            return entry.line(error, match, frame.f_locals)
    return _unreadable_value(error, trace) or _file_of_an_option(error)


def _given(flag: str, default: str) -> str:
    """``--flag value`` as the command line has it, with ``default`` where it has none."""
    for word, after in zip(sys.argv, sys.argv[1:] + [""], strict=True):
        if word == flag:
            return f"{flag} {after}"
        if word.startswith(f"{flag}="):
            return word
    return default


def _task() -> str:
    return _given("--task", "no --task is given, so that it is fairseq's default, translation")


def _no_dictionary(error: OSError, match: re.Match, found: Mapping[str, Any]) -> str:
    file = Path(error.filename or found.get("f") or "")
    if not file.parent.is_dir():
        return f"{file.parent}: there is no such folder; give the data that fairseq-preprocess made"
    return f"{file.parent} has no {file.name}: give a folder that fairseq-preprocess made"


def _no_split(error: OSError, match: re.Match, found: Mapping[str, Any]) -> str:
    folder = Path(match["path"]).parent
    splits = sorted({file.name.partition(".")[0] for file in folder.glob("*.idx")})
    flag = "--gen-subset" if program() in _SCORING else "--train-subset or --valid-subset"
    have = ", ".join(splits) or "none"
    return f"no split {match['split']!r} in {folder} (there are: {have}); choose one by {flag}"


def _no_model(error: OSError, match: re.Match, found: Mapping[str, Any]) -> str:
    path = Path(match["path"])
    shared = path.with_name(f"{path.stem}-shared.pt")
    return f"--path {path}: neither {path} nor {shared} exists; give a checkpoint's name"


def _no_metric(error: KeyError, match: re.Match, found: Mapping[str, Any]) -> str:
    metrics = ", ".join(sorted(found.get("stats", ())))
    return f"--best-checkpoint-metric {error.args[0]}: none of validation's metrics, {metrics}"


def _large_batch(error: AssertionError, match: re.Match, found: Mapping[str, Any]) -> str:
    size, buffer = found["cfg"].dataset.batch_size, found["cfg"].interactive.buffer_size
    return f"--batch-size {size} is larger than --buffer-size {buffer}: give a buffer as large"


def _no_batch(error: Exception, match: re.Match, found: Mapping[str, Any]) -> str:
    data = found["cfg"].dataset
    if data.max_tokens is None:
        return f"there is no batch in the data of split {data.train_subset!r}: give larger data"
    return f"--max-tokens {data.max_tokens}: every sample is longer; give as many as a sample has"


def _no_choice(error: KeyError, match: re.Match, found: Mapping[str, Any]) -> str:
    name, names = found["registry_name"], ", ".join(sorted(found["REGISTRY"]))
    return f"{name}._name={found['choice']}: there is no such {name}; choose one of {names}"


def _launcher(error: BaseException, match: re.Match, found: Mapping[str, Any]) -> str:
    ranks = match["ranks"]
    return (
        f"--distributed-world-size {ranks}, but there are {match['gpus']} GPUs; to start the ranks "
        f"on a CPU: python -m fairseq_tutel.launch --nproc-per-node {ranks} -- {program()} ..."
    )


def _always(text: str) -> Callable[[Any, re.Match, Mapping[str, Any]], str]:
    return lambda error, match, found: text


def _no_warmup(error: Exception, match: re.Match, found: Mapping[str, Any]) -> str | None:
    cfg = found.get("cfg")
    if getattr(cfg, "_name", "") != "inverse_sqrt" or cfg.warmup_updates:
        return None
    return (
        "--warmup-updates 0: --lr-scheduler inverse_sqrt divides by it; give at least 1, or "
        "another scheduler"
    )


def _too_long(error: Exception, match: re.Match, found: Mapping[str, Any]) -> str:
    return (
        f"a sample has {match['size']} tokens, the model has {match['most']} positions: "
        "cut the text (--tokens-per-sample, --sample-break-mode), or leave such samples out with "
        "--skip-invalid-size-inputs-valid-test"
    )


def _damaged_data(error: Exception, match: re.Match, found: Mapping[str, Any]) -> str | None:
    path = found.get("split_path") or getattr(found.get("self"), "_path", None)
    if path is None:
        return None
    return f"{path}.idx or {path}.bin is damaged or cut short; run fairseq-preprocess again"


_SCORING = ("fairseq-eval-lm", "fairseq-generate", "fairseq-interactive")
_TABLE = (
    _UserError(
        OmegaConfBaseException,
        "convert_namespace_to_omegaconf",
        r".*nterpolation key '?task\.(?P<key>\w+)",
        lambda error, match, found: (
            f"{_task()}: it has no {match['key']}, which the model takes from it; {_LANGUAGE_MODEL}"
        ),
        below=True,
    ),
    _UserError(
        Exception,
        "setup_task",
        r"Could not infer language pair",
        lambda error, match, found: (
            f"{_task()}: the data names no pair of languages; {_LANGUAGE_MODEL}"
        ),
    ),
    _UserError(
        KeyError, "parse_args_and_arch", r"None$", _always(f"--task is missing; {_LANGUAGE_MODEL}")
    ),
    _UserError(
        RuntimeError,
        "parse_args_and_arch",
        r"$",
        _always("--arch is missing; for a model with experts give --arch transformer_lm_gpt_moe"),
    ),
    _UserError(
        ValueError,
        "parse_args_and_arch",
        r"Cannot combine --fp16 and --tpu",
        _always("--fp16 and --bf16 (or their memory-efficient forms) exclude each other: give one"),
    ),
    _UserError(
        AssertionError,
        "_infer_single_node_init",
        r"world size is (?P<ranks>\d+) but have (?P<gpus>\d+) available devices",
        _launcher,
    ),
    _UserError(
        RuntimeError,
        "distributed_init",
        r"Distributed package doesn't have NCCL",
        _always("--distributed-backend nccl: this torch has none; give --distributed-backend gloo"),
        below=True,
    ),
    _UserError(
        AssertionError,
        "main",
        r"Must specify batch size",
        _always("the size of a batch is missing; give --batch-size or --max-tokens"),
    ),
    _UserError(
        OSError,
        "verify_checkpoint_directory",
        "",
        lambda error, match, found: (
            f"--save-dir {found['save_dir']} cannot be written "
            f"({error.strerror}: {error.filename}); choose another, or --no-save"
        ),
        below=True,
    ),
    _UserError(FileNotFoundError, "add_from_file", "", _no_dictionary, below=True),
    _UserError(
        FileNotFoundError,
        "load_dataset",
        r"Dataset not found: (?P<split>\S+) \((?P<path>.*)\)",
        _no_split,
    ),
    _UserError(Exception, "main", r"The dataset is empty", _no_batch, below=True),
    _UserError(
        ValueError,
        "load_checkpoint",
        r"--finetune-from-model (?P<path>.*) does not exist",
        lambda error, match, found: f"{error}; give the name of a checkpoint",
    ),
    _UserError(ZeroDivisionError, "__init__", "", _no_warmup),
    _UserError(ValueError, "__getitem__", r"buffer is smaller than requested", _damaged_data),
    _UserError(
        Exception,
        "load_dataset",
        r"buffer is smaller than requested|Index file doesn't match",
        _damaged_data,
        below=True,
    ),
    _UserError(
        ValueError,
        "load",
        r"Incorrect dictionary format.*: \"(?P<line>[^\n]*)",
        lambda error, match, found: (
            f"{found['f']} is no dictionary of fairseq's: a line has a word and how often it "
            f"occurs, not {match['line']!r}"
        ),
        below=True,
    ),
    _UserError(
        IndexError,
        "extract_features_scriptable",
        r"index out of range in self",
        lambda error, match, found: (
            f"a token of the data is beyond the model's {found['self'].embed_tokens.num_embeddings}"
            " embeddings: dict.txt is not the dictionary that the data was made with"
        ),
        below=True,
    ),
    _UserError(
        Exception,
        "filter_indices_by_size",
        r"Size of sample #\d+ is invalid \(=\(?(?P<size>\d+).*max_positions=\(?(?P<most>\d+)",
        _too_long,
    ),
    _UserError(KeyError, "validate", "", _no_metric),
    _UserError(
        OSError, "load_model_ensemble_and_task", r"Model file not found: (?P<path>.*)", _no_model
    ),
    _UserError(
        AssertionError,
        "main",
        r"--path required",
        _always("--path is missing; give the checkpoint to generate with"),
    ),
    _UserError(
        AssertionError, "main", r"--batch-size cannot be larger than --buffer-size", _large_batch
    ),
    # Hydra: names that no parser has checked
    _UserError(
        AssertionError,
        "setup_task",
        r"Could not infer task type",
        lambda error, match, found: (
            f"task._name={found['cfg'].get('_name')}: there is no such "
            "task; a language model's is language_modeling"
        ),
    ),
    _UserError(
        Exception,
        "build_model",
        r"Could not infer model type|.*_name",
        lambda error, match, found: (
            f"model._name={found.get('model_type')}: there is no such "
            "model; one with experts is transformer_lm_gpt_moe"
        ),
    ),
    _UserError(KeyError, "build_x", "", _no_choice),
)


def _unreadable_value(error: BaseException, trace: TracebackType | None) -> str | None:
    """For an option whose value fairseq evaluates as Python (--model-overrides, --adam-betas)."""
    evaluated = any(frame.f_code.co_filename == "<string>" for frame, _ in traceback.walk_tb(trace))
    if isinstance(error, SyntaxError) and error.filename == "<string>":
        text = (error.text or "").strip()
    elif isinstance(error, NameError) and evaluated:
        text = re.sub(r"^name '(\w+)'.*", r"\1", str(error))
    else:
        return None
    for flag, word in zip(sys.argv, sys.argv[1:], strict=False):
        name, equals, value = word.partition("=")
        flag, value = (name, value) if equals and name.startswith("--") else (flag, word)
        if flag.startswith("--") and text and text in value:
            return f"{flag} {value} cannot be read ({error}); quote it as Python would write it"
    return None


def _file_of_an_option(error: BaseException) -> str | None:
    """For a file that cannot be opened or made, where an option of the command names its place."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str):
        return None
    for flag, word in zip(sys.argv, sys.argv[1:], strict=False):
        name, equals, value = word.partition("=")
        if not equals:
            name, value = (flag if flag.startswith("--") else ""), word
        within = value not in ("", ".", "/") and Path(value) in Path(error.filename).parents
        if value and (within or value == error.filename):
            return f"{name} {value}: {error.strerror} ({error.filename})".strip()
    return None
