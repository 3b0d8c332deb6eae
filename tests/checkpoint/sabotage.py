"""Interrupting a simulated rank at any file operation, by an error or as by SIGKILL."""

from __future__ import annotations

import functools
import io
import os
import threading

import pytest
import torch

from fairseq_tutel.checkpoint import CheckpointError

OPERATIONS = ("replace", "fsync", "unlink", "link")


class Killed(BaseException):
    """Ends a simulated rank where it stands: no `except Exception` clean-up runs."""


class Saboteur:
    """Interrupts one simulated rank at its file operation number `at`, or after the "commit"."""

    def __init__(self, monkeypatch, at: int | str, interruption: type[BaseException]) -> None:
        self.at, self.interruption = at, interruption
        self.count = 0
        self.committed = False  # the commit record is in place
        self.struck = False
        self.thread: threading.Thread | None = None
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))
        monkeypatch.setattr(torch, "save", self._wrap_save(torch.save))

    def watch(self) -> None:
        """Count what the calling thread does from now on."""
        self.thread = threading.current_thread()

    def _strikes(self) -> bool:
        if threading.current_thread() is not self.thread:
            return False
        self.count += 1
        self.struck = self.struck or self.count == self.at
        return self.count == self.at

    def _wrap(self, operation):
        @functools.wraps(operation)
        def counted(*args, **kwargs):
            if self._strikes():
                raise self.interruption(f"interrupted {operation.__name__}")
            result = operation(*args, **kwargs)
            if operation.__name__ == "replace" and str(args[1]).endswith(".commit"):
                self.committed = True
                if self.at == "commit":
                    raise self.interruption("interrupted after the commit")
            return result

        return counted

    def _wrap_save(self, save):
        def counted(state, file):
            if self._strikes():
                whole = io.BytesIO()
                save(state, whole)
                file.write(whole.getvalue()[: whole.tell() // 2])
                raise self.interruption("interrupted in the middle of a file")
            save(state, file)

        return counted


def attempt(saboteur, action):
    saboteur.watch()
    try:
        action()
    except BaseException as error:
        return error
    return None


def interrupt_everywhere(monkeypatch, interruption, prepare, change, check, survives=0):
    """Run prepare() and change(saboteur) for n = 1, 2, ... until change() gets through.

    survives: how many failures before the commit do not stop the change.
    """
    outcomes = []
    for at in range(1, 200):
        prepare()
        with monkeypatch.context() as patches:
            saboteur = Saboteur(patches, at, interruption)
            error = change(saboteur)
        if not saboteur.struck:
            assert error is None
            break
        if interruption is OSError and error is not None:
            assert isinstance(error, CheckpointError), error
        check(saboteur)
        outcomes.append(saboteur.committed)
    else:
        pytest.fail("the change never got through")
    # both sides of the commit were met, in this order, or the test would prove nothing
    survived = outcomes.index(False)
    assert survived == survives
    assert outcomes[survived:] == sorted(outcomes[survived:]) and True in outcomes[survived:]
    check(saboteur)
