"""Fixtures of the checkpoint tests."""

import os

import pytest


@pytest.fixture(autouse=True)
def quick_fsync(monkeypatch):
    """Do not wait for the disk, but take and count the calls: no test here cuts the power."""
    monkeypatch.setattr(os, "fsync", os.fstat)
