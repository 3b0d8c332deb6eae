"""What a padded layer asks of a GPU: few operations, 5 to 10 us of the host each, and no reads."""

import importlib

import pytest
import torch
from helpers.dispatched import VIEWS, Dispatched
from helpers.gpu import no_waiting
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import ops
from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.ops import backend as chooser

MOST = 25  # dispatched operations each way, views included
# what waits for the device
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


def step(layer, x):
    """(operations of the forward pass, of the backward pass), outermost ones."""
    with Dispatched() as forward:
        y, aux = layer(x, return_aux=True)
    gradients = [torch.ones_like(y), torch.ones_like(aux.loss)]
    with Dispatched() as backward:
        torch.autograd.backward([y, aux.loss], gradients)
    return forward.names, backward.names


FEW = [
    {}, {"top_k": 1}, {"balance_over": "all"}, {"dropout": 0.1, "activation_dropout": 0.1},
    {"normalize_before_dropping": True, "eval_capacity_factor": 1.0}, {"capacity_factor": 0.0},
]  # fmt: skip


@pytest.mark.parametrize("options", FEW, ids=lambda options: "-".join(options) or "top2")
def test_few_operations_are_dispatched(options):
    layer, x = make("meta", **options)
    forward, backward = step(layer, x)
    extra = 5 if "normalize_before_dropping" in options else 0
    assert len(forward) <= MOST + extra, forward
    assert len(backward) <= MOST + 2 * extra, backward
    operators = {"gate_logits", "topk_gating", "assign_rows", "expert_ffn"}
    assert operators <= set(forward)
    assert {f"{name}_bwd" for name in operators} <= set(backward)
    assert all(p.grad.stride() == p.stride() for p in layer.parameters())
    assert "clone" not in backward


