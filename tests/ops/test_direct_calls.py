"""Operators run their functions directly in plain eager mode, and only there."""

import pytest
import torch
from helpers.assertions import rms_ratio
from helpers.dispatched import Dispatched
from helpers.inputs import random_rows
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import BaseTorchFunctionMode

from fairseq_tutel import ops
from fairseq_tutel.backends import _torch_private
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.moe.routing import RouterCall
from fairseq_tutel.ops import _operator
from fairseq_tutel.ops import backend as chooser

MAPS = random_rows(7, 2, 4, 3, "spread")


def rows_of(x):
    return ops.dispatch(x, *MAPS)


def inputs():
    return torch.randn(7, 5, requires_grad=True)


def test_every_kind_of_observer_is_noticed():
    """Modes and tracers, which have dispatch keys; functions; the profiler; subclasses.

    When compiled: test_library.py.
    """
    with Dispatched() as seen:
        rows_of(inputs())
    assert any("dispatch" in name for name in seen.names)
    tensors = [inputs(), *MAPS]
    for observer in (Dispatched, BaseTorchFunctionMode, torch.profiler.profile, FakeTensorMode):
        assert _operator.is_plain_eager((*tensors, 2), tensors)
        with observer():
            assert not _operator.is_plain_eager((*tensors, 2), tensors), observer
    with FakeTensorMode():
        tensors[0] = torch.empty(7, 5)
    assert not _operator.is_plain_eager((*tensors, 2), tensors)


def make(dtype=torch.float32, **options):
    torch.manual_seed(0)
    module = MoELayer(16, 4, 16, top_k=2, seed=1, **options).to(dtype)
    return module, torch.randn(6, 16, dtype=dtype, requires_grad=True)


def step(module, x):
    """Output, loss and gradients, and how autograd sees the output."""
    torch.manual_seed(0)  # of dropout
    y, aux = module(x, return_aux=True)
    (y.float().square().sum() + aux.loss).backward()
    gradients = [x.grad, *(p.grad for p in module.parameters())]
    return [y, aux.loss, aux.load_E, *gradients], y._is_view()


def test_plain_eager_mode_runs_the_functions_alone(monkeypatch):
    monkeypatch.setattr(torch._library.custom_ops.CustomOpDef, "__call__", None)
    step(*make())
    with torch.inference_mode():
        make()[0].eval()(torch.randn(6, 16))
    monkeypatch.delattr(torch._C, "_dispatch_keys")  # a torch that cannot tell
    assert not _torch_private.dispatch_questions()[0]()


@pytest.mark.parametrize(
    "options, autocast, frozen",
    [
        ({}, True, ()),
        ({"capacity_factor": 0.0, "dropout": 0.2, "dtype": torch.bfloat16}, False, ()),
        ({"expert_network": "swiglu", "expert_compute": "fp8"}, False, "experts.fc1_weight"),
        ({"overflow_rerouting": 2, "drop_policy": "probability"}, False, "gate.wg.weight"),
    ],
    ids=str,
)
def test_both_ways_give_the_same_bits(options, autocast, frozen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # fp8: a GPU may have none
    results = []
    for direct in (True, False):
        if not direct:
            monkeypatch.setattr(_operator, "is_plain_eager", lambda *given: False)
        module, x = make(**options)
        for name, param in module.named_parameters():
            param.requires_grad_(name not in frozen)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results.append(step(module, x))
    (direct, is_view), (registered, was_view) = results
    assert is_view == was_view
    for ours, exact in zip(direct, registered, strict=True):
        assert (ours is None and exact is None) or torch.equal(ours, exact)


def test_a_tensor_that_a_transform_left_behind_keeps_its_gradient():
    left, weight = [], torch.randn(7, 5, requires_grad=True)
    torch.func.grad(lambda x: left.append(x * weight) or x.sum())(torch.randn(7, 5))
    rows_of(left[0]).sum().backward()
    assert weight.grad.any()


@pytest.mark.interpreted
def test_a_lazily_negated_tensor_has_its_values(monkeypatch):
    """Its memory, which kernels read, holds the values before the negation."""
    monkeypatch.setattr(chooser, "_requested", "triton")
    x = torch._neg_view(torch.randn(7, 5))
    assert x.is_neg() and torch.equal(rows_of(x), rows_of(x.resolve_neg()))


@pytest.mark.interpreted
@pytest.mark.parametrize("hooked", [False, True])
def test_the_router_adds_to_the_tokens_gradient_unless_a_hook_may_keep_it(hooked, monkeypatch):
    monkeypatch.setattr(chooser, "_requested", "triton")
    module, x = make(torch.float16, capacity_factor=0.0)
    if hooked:
        module.gate.register_full_backward_hook(lambda *given: None)
    routing, _ = module.gate(x, None, RouterCall(module.config, True, len(x)))
    assert (routing.tokens_TM is None) == hooked
    step(module, x)
    exact, leaf = module.double(), x.detach().double().requires_grad_()
    monkeypatch.setattr(chooser, "_requested", "torch")
    step(exact, leaf)
    assert rms_ratio(x.grad, leaf.grad) < 4e-3
