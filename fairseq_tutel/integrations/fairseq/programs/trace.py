"""Experts of every token in a file: ``--moe-trace FOLDER``; :mod:`fairseq_tutel.picture` reads it.

Each rank appends to ``FOLDER/trace-rank-N.jsonl``: a line with dictionary and layers, then a line
per forward pass, without padding: ``update``, ``mode``, ``tokens`` and ``lengths`` by stack, and
``choices`` by MoE layer.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from torch import nn

from ....distributed import process_world
from ....moe.model import moe_layers
from ....moe.recomputation import is_recomputing
from ....moe.requests import LayerCall, Request, open_requests
from ....moe.torch_modes import untraced
from ..json_lines import append_line, drop_after
from ..models.any_architecture import stack_of
from ..models.stock_layers import padding_of_call
from . import program

_FILE = "trace-rank-{}.jsonl"
_TRAINING = ("train", "valid")  # modes of a program that trains


class RoutingTrace:
    """File of one rank. Forward passes of the model append to it from now on.

    A stack's tokens are what its embedding got last. A stack without one, such as an encoder of
    speech, has none: its line has the choices of each frame.

    Args:
        folder: of the files; all ranks may have the same.
        model, task: fairseq model with ``moe_layers``, and its task, which has the dictionaries.
        interval: in training, only every N-th update is written.
        modes: of training, if any, and of evaluation.

    Passes are left out while ``ignores`` is set, and ``fillers`` passes to come: they have no
    tokens of the data.
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
        self._layers = _labels(model)
        stacks = {_stack(label): name for name, label in self._layers.items()}
        self._embeddings = {stack: _embedding(model, name) for stack, name in stacks.items()}
        self._symbols = {s: _symbols(task, s, each) for s, each in self._embeddings.items()}
        self._modes = list(modes)
        self._update = self.fillers = 0
        self.ignores = self._is_begun = self._is_resumed = False
        self._recording: tuple[nn.Module, ExitStack] | None = None
        self._lines: list[dict[str, dict]] = []  # of the present pass
        # what was embedded since the last call of a layer
        self._embedded: list[tuple[nn.Module, torch.Tensor]] = []
        self._is_called = False
        model.moe_trace = self
        for module in model.modules():
            if isinstance(module, BaseFairseqModel):  # a model may hold several, each called alone
                module.register_forward_pre_hook(self._begin)
                module.register_forward_hook(self._end, always_call=True)
        for module in {each for each in self._embeddings.values() if each is not None}:
            module.register_forward_pre_hook(self._note_tokens)

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

    def before(self, update: int) -> None:
        """Begin the passes of an update, or of a validation after it."""
        self._update = update

    def __deepcopy__(self, memo: dict) -> "RoutingTrace":
        return self  # copies of the model are not traced

    @untraced
    def _begin(self, module: nn.Module, args: tuple) -> None:
        if self._recording is not None or is_recomputing():
            return
        if self.fillers:
            self.fillers -= 1
        elif not (self.ignores or module.training and self._update % self._interval):
            self._lines, self._embedded, self._is_called = [], [], False
            layers = {name: layer for name, layer in moe_layers(self._model).items()}
            requests = {layer: self._request(name, layer) for name, layer in layers.items()}
            block = ExitStack()
            block.enter_context(open_requests(requests))
            self._recording = module, block

    @untraced
    def _end(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._recording is None or self._recording[0] is not module or is_recomputing():
            return
        (_, block), self._recording = self._recording, None
        block.close()
        if output is not None:  # the pass did not fail
            for parts in self._lines:
                self._write(parts)

    def _note_tokens(self, embedding: nn.Module, args: tuple) -> None:
        if self._is_called:
            self._embedded, self._is_called = [], False
        self._embedded.append((embedding, args[0]))

    def _request(self, name: str, layer: Any) -> Request:
        label = self._layers[name]

        def take(call: LayerCall, _: Mapping[str, Any]) -> None:
            assert call.choices is not None  # the request asks for them
            self._take(label, call.choices, padding_of_call(layer))

        return Request({"recorder": None}, take)

    def _take(self, label: str, choices: torch.Tensor, padding: torch.Tensor | None) -> None:
        """Note a call; a layer that is called again in a pass begins another line."""
        self._is_called, stack = True, _stack(label)
        line = self._lines[-1] if self._lines else {}
        known = line.get("kept", {}).get(stack)
        shape = choices.shape[:-1]
        if not line or label in line["choices"] or known is not None and known.shape != shape:
            line = {"choices": {}, "tokens": {}, "kept": {}}
            self._lines.append(line)
        if stack not in line["kept"]:
            tokens = self._tokens(stack, shape)
            kept = choices.new_ones(shape, dtype=torch.bool)
            pad = getattr(self._embeddings[stack], "padding_idx", None)
            if tokens is not None and pad is not None:
                kept = tokens.ne(pad)
            elif padding is not None and padding.shape == shape:
                kept = ~padding.bool()
            line["tokens"][stack] = tokens
            line["kept"][stack] = kept
        line["choices"][label] = choices

    def _tokens(self, stack: str, shape: torch.Size) -> torch.Tensor | None:
        """Return the tokens of a call; None if several texts were embedded before it, or none."""
        mine = self._embeddings[stack]
        found = [tokens for each, tokens in self._embedded if each is mine]
        found = [tokens for tokens in found if tokens.shape == shape]
        return found[0] if len(found) == 1 else None

    def _write(self, parts: dict[str, dict]) -> None:
        kept, tokens = parts["kept"], parts["tokens"]
        if not self._is_begun:
            self._is_begun = True
            append_line(self._path, self._header())
        line = {
            "update": self._update,
            "mode": self._modes[0 if self._model.training else -1],
            "lengths": {stack: each.sum(-1).tolist() for stack, each in kept.items()},
            "tokens": {
                stack: None if each is None else each[kept[stack]].tolist()
                for stack, each in tokens.items()
            },
            "choices": {
                label: each[kept[_stack(label)]].tolist()
                for label, each in parts["choices"].items()
            },
        }
        append_line(self._path, line)

    def _header(self) -> dict[str, Any]:
        layers = moe_layers(self._model)
        return {
            "modes": self._modes,
            "ranks": self._ranks,
            "resumed": self._is_resumed,
            "update": 0,  # never dropped
            "experts": {
                label: layers[name].config.num_outputs for name, label in self._layers.items()
            },
            "symbols": self._symbols,
        }


def _labels(model: Any) -> dict[str, str]:
    """Return the names of layers in the trace by those of modules: the stack, a dot, a number.

    Two layers of one number, as in a conformer, also have their names: ``encoder.layers.1/ffn1``.
    """
    known = {id(layer): str(key) for key, layer in model.moe_layers.items()}
    names = {name: known[id(layer)] for name, layer in moe_layers(model).items()}
    if not hasattr(model, "moe_reports_are_collected"):
        return names  # of our own stacks
    places = {name: stack_of(name) for name in names}
    numbers = list(places.values())
    found = {}
    for name, (stack, number) in places.items():
        found[name] = f"{stack}.{number}"
        if numbers.count((stack, number)) > 1:
            found[name] += "/" + name.removeprefix(f"{stack}.{number}.").replace(".", "/")
    return found


def _stack(label: str) -> str:
    return label.rpartition(".")[0]


def _embedding(model: nn.Module, layer: str) -> Any:
    """Return the embedding of the tokens of a layer's stack, or None."""
    while layer:
        layer = layer.rpartition(".")[0]
        found = getattr(model.get_submodule(layer), "embed_tokens", None)
        if isinstance(found, nn.Embedding):
            return found
    return None


def _symbols(task: Any, stack: str, embedding: Any) -> list[str]:
    """Return the words of a stack's dictionary; none if the task has no dictionary of its size."""
    sides = ["source_dictionary", "target_dictionary"]
    for side in reversed(sides) if stack.startswith("decoder") else sides:
        try:
            dictionary = getattr(task, side)
        except (AttributeError, NotImplementedError, KeyError):  # the task has no such side
            continue
        same = embedding is not None and isinstance(dictionary, Dictionary)
        if same and len(dictionary) == embedding.num_embeddings:
            return dictionary.symbols
    return []


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
