"""Generation by ranks that share the experts of a language model, each with its own sentences.

Each pass through a decoder begins with a small all-gather: the tokens of each rank, and whether it
still has work. A rank without work computes the layers with no tokens::

    rank 0   agree  layers  search    agree  layers  search    agree: nobody is busy
    rank 1   agree  layers  search    agree  layers (0 tokens)  agree

So the ranks of a job end together. A rank that fails between two passes tells the others, which end
at once. If it fails within a pass, its process ends and closes its connections.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ....distributed import StepAgreement, sync_step_and_word

_IDLE, _BUSY, _FAILED = range(3)


class SharedDecoding:
    """Context that keeps ranks in step while they generate from models (an ensemble).

    Collective at the end. A no-op if they share no experts, or inside another such context.
    """

    def __init__(self, models: Iterable[nn.Module]):
        stacks: list[Any] = [model.decoder for model in models if is_spread(model)]
        self._stacks = [stack for stack in stacks if stack.shared_decoding is None]
        self._over = False

    def __enter__(self) -> SharedDecoding:
        for stack in self._stacks:
            stack.shared_decoding = self
        self._over = False
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            if kind is None:
                self._finish()
            else:
                self.tell_failure()
        finally:
            for stack in self._stacks:
                stack.shared_decoding = None

    def agree(self, stack: Any, num_tokens: int, generating: bool) -> StepAgreement:
        """Begin a pass through a decoder; RuntimeError if a rank failed. Collective."""
        if not generating:
            raise ValueError("sentences are scored by fairseq-eval-lm; ranks generate together")
        return self._sync(stack, num_tokens, _BUSY)[0]

    def tell_failure(self) -> None:
        """Tell the other ranks that this one has failed, if they wait for the next pass."""
        within = any(stack.scope.step is not None for stack in self._stacks)
        if not (within or self._over) and self._stacks:
            with contextlib.suppress(RuntimeError):  # that rank is gone already
                self._sync(self._stacks[0], 0, _FAILED)

    @torch.no_grad()
    def _finish(self) -> None:
        """Join the passes of the others until none has any to come."""
        while self._stacks:
            for stack in self._stacks:
                step, is_busy = self._sync(stack, 0, _IDLE)
                if not is_busy:
                    return
                none = stack.embed_tokens.weight.new_empty(0)
                for layer in stack.moe_layers.values():
                    layer(none.view(0, layer.model_dim), step=step, capacity_factor=0.0)

    def _sync(self, stack, num_tokens, word) -> tuple[StepAgreement, bool]:
        """Return the ranks' agreement, and whether any rank has tokens."""
        first = next(iter(stack.moe_layers.values()))
        settings = first.step_settings(stack.embed_tokens.weight.dtype, capacity_factor=0.0)
        step, words = sync_step_and_word(num_tokens, settings, first.groups, word)
        failed = [rank for rank, each in words.items() if each == _FAILED]
        self._over = bool(failed) or set(words.values()) == {_IDLE}
        if failed:
            raise RuntimeError(f"rank {failed[0]} failed in generation; see its error")
        return step, _BUSY in words.values()


def is_spread(model: nn.Module) -> bool:
    """Return whether a language model's experts are spread over ranks."""
    groups = getattr(model, "moe_groups", None)
    decoder = getattr(model, "decoder", None)
    if groups is None or not groups.needs_sync or not hasattr(decoder, "shared_decoding"):
        return False
    return not hasattr(model, "encoder")  # other ranks would have to compute its layers too
