"""What a padded layer asks of a GPU: few operations, 5 to 10 us of the host each, and no reads."""

import importlib

import pytest
import torch
from helpers.dispatched import VIEWS, Dispatched
from helpers.gpu import no_waiting
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import ops
from fairseq_tutel.backends._network import Kept
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
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
@pytest.mark.parametrize("options", ROUTINGS, ids="-".join)
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


LARGE = {"sizes": (5000, 4096, 16384, 8)}  # tokens, model and hidden width, experts


# What the layer documents as reading back to the host does not occur here: ragged rows on several
# ranks, recorded exchange times, custom experts with ragged rows, metrics_dict.
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "routing",
    [
        {"top_k": 2},
        *ROUTINGS[2:7],
        {"capacity_factor": 0.0, "recompute": True},
        LARGE,
        {**LARGE, "capacity_factor": 0},
    ],
    ids="-".join,
)
def test_a_training_step_does_not_wait_for_the_gpu(routing, dtype):
    options = {"capacity_factor": 1.25, "dropout": 0.1, "activation_dropout": 0.1, **routing}
    recompute = options.pop("recompute", False)
    tokens, dim, hidden, experts = options.pop("sizes", (96, 64, 128, 8))
    with torch.device("cuda"):
        groups = build_groups(experts, simulate_world_size=experts if tokens > 96 else 0)
        if not options["capacity_factor"]:
            groups = None  # ragged rows of several ranks are counted on the host
        layer = MoELayer(dim, experts, hidden, groups=groups, **options).to(dtype)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(tokens, dim, device="cuda", dtype=dtype, requires_grad=True)
    pad_mask = torch.zeros(tokens, dtype=torch.bool, device="cuda")

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
    """Names of operations and kernels, also inside of operators, and bytes that each is given."""

    def add(self, name, *tensors):
        there = {id(x): x for x in tree_leaves(tensors) if torch.is_tensor(x)}
        self.names.append((name, sum(x.nbytes for x in there.values())))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name.endswith("_") or not any(out is each for each in args):  # not cast to its own dtype
            self.add(name, args, kwargs, out)
        return out

    def launches(self):
        """What is no view and no operator with launches of its own."""
        free = {*VIEWS, *vars(ops), *(f"{name}_bwd" for name in vars(ops))}
        return [(name, count) for name, count in self.names if name not in free]


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
        recorder.add(self.fn.__name__, args, kwargs)
        with torch.utils._python_dispatch._disable_current_modes():
            for each in args:  # indices that later operations read
                if torch.is_tensor(each) and each.dtype == torch.int32:
                    each.zero_()

    def product_fp32(a, b):  # one product with a dtype of its result, on a GPU
        with torch.utils._python_dispatch._disable_current_modes():
            out = product(a, b)
        recorder.add("mm", a, b, out)
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


def recorded_step(layer, x, inside):
    """Launches of the forward pass and of the backward pass."""
    with inside:
        y, aux = layer(x, return_aux=True)
    forward = inside.launches()
    inside.names.clear()
    gradients = [torch.ones_like(y), torch.ones_like(aux.loss)]
    with inside:
        torch.autograd.backward([y, aux.loss], gradients)
    return forward, inside.launches()


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
    for launches, limit in zip(recorded_step(layer, x, inside), most, strict=True):
        names = [name for name, _ in launches]
        assert not HOST_READS & set(names), names
        assert len(names) <= limit, names


# Tokens, model and hidden width, experts, top-k, options, most bytes. 4.56e9 with passes over tails
# and fc2's bias, and 926e6 with rows and gradients in the order of the rows.
MOVED = {
    "wide": (16384, 2048, 8192, 2, 2, {}, 3.91e9),
    **{mode: (2048, 2048, 768, 128, 8,
              {"expert_network": "swiglu", "activation_memory": mode}, 0.427e9)
       for mode in ("fast", "lean")},
}  # fmt: skip


