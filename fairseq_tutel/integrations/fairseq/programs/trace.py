"""Experts of every token in a file: ``--moe-trace FOLDER``; :mod:`fairseq_tutel.picture` reads it.

Each rank appends to ``FOLDER/trace-rank-N.jsonl``: a line about the model, then a line per forward
pass, without padding. ``training/README.md`` lists their entries.
"""

import inspect
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from fairseq.data import Dictionary
from torch import nn

from ....distributed import process_world
from ....moe.model import moe_layers
from ....moe.recomputation import is_recomputing
from ....moe.torch_modes import untraced
from ....training import record_choices
from ..json_lines import append_line, drop_after
from . import program

# argument of a model's forward method with the tokens of a stack
_TOKENS = {"decoder": "prev_output_tokens"}
_FILE = "trace-rank-{}.jsonl"
_TRAINING = ("train", "valid")  # modes of a program that trains


class RoutingTrace:
    """File of one rank. Forward passes of the model append to it from now on.

    Args:
        folder: of the files; all ranks may have the same.
        model, task: fairseq model with ``moe_layers``, and its task, which has the dictionaries.
        interval: in training, only every N-th update is written.
        modes: of training, if any, and of evaluation.

    ``fillers`` is the number of passes to come that have no tokens of the data.
    """

    def __init__(
        self,
        folder: str,
        model: Any,
        task: Any,
        interval: int = 1,
        modes: Sequence[str] = _TRAINING,
    ):
        rank, self._ranks = process_world()
        self._path = os.path.join(folder, _FILE.format(rank))
        self._model, self._interval = model, interval
        self._signature = inspect.signature(model.forward)
        names = {id(layer): str(key) for key, layer in model.moe_layers.items()}
        self._names = {name: names[id(layer)] for name, layer in moe_layers(model).items()}
        stacks = dict.fromkeys(name.rpartition(".")[0] for name in names.values())
        self._dictionaries: dict[str, Dictionary] = {
            stack: task.target_dictionary if stack == "decoder" else task.source_dictionary
            for stack in stacks
        }
        self._modes = list(modes)
        self._update = self.fillers = 0
        self._is_begun = self._is_resumed = False
        self._recording: tuple[AbstractContextManager, dict] | None = None
        model.moe_trace = self
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, with_kwargs=True, always_call=True)

    def resume(self, update: int, *, rewrite: bool) -> None:
        """Go on after an update; ``rewrite``: drop the lines of later updates."""
        self._is_resumed = True
        if rewrite:
            for path in (self._path, *self._of_absent_ranks()):
                drop_after(path, update)

    def _of_absent_ranks(self) -> Iterator[str]:
        """Yield, on the first rank, the files of ranks that a run before had beside these."""
        folder, name = os.path.split(self._path)
        for other in (
            os.listdir(folder) if name == _FILE.format(0) and os.path.isdir(folder) else ()
        ):
            number = re.fullmatch(_FILE.format(r"(\d+)"), other)
            if number and int(number[1]) >= self._ranks:
                yield os.path.join(folder, other)

    def before(self, update: int, fillers: int) -> None:
        """Begin the passes of an update, or of a validation after it."""
        self._update, self.fillers = update, fillers

    def __deepcopy__(self, memo: dict) -> "RoutingTrace":
        return self  # copies of the model are not traced

    @untraced
    def _begin(self, module: nn.Module, args: tuple) -> None:
        if module is not self._model or is_recomputing():
            return
        if self.fillers:
            self.fillers -= 1
        elif not (module.training and self._update % self._interval):
            recording = record_choices(module)
            self._recording = recording, recording.__enter__()

    @untraced
    def _end(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if self._recording is None or module is not self._model or is_recomputing():
            return
        (recording, choices), self._recording = self._recording, None
        recording.__exit__(None, None, None)
        if output is not None:  # the pass did not fail
            self._write(self._signature.bind(*args, **kwargs).arguments, choices)

    def _write(self, inputs: dict[str, Any], choices: dict[str, Any]) -> None:
        inputs = {**inputs, **inputs.get("kwargs", {})}
        tokens = {stack: inputs[_TOKENS.get(stack, "src_tokens")] for stack in self._dictionaries}
        kept = {s: tokens[s].ne(dictionary.pad()) for s, dictionary in self._dictionaries.items()}
        if not self._is_begun:
            self._is_begun = True
            append_line(self._path, self._header())
        by_layer = {self._names[name]: each for name, each in choices.items()}
        line = {
            "update": self._update,
            "mode": self._modes[0 if self._model.training else -1],
            "lengths": {stack: kept[stack].sum(1).tolist() for stack in kept},
            "tokens": {stack: tokens[stack][kept[stack]].tolist() for stack in kept},
            "choices": {
                name: each[kept[name.rpartition(".")[0]]].tolist()
                for name, each in by_layer.items()
            },
        }
        append_line(self._path, line)

    def _header(self) -> dict[str, Any]:
        layers = self._model.moe_layers
        return {
            "modes": self._modes,
            "ranks": self._ranks,
            "resumed": self._is_resumed,
            "update": 0,  # never dropped
            "experts": {str(key): layer.config.num_outputs for key, layer in layers.items()},
            "symbols": {stack: each.symbols for stack, each in self._dictionaries.items()},
        }


def trace_model(
    model: Any, task: Any, options: Any, modes: Sequence[str] = _TRAINING
) -> RoutingTrace | None:
    """Trace a model if its options ask for it (``moe_trace``)."""
    folder = getattr(options, "moe_trace", None)
    if folder is None:
        return None
    return RoutingTrace(folder, model, task, getattr(options, "moe_trace_interval", 1), modes)


def trace_evaluation(model: Any, task: Any, options: Any) -> None:
    """Trace a model that a program has loaded for evaluation, if its options ask for it."""
    generates = program() in ("fairseq-generate", "fairseq-interactive")
    if generates and getattr(options, "moe_trace", None):
        raise ValueError("moe_trace is for fairseq-eval-lm and fairseq-validate")
    trace_model(model, task, options, ["eval"])


def leave_out_next(model: Any) -> None:
    """Leave the next forward pass out of a model's trace, if it has one."""
    trace = getattr(model, "moe_trace", None)
    if trace is not None:
        trace.fillers = 1
