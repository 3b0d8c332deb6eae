"""What a padded layer asks of a GPU: few operations, 5 to 10 us of the host each, and no reads."""

import importlib

import pytest
import torch
from helpers.dispatched import Dispatched
from torch._subclasses.fake_tensor import FakeTensorMode

from fairseq_tutel import ops
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.ops import backend as chooser

MOST = 25  # dispatched operations each way, views included
# What launches nothing, and what waits for the device.
VIEWS = {"view", "_unsafe_view", "transpose", "t", "select", "slice", "detach", "alias", "split",
         "expand", "unsqueeze", "promote_types", "empty", "new_empty", "empty_like",
         "empty_strided"}  # fmt: skip
HOST_READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "unique",
              "masked_select"}  # fmt: skip


def make(device, dtype=torch.bfloat16, dim=64, **options):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            layer = MoELayer(dim, 8, 2 * dim, seed=1, **options)
            return layer, torch.randn(32, dim, requires_grad=True)
    finally:
        torch.set_default_dtype(before)


def step(layer, x, between=lambda: None):
    """(operations of the forward pass, of the backward pass), outermost ones."""
    with Dispatched() as forward:
        y, aux = layer(x, return_aux=True)
    between()
    gradients = [torch.ones_like(y), torch.ones_like(aux.loss)]
    with Dispatched() as backward:
        torch.autograd.backward([y, aux.loss], gradients)
    return forward.names, backward.names


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1},
        {"balance_over": "all"},
        {"dropout": 0.1, "activation_dropout": 0.1},
        {"normalize_before_dropping": True, "eval_capacity_factor": 1.0},
        {"capacity_factor": 0.0},
    ],
    ids=lambda options: "-".join(options) or "top2",
)
def test_few_operations_are_dispatched(options):
    layer, x = make("meta", **options)
    forward, backward = step(layer, x)
    extra = 5 if "normalize_before_dropping" in options else 0
    assert len(forward) <= MOST + extra, forward
    assert len(backward) <= MOST + 2 * extra, backward
    assert {"gate_logits", "expert_ffn", "dispatch", "combine"} <= set(forward)
    assert all(p.grad.stride() == p.stride() for p in layer.parameters())
    assert "clone" not in backward


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 2, "balance_over": "all"},
        {"top_k": 1, "dropout": 0.1, "activation_dropout": 0.1},
        {"top_k": 2, "batch_prioritized": True, "second_expert_policy": "random"},
        {"top_k": 3, "gate_noise": 1.0, "input_jitter": 0.01, "input_dropout": 0.1},
        {"top_k": 2, "second_expert_policy": "sampling", "z_loss_weight": 0.1},
        {"top_k": 2, "gate_noise": 1.0, "load_importance_loss": True},
        {"top_k": 2, "router": "cosine"},
        {"top_k": 2, "load_bias": "quantile", "balance_over": "all"},
        {"top_k": 2, "load_bias": "sign", "score_function": "sigmoid", "route_scale": 2.0},
        {"top_k": 2, "balance_scope": "sequence", "balance_choices": "all"},
        {"top_k": 2, "overflow_rerouting": 2, "drop_policy": "probability"},
        {"top_k": 2, "capacity_factor": 0.0},
    ],
    ids=lambda options: "-".join(options),
)
def test_nothing_is_read_by_the_host(options, autocast, device):
    """A fake tensor has a shape and no values: reading one is an error."""
    with FakeTensorMode():
        layer, x = make(device, torch.float32 if autocast else torch.bfloat16, **options)
        pad_mask = torch.zeros(32, dtype=torch.bool, device=device)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            y, aux = layer(x, pad_mask=pad_mask, return_aux=True)
        (y.float().square().mean() + 0.01 * aux.loss).backward()
        with pytest.raises(Exception, match="_local_scalar_dense"):
            aux.load_E.sum().item()
        assert x.grad.shape == x.shape and x.grad.device.type == device


@pytest.fixture
def inside(monkeypatch, backend):
    """Records what the Triton backend's functions do; as on a GPU, with interpreted kernels."""
    from triton.runtime.interpreter import GridExecutor

    recorder = Dispatched()
    choose, launch = chooser.implementation, GridExecutor.__call__

    def implementation(name, tensor):
        function = choose(name, tensor)

        def recorded(*args, **options):
            with recorder:
                return function(*args, **options)

        return recorded

    def launched(self, *args, **kwargs):
        recorder.names.append(self.fn.__name__)
        with torch.utils._python_dispatch._disable_current_modes():
            return launch(self, *args, **kwargs)

    backend("triton")
    monkeypatch.setattr(GridExecutor, "__call__", launched)
    for name in ("dispatch", "expert_ffn", "gate_logits", "gating", "rows", "slots"):
        module = importlib.import_module(f"fairseq_tutel.ops.{name}")
        monkeypatch.setattr(module, "implementation", implementation)
    return recorder


@pytest.mark.interpreted
@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.0}], ids=["padded", "dropless"])
def test_the_operators_themselves_launch_little_and_read_nothing(options, inside):
    """All operations and kernels, those inside of the operators counted too."""
    layer, x = make("cpu", dim=16, **options)
    launches, first = [], []

    def between():
        first.extend(inside.names)
        inside.names.clear()

    forward, backward = step(layer, x, between)
    backward = [n for n in backward if not n.endswith("_bwd")]
    for names in (forward + first, backward + inside.names):
        assert not HOST_READS & set(names), names
        launches.append([n for n in names if n not in {*VIEWS, *ops.__all__}])
    # ragged rows need a place per expert: sum, minimum and running sum of the counts
    extra = 4 if options else 0
    assert len(launches[0]) <= 22 + extra, launches[0]
    assert len(launches[1]) <= 28, launches[1]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{}, {"capacity_factor": 0.0}, {"dropout": 0.2}],
    ids=["padded", "dropless", "dropout"],
)
def test_a_cuda_graph_replays_a_layer(options):
    """New tokens give what they give without a graph; with dropout, each replay a new mask."""
    layer, x = make("cuda", **options)
    other = torch.randn_like(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles and tunes
            layer.zero_grad(set_to_none=True)
            layer(x).sum().backward()
    torch.cuda.synchronize()
    layer.zero_grad(set_to_none=True)
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = layer(x)
        y.sum().backward()
    with torch.no_grad():
        x.copy_(other)
    graph.replay()
    first = y.clone()
    if "dropout" in options:
        graph.replay()
        assert not torch.equal(first, y)
        return
    captured = [x.grad.clone(), *(p.grad.clone() for p in layer.parameters())]
    layer.zero_grad(set_to_none=True)
    again = other.detach().clone().requires_grad_()
    want = layer(again)
    want.sum().backward()
    assert torch.equal(first, want)
    exact_grads = [again.grad, *(p.grad for p in layer.parameters())]
    for got, exact in zip(captured, exact_grads, strict=True):
        torch.testing.assert_close(got, exact, rtol=2e-2, atol=1e-3)