@pytest.mark.interpreted
@pytest.mark.parametrize("case", MOVED)
def test_bytes_that_a_dropless_layer_moves_beside_the_experts_products(case, inside, monkeypatch):
    """Counted, not measured: kernels do not run, and what they are given is never filled."""
    tiles = importlib.import_module("fairseq_tutel.backends.triton._autotune")
    for name, on_a_gpu in (("TILE_ROWS", (64, 256)), ("COLUMNS", 1024), ("PROGRAMS", 1024)):
        monkeypatch.setattr(tiles, f"ACT_{name}", on_a_gpu)  # each tile has a sum for the biases
    T, M, F, E, K, options, most = MOVED[case]
    with torch.device("meta"):
        layer = MoELayer(M, E, F, top_k=K, capacity_factor=0.0, **options).bfloat16()
    layer = layer.to_empty(device="cpu")
    x = torch.zeros(T, M, dtype=torch.bfloat16, requires_grad=True)
    moved = sum(recorded_step(layer, x, inside), [])
    products = {"_rows_product_kernel", "_weight_gradient_kernel"}
    assert products <= {name for name, _ in moved}
    # what is added to in place counts once
    total = sum(count for name, count in moved if name not in products)
    assert total <= most, moved


@pytest.mark.interpreted
@pytest.mark.parametrize("ragged", [False, True])
def test_the_last_bias_of_lean_experts_costs_one_reading_of_the_gradients(ragged, inside):
    """Not a pass that weighs them, with sums in fp32, and a product of one column: 16 bytes."""
    kernels = importlib.import_module("fairseq_tutel.backends.triton")
    e, N, M, F = 2, 64, 512, 16
    shape, offsets = (e, N), None
    if ragged:
        shape, offsets = (e * N,), torch.tensor([N, 2 * N], dtype=torch.int32)

    def empty(*sizes):
        return torch.zeros(sizes, dtype=torch.bfloat16)

    dy, rows = (ops.Source(empty(*shape, M), offsets) for _ in range(2))
    *params, bias = empty(e, F, M), empty(e, F), empty(e, M, F), empty(e, M)
    kept = Kept(empty(e * N, F), empty(0, F))
    moved = []
    for last in (None, bias):
        with inside:
            given = dy, rows, torch.ones(e * N), kept, (*params, last)
            kernels.network_bwd(*given, activation="gelu", at_once=True)
        moved.append(sum(count for _, count in inside.launches()))
        inside.names.clear()
    assert moved[1] - moved[0] < 2 * dy.values.nbytes, moved


@pytest.mark.interpreted
def test_lean_experts_gather_the_tokens_gradients_inside_of_their_products(inside):
    """No kernel writes them in the order of the rows; the products read each token's once."""
    kernels = importlib.import_module("fairseq_tutel.backends.triton")
    e, T, K, M, F = 2, 48, 4, 512, 16
    offsets = torch.tensor([T * K // 2, T * K], dtype=torch.int32)
    dest_row, pair = (torch.arange(T * K, dtype=torch.int32).view(s) for s in ((T, K), (-1,)))

    def empty(*sizes):
        return torch.zeros(sizes, dtype=torch.bfloat16)

    dy, x = (ops.Source(empty(T, M), offsets, dest_row, pair) for _ in range(2))
    given = dy, x, torch.ones(T * K), Kept(empty(T * K, 2 * F), empty(0, F))
    params = empty(e, 2 * F, M), None, empty(e, M, F), None
    with inside:
        *_, found = kernels.network_bwd(*given, params, activation="swiglu", at_once=True)
    names = [name for name, _ in inside.launches()]
    assert "_token_to_rows_kernel" not in names and "_rows_product_kernel" in names, names
    assert [d.shape for d in found[::2]] == [w.shape for w in params[::2]]
    assert all(d.is_contiguous() for d in found[::2])
    moved = sum(count for _, count in inside.launches())
    # of R x M numbers only the rows' gradients are written
    assert moved < 4 * T * K * M * 2, inside.launches()


@pytest.mark.interpreted
def test_rounding_to_fp8_reads_and_writes_each_number_once(inside):
    """Bytes of one launch: torch's operations move 31 per number."""
    kernels = importlib.import_module("fairseq_tutel.backends.triton")
    rows = torch.zeros(64, 512, dtype=torch.bfloat16)
    with inside:
        kernels.quantize_rows(rows)
    assert inside.launches() == [("_quantize_rows_kernel", 64 * (3 * 512 + 4))]


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
    torch.testing.assert_close(captured, exact_grads, rtol=2e-2, atol=1e-3)