ROUTINGS = [
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
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("options", ROUTINGS, ids="-".join)
def test_nothing_is_read_by_the_host(options, device):
    """A fake tensor has a shape and no values: reading one is an error."""
    autocast = ROUTINGS.index(options) % 2 == 1
    with FakeTensorMode():
        layer, x = make(device, torch.float32 if autocast else torch.bfloat16, **options)
        pad_mask = torch.zeros(32, dtype=torch.bool, device=device)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            y, aux = layer(x, pad_mask=pad_mask, return_aux=True)
        (y.float().square().mean() + 0.01 * aux.loss).backward()
        with pytest.raises(Exception, match="_local_scalar_dense"):
            aux.load_E.sum().item()
        assert x.grad.shape == x.shape and x.grad.device.type == device


LARGE = {"sizes": (5000, 4096, 16384, 8)}  # tokens, model and hidden width, experts


WAITING = [
    {"top_k": 2}, *ROUTINGS[2:7], {"capacity_factor": 0.0, "recompute": True}, LARGE,
    {**LARGE, "capacity_factor": 0},
]  # fmt: skip


# What the layer documents as reading back to the host does not occur here: ragged rows on several
# ranks, recorded exchange times, custom experts with ragged rows, metrics_dict.
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("routing", WAITING, ids="-".join)
def test_a_training_step_does_not_wait_for_the_gpu(routing, dtype):
    options = {"capacity_factor": 1.25, "dropout": 0.1, "activation_dropout": 0.1, **routing}
    recompute = options.pop("recompute", False)
    tokens, dim, hidden, experts = options.pop("sizes", (96, 64, 128, 8))
    groups = build_groups(experts, simulate_world_size=experts if tokens > 96 else 0)
    if not options["capacity_factor"]:
        groups = None  # ragged rows of several ranks are counted on the host
    with torch.device("cuda"):
        layer = MoELayer(dim, experts, hidden, groups=groups, **options).to(dtype)
        x = torch.randn(tokens, dim, dtype=dtype, requires_grad=True)
        pad_mask = torch.zeros(tokens, dtype=torch.bool)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def run(x):
        y, aux = layer(x, pad_mask=pad_mask, return_aux=True)
        return y, aux.loss

    def step():
        optimizer.zero_grad()
        y, loss = checkpoint(run, x, use_reentrant=False) if recompute else run(x)
        (y.float().square().mean() + 0.01 * loss).backward()
        optimizer.step()

    step()  # compiles the kernels
    with no_waiting():
        step()


class Launches(Dispatched):
    """Names of operations and kernels, also inside of operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name.endswith("_") or not any(out is each for each in args):  # not cast to its own dtype
            self.names.append(name)
        return out

    def launches(self):
        """What is no view and no operator with launches of its own."""
        free = {*VIEWS, *vars(ops), *(f"{name}_bwd" for name in vars(ops))}
        found, self.names[:] = [name for name in self.names if name not in free], []
        return found


@pytest.fixture
def inside(monkeypatch, backend):
    """Records what the Triton backend's functions do, as on a GPU; kernels compute nothing."""
    from triton.runtime.interpreter import GridExecutor

    recorder = Launches()
    choose = chooser.implementation
    module = importlib.import_module("fairseq_tutel.backends.triton.gate_logits")
    product = module._product_fp32

    def implementation(name, tensor):
        function = choose(name, tensor)

        def recorded(*args, **options):
            with torch.utils._python_dispatch._disable_current_modes(), recorder:
                return function(*args, **options)

        return recorded

    def launched(self, *args, **kwargs):
        recorder.names.append(self.fn.__name__)

    def product_fp32(a, b):  # one product with a dtype of its result, on a GPU
        with torch.utils._python_dispatch._disable_current_modes():
            out = product(a, b)
        recorder.names.append("mm")
        return out

    backend("triton")
    monkeypatch.setattr(module, "_product_fp32", product_fp32)
    monkeypatch.setattr(GridExecutor, "__call__", launched)
    operators = ("dispatch", "expert_ffn", "gate_logits", "gating", "rows", "slots")
    for name in operators:
        module = importlib.import_module(f"fairseq_tutel.ops.{name}")
        monkeypatch.setattr(module, "implementation", implementation)
    gate = importlib.import_module("fairseq_tutel.ops.gate_logits")
    monkeypatch.setattr(gate, "is_plain_eager", lambda *given: True)  # as without the recorder
    return recorder


# With a linear gate on one rank. Forward: the gate's product, top-k, its sums, three for slots and
# rows, the balance loss, dispatch, two products, the activation between them, combine.
# Backward: one of the loss, combine, fc2's bias, four products, two of the activation, dispatch,
# weights, gating, four of the gate, one of which adds to the tokens' gradient. Gated: no biases.
LAUNCHES = {"ffn": (12, 16), "swiglu": (12, 14)}


@pytest.mark.interpreted
@pytest.mark.parametrize(("network", "dtype"), [("ffn", torch.float16), ("swiglu", torch.bfloat16)])
@pytest.mark.parametrize("factor", [1.0, 0.0], ids=["padded", "dropless"])
def test_the_operators_themselves_launch_little_and_read_nothing(network, factor, dtype, inside):
    """All operations and kernels, those inside of the operators counted too."""
    layer, x = make("cpu", dtype, dim=16, capacity_factor=factor, expert_network=network)
    most = list(LAUNCHES[network])
    if dtype == torch.float16:  # the largest gradient of the gate, and scaling back
        most[1] += 2
    with inside:
        y, aux = layer(x, return_aux=True)
    names = [inside.launches()]
    gradients = [torch.ones_like(y), torch.ones_like(aux.loss)]
    with inside:
        torch.autograd.backward([y, aux.loss], gradients)
    names.append(inside.launches())
    assert not HOST_READS & set(sum(names, [])), names
    assert all(len(each) <= limit for each, limit in zip(names, most, strict=True)), names


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.0}, {"dropout": 0.2}], ids=str)
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
    torch.testing.assert_close(captured, exact_grads, rtol=2e-2, atol=1e-3)
