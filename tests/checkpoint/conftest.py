"""Fixtures of the checkpoint tests."""

import os

import pytest


@pytest.fixture(autouse=True)
def quick_fsync(monkeypatch):
    """Do not wait for the disk: no test here cuts the power. The calls are still made and counted.

    An invalid descriptor still raises OSError.
    """

    def fsync(descriptor: int) -> None:
        os.fstat(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
