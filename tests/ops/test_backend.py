"""The choice of backend: what runs where, and that nothing falls back silently."""

import contextlib
import importlib.util
import logging
from importlib.machinery import ModuleSpec

import pytest
import torch

from fairseq_tutel import ops
from fairseq_tutel.backends import torch as torch_backend
from fairseq_tutel.ops import backend

# torch would import it in a test that takes TRITON_INTERPRET away, for all tests that follow
with contextlib.suppress(ImportError):
    import triton  # noqa: F401


@pytest.fixture(autouse=True)
def restored_backend(monkeypatch):
    monkeypatch.setattr(backend, "_chosen", {})
    monkeypatch.setattr(backend, "_NO_TRITON", None)
    yield
    ops.set_backend("auto")


def test_auto_without_triton_is_torch_and_says_why(monkeypatch, caplog):
    monkeypatch.setattr(backend, "_NO_TRITON", "triton is not installed")
    with caplog.at_level(logging.INFO, logger=backend.__name__):
        assert ops.backend_for("cuda") == "torch"
    assert "on cuda: torch backend (auto: triton is not installed)" in caplog.text


@pytest.mark.parametrize("files, reason", [
    ((), "triton is not installed"),
    (("__init__.py",), "too old, 3.6 is needed"),
    (("__init__.py", "knobs.py"), None),
])  # fmt: skip
def test_triton_is_judged_without_importing_it(monkeypatch, tmp_path, files, reason):
    """torch 2.5 brings triton 3.1, with which the kernels cannot even be imported."""
    origin = str(tmp_path / "__init__.py") if files else None
    spec = ModuleSpec("triton", None, origin=origin) if files else None
    for file in files:
        (tmp_path / file).touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    why = backend._why_no_triton()
    assert why is None if reason is None else reason in why


@pytest.mark.parametrize("name, missing, message", [
    ("cuda", None, "unknown backend 'cuda'; expected one of auto, triton"),
    ("triton", "triton is not installed", "triton is not installed"),
    ("triton", None, "no GPU and TRITON_INTERPRET is not set"),
])  # fmt: skip
def test_what_cannot_run_is_refused(name, missing, message, monkeypatch):
    monkeypatch.setattr(backend, "_NO_TRITON", missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=message):
        ops.set_backend(name)
    assert ops.get_backend() == "auto"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend, "_NO_TRITON", None)
    ops.set_backend("triton")
    with pytest.raises(ValueError, match="backend 'triton' cannot run: device 'cpu' is no GPU"):
        ops.assign_slots(torch.ones(2, 2, dtype=torch.int32), 2)


def test_what_was_asked_for_runs_everywhere(monkeypatch):
    assert ops.get_backend() == "auto"
    assert ops.backend_for("cpu") == "torch"
    assert ops.backend_for(torch.device("cuda", 0)) == "triton"
    ops.set_backend("torch")
    assert ops.get_backend() == ops.backend_for("cuda") == "torch"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ops.set_backend("triton")
    assert ops.backend_for("cpu") == "triton"


def test_fp64_is_torch_under_auto_and_an_error_under_triton(monkeypatch):
    x, name = torch.zeros(1, dtype=torch.float64), "combine_fwd"
    monkeypatch.setattr(backend, "backend_for", lambda device: "triton")
    assert backend.implementation(name, x) is torch_backend.combine_fwd
    monkeypatch.setattr(backend, "_requested", "triton")
    with pytest.raises(ValueError, match="got torch.float64"):
        backend.implementation(name, x)
