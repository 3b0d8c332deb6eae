"""The expert network against a loop over rows, block by block and as whole products."""

import ctypes
import signal
import threading
import time

import pytest
import torch
from helpers.assertions import assert_close
from helpers.dispatched import Dispatched
from torch.autograd import gradcheck

from fairseq_tutel import ops
from fairseq_tutel.backends import torch as torch_backend
from fairseq_tutel.backends.torch import _expert_blocks
from fairseq_tutel.backends.torch import _threads as threads_module
from fairseq_tutel.backends.torch import expert_ffn as module
from fairseq_tutel.backends.torch._threads import parallel_for
from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import ExpertRows, Experts, MoELayer
from fairseq_tutel.ops import backend

E, N, M, F = 3, 5, 4, 6
OFFSETS = {"padded": None, "ragged": [4, 4, 9], "full": [2, 9, 12], "empty": [0, 0, 0]}
INTERPRETED = not torch.cuda.is_available()
NAMES = ("rows", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")


def many_blocks(monkeypatch):
    monkeypatch.setattr(_expert_blocks, "_BLOCK_NUMEL", 1)
    monkeypatch.setattr(_expert_blocks, "_MIN_ROWS", 2)


@pytest.fixture(params=["one-block", "many-blocks"])
def blocks(request, monkeypatch):
    """The rows of an expert in one block, as in small layers, or in several."""
    if request.param == "many-blocks":
        many_blocks(monkeypatch)


@pytest.fixture(params=["one-block", "many-blocks", "whole-products", "triton"])
def way(request, monkeypatch):
    """Block by block, or as on a GPU without and with kernels."""
    if request.param == "many-blocks":
        many_blocks(monkeypatch)
    elif request.param != "one-block":
        as_on_a_gpu(request.param, monkeypatch)


def as_on_a_gpu(way, monkeypatch):
    if way == "triton":
        pytest.importorskip("triton.knobs")
        monkeypatch.setattr(backend, "_requested", "triton")
    else:
        monkeypatch.setattr(module, "_by_blocks", lambda rows: False)


def tensors(layout, dtype=torch.float64, requires_grad=True):
    generator = torch.Generator().manual_seed(5)
    rows = (E, N, M) if OFFSETS[layout] is None else (12, M)
    shapes = [rows, (E, F, M), (E, F), (E, M, F), (E, M)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    offsets = OFFSETS[layout]
    if offsets is not None:  # every second number of another tensor: not contiguous
        offsets = torch.tensor(offsets, dtype=torch.int32).repeat_interleave(2)[::2]
    return [x.to(dtype).requires_grad_(requires_grad) for x in made], offsets


def row_by_row(args, offsets, activation):
    """Each row through the network of its expert; rows of nobody are zero."""
    function = {"gelu": torch.nn.functional.gelu, "relu": torch.relu, "tanh": torch.tanh}
    rows, w1, b1, w2, b2 = args
    flat = rows.reshape(-1, M)
    ends = [N * (x + 1) for x in range(E)] if offsets is None else offsets.tolist()
    out = []
    for r, row in enumerate(flat):
        owners = [x for x in range(E) if r < ends[x]]
        if not owners:
            out.append(torch.zeros_like(row))
            continue
        x = owners[0]
        out.append(w2[x] @ function[activation](w1[x] @ row + b1[x]) + b2[x])
    return torch.stack(out).view(rows.shape)


@pytest.mark.parametrize("activation", ["gelu", "relu", "tanh"])
@pytest.mark.parametrize("layout", OFFSETS)
def test_equals_a_loop_over_rows(layout, activation, way):
    dtype = torch.float32 if backend.get_backend() == "triton" else torch.float64
    args, offsets = tensors(layout, dtype)
    d_out = torch.randn(args[0].shape, dtype=dtype)
    want = row_by_row(args, offsets, activation)
    if want.requires_grad:
        want_grads = torch.autograd.grad(want, args, d_out, allow_unused=True)
    else:  # no row belongs to anybody
        want_grads = [None] * len(args)
    got = ops.expert_ffn(*args, activation=activation, offsets=offsets)
    got_grads = torch.autograd.grad(got, args, d_out)
    with torch.no_grad():
        assert torch.equal(ops.expert_ffn(*args, activation=activation, offsets=offsets), got)
    assert_close("out", got, want, dtype)
    for name, a, b in zip(NAMES, got_grads, want_grads, strict=True):
        used = slice(None) if offsets is None or name != "rows" else slice(int(offsets[-1]))
        b = torch.zeros_like(a) if b is None else b
        assert_close(name, a[used], b[used], dtype)
        assert a.stride() == b.contiguous().stride(), name


@pytest.fixture
def threads():
    """Sets torch's threads, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_any_number_of_threads(threads, blocks):
    """Here alone, experts shared out, experts in turn; another number in the backward pass."""
    args, _ = tensors("padded")
    d_out = torch.randn(args[0].shape, dtype=torch.float64)
    options = {"activation": "gelu", "activation_dropout_p": 0.3, "dropout_p": 0.2, "seed": 3}
    results = []
    for forward, backward in ((1, 1), (3, 3), (2, 2), (3, 1)):
        threads(forward)
        out = ops.expert_ffn(*args, **options)
        threads(backward)
        results.append([out, *torch.autograd.grad(out, args, d_out)])
        assert torch.get_num_threads() == backward
    for got in results[1:]:
        for name, a, b in zip(("out", *NAMES), got, results[0], strict=True):
            assert_close(name, a, b, torch.float64)


# end rows of each expert -> parts of the backward pass on 2 threads, as (expert, rows)
UNEVEN = {
    "all rows on one": ([0, 64, 64], [(1, 32), (1, 32)]),
    "most rows on one": ([4, 60, 64], [(0, 4), (1, 28), (1, 28), (2, 4)]),
    "even enough": ([20, 60, 64], [(0, 20), (1, 40), (2, 4)]),
    "rows of nobody": ([2, 62, 62], [(0, 2), (1, 30), (1, 30)]),
}


@pytest.mark.parametrize("case", UNEVEN)
def test_an_overloaded_expert_is_shared_by_the_threads(case, threads, monkeypatch):
    monkeypatch.setattr(_expert_blocks, "_BLOCK_NUMEL", 1)
    monkeypatch.setattr(_expert_blocks, "_MIN_ROWS", 2)
    ends, wanted = UNEVEN[case]
    threads(2)
    offsets = torch.tensor(ends, dtype=torch.int32)
    blocks = _expert_blocks.Blocks.of(torch.empty(64, M), offsets, F, "gelu", (0.0, 0.0), None)
    parts = blocks.parts(M, whole=True)
    assert [(x, sum(b.stop - b.start for b in blocks)) for x, blocks in parts] == wanted

    args, _ = tensors("padded")
    rows = torch.randn(64, M, dtype=torch.float64, requires_grad=True)
    args = [rows, *args[1:]]
    d_out = torch.randn(64, M, dtype=torch.float64)
    results = []
    for count in (2, 2, 1):
        threads(count)
        out = ops.expert_ffn(*args, activation="gelu", offsets=offsets)
        results.append([out, *torch.autograd.grad(out, args, d_out)])
    want = row_by_row(args, offsets, "gelu")
    results.append([want, *torch.autograd.grad(want, args, d_out)])
    for name, first, again, alone, loop in zip(("out", *NAMES), *results, strict=True):
        assert torch.equal(first, again), name
        assert_close(name, first, alone, torch.float64)
        assert_close(name, first, loop, torch.float64)


def test_experts_run_beside_each_other(threads):
    """Each part once, on as many threads as torch has, each of them without threads of its own."""
    threads(2)
    seen, both = [], threading.Barrier(2, timeout=30)
    in_parallel = ctypes.CDLL(torch._C.__file__).omp_in_parallel

    def run(parts):
        both.wait()
        mine = list(parts)
        seen.append((threading.get_native_id(), mine, in_parallel(), torch.is_grad_enabled()))

    for _ in range(3):
        parallel_for(run, 4)
    assert sorted(part for _, mine, *_ in seen for part in mine) == sorted(3 * [0, 1, 2, 3])
    # OpenMP's own, which spin for a while after each loop and would be in the way of others
    assert len({thread for thread, *_ in seen}) == 2
    assert threading.get_native_id() in {thread for thread, *_ in seen}
    assert [rest for *_, rest in seen] == 6 * [False] and {n for *_, n, _ in seen} == {1}
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("count, openmp", [(0, True), (1, True), (3, True), (4, False)])
def test_few_parts_stay_on_this_thread(threads, count, openmp, monkeypatch):
    """Then torch's own threads work inside the products; all parts, if torch has no OpenMP."""
    threads(2)
    if not openmp:
        monkeypatch.setattr(threads_module, "_openmp_parallel", lambda: None)
    seen = []
    parallel_for(lambda parts: seen.append((threading.get_ident(), list(parts))), count)
    assert (threading.get_ident(), list(range(count))) in seen or count == 0


def test_an_error_on_a_thread_is_raised_here(threads):
    threads(2)

    def run(parts):
        for part in parts:
            raise RuntimeError(f"part {part}")

    with pytest.raises(RuntimeError, match="part"):
        parallel_for(run, 4)


@pytest.mark.parametrize("cause", ["error", "interrupt"])
def test_no_thread_works_on_after_an_error(cause, threads):
    """Nobody writes into a buffer that the caller has given up, and nobody takes another part."""
    threads(2)
    failed, running, ended = threading.Event(), threading.Event(), []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def run(parts):
        for part in parts:
            if part == 0:
                running.wait(10)
                failed.set()
                if cause == "error":
                    raise RuntimeError("part 0")
                signal.raise_signal(signal.SIGINT)
            else:
                running.set()
                failed.wait(10)
                time.sleep(0.2)
            ended.append(part)

    try:
        with pytest.raises(RuntimeError if cause == "error" else KeyboardInterrupt):
            parallel_for(run, 1000)
    finally:
        signal.signal(signal.SIGINT, before)
    count = len(ended)
    assert 1 <= count < 1000
    time.sleep(0.4)
    assert len(ended) == count


def test_inference_mode(threads):
    threads(3)
    args, _ = tensors("padded", requires_grad=False)
    want = ops.expert_ffn(*args, activation="gelu")
    with torch.inference_mode():
        got = ops.expert_ffn(*args, activation="gelu")
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_rounds_products_only(layout, dtype, way):
    if dtype == torch.bfloat16 and backend.get_backend() == "triton" and INTERPRETED:
        pytest.skip("the interpreter truncates to bf16")
    """Products in the rows' dtype, bias and activation in fp32."""
    args, offsets = tensors(layout, dtype)
    wide = [x.detach().double().requires_grad_() for x in args]
    d_out = torch.randn(args[0].shape).to(dtype)
    want = row_by_row(wide, offsets, "gelu")
    want_grads = torch.autograd.grad(want, wide, d_out.double())
    got = ops.expert_ffn(*args, activation="gelu", offsets=offsets)
    got_grads = torch.autograd.grad(got, args, d_out)
    assert got.dtype == dtype
    assert_close("out", got, want, dtype)
    for name, a, b in zip(NAMES, got_grads, want_grads, strict=True):
        used = slice(None) if offsets is None or name != "rows" else slice(int(offsets[-1]))
        assert a.dtype == dtype
        assert_close(name, a[used], b[used], dtype)


@pytest.mark.parametrize("activation", sorted(torch_backend.ACTIVATIONS))
@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_gradcheck_with_dropout(layout, activation):
    args, offsets = tensors(layout)
    options = {"activation": activation, "offsets": offsets, "activation_dropout_p": 0.3,
               "dropout_p": 0.4, "seed": 3}  # fmt: skip
    assert gradcheck(lambda *x: ops.expert_ffn(*x, **options), args)


def test_dropout_scales_what_it_keeps():
    args, _ = tensors("padded", requires_grad=False)
    kept = ops.expert_ffn(*args, activation="gelu")
    dropped = ops.expert_ffn(*args, activation="gelu", dropout_p=0.5, seed=7)
    zero = dropped == 0
    assert 0 < zero.sum() < zero.numel()
    torch.testing.assert_close(dropped[~zero], 2 * kept[~zero])
    again = ops.expert_ffn(*args, activation="gelu", dropout_p=0.5, seed=7)
    assert torch.equal(dropped, again)
    assert not torch.equal(dropped, ops.expert_ffn(*args, activation="gelu", dropout_p=0.5, seed=8))


def test_unused_rows_may_hold_anything():
    args, offsets = tensors("ragged", requires_grad=False)
    args[0][9:] = float("nan")
    args[0].requires_grad_()
    out = ops.expert_ffn(*args, activation="gelu", offsets=offsets)
    d_out = torch.ones_like(out)
    d_out[9:] = float("nan")
    (d_rows,) = torch.autograd.grad(out, args[0], d_out)
    assert (out[9:] == 0).all() and (d_rows[9:] == 0).all()
    assert out[:9].isfinite().all() and d_rows[:9].isfinite().all()


def test_only_needed_gradients_are_computed(monkeypatch):
    seen = []
    original = torch_backend.expert_ffn_bwd

    def spy(*args, **kwargs):
        seen.append((kwargs["needs_rows"], kwargs["needs_params"]))
        return original(*args, **kwargs)

    monkeypatch.setattr(torch_backend, "expert_ffn_bwd", spy)
    args, _ = tensors("padded", requires_grad=False)
    for wanted in ([0], [2], [0, 1]):
        leaves = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(args)]
        ops.expert_ffn(*leaves, activation="gelu").sum().backward()
        assert [x.grad is not None for x in leaves] == [i in wanted for i in range(5)]
    assert seen == [(True, False), (False, True), (True, True)]


def test_nothing_is_kept_without_gradients(monkeypatch):
    seen = []
    original = torch_backend.expert_ffn_fwd

    def spy(*args, **kwargs):
        out, hidden, active = original(*args, **kwargs)
        seen.append((hidden.numel(), active.numel()))
        return out, hidden, active

    monkeypatch.setattr(torch_backend, "expert_ffn_fwd", spy)
    args, _ = tensors("padded")
    with torch.no_grad():
        quiet = ops.expert_ffn(*args, activation="gelu")
    assert torch.equal(quiet, ops.expert_ffn(*args, activation="gelu"))
    assert seen == [(0, 0), (E * N * F, 0)]


@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_opcheck(layout):
    args, offsets = tensors(layout, torch.float32)
    op, bwd = torch.ops.fairseq_tutel.expert_ffn, torch.ops.fairseq_tutel.expert_ffn_bwd
    rest = (offsets, torch.tensor(3), "gelu", 0.2, 0.1)
    # not test_aot_dispatch_dynamic: it adds up all outputs, and the second one has no gradient
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op.default, (*args, *rest, True), test_utils=tests)
    plain = [x.detach() for x in args]
    _, *saved = op(*plain, *rest, True)
    for needs in ((True, True), (True, False), (False, True)):
        call = (torch.randn_like(plain[0]), plain[0], *saved, *plain[1:], *rest, *needs)
        torch.library.opcheck(bwd.default, call)


@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_rows_of_any_strides(layout):
    """What leaves is contiguous, as the fake implementation says."""
    args, offsets = tensors(layout, torch.float32, requires_grad=False)
    want = ops.expert_ffn(*args, activation="gelu", offsets=offsets)
    strided = [args[0].transpose(-1, -2).contiguous().transpose(-1, -2), *args[1:]]
    assert not strided[0].is_contiguous()
    op, bwd = torch.ops.fairseq_tutel.expert_ffn, torch.ops.fairseq_tutel.expert_ffn_bwd
    rest = (offsets, None, "gelu", 0.0, 0.0)
    torch.library.opcheck(op.default, (*strided, *rest, True), test_utils="test_faketensor")
    out, *saved = op(*strided, *rest, True)
    assert out.is_contiguous()
    torch.testing.assert_close(out, want)
    d_out = torch.randn_like(strided[0])
    call = (d_out, strided[0], *saved, *strided[1:], *rest, True, True)
    torch.library.opcheck(bwd.default, call)


def test_compiles_without_a_graph_break():
    torch._dynamo.reset()
    args, _ = tensors("padded", torch.float32)
    d_out = torch.randn(args[0].shape)

    def run(*x):
        return ops.expert_ffn(*x, activation="gelu")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*args), args, d_out)
    want = torch.autograd.grad(run(*args), args, d_out)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "sigmoid"}, "sigmoid"),
        ({"dropout_p": 1.0}, "dropout_p must be in"),
        ({"rows": torch.randn(E, N, M + 1)}, r"\(experts, rows, 4\)"),
        ({"fc2_bias": torch.randn(E, F)}, r"fc2_bias must be \(3, 4\), got \(3, 6\)"),
        ({"offsets": torch.tensor([1, 2, 3])}, "with offsets True"),
    ],
)
def test_errors(changes, message):
    args, _ = tensors("padded", torch.float32)
    call = {**dict(zip(NAMES, args, strict=True)), "activation": "gelu", **changes}
    with pytest.raises(ValueError, match=message):
        ops.expert_ffn(**call)


@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_experts_are_the_same_either_way(layout, monkeypatch):
    """Block by block, as whole products, and with the kernels; but dropout's masks differ."""
    experts = Experts(range(E), M, F, seed=1)
    args, offsets = tensors(layout, torch.float32, requires_grad=False)
    used = slice(None) if offsets is None else slice(int(offsets[-1]))
    results = []
    for way in ("blocks", "whole-products", "triton"):
        if way != "blocks":
            as_on_a_gpu(way, monkeypatch)
        x = args[0].clone().requires_grad_()
        out = experts(ExpertRows(x, offsets))[used]
        experts.zero_grad()
        out.square().sum().backward()
        results.append([out, x.grad[used], *(p.grad for p in experts.parameters())])
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            assert_close("value", a, b, torch.float32)


@pytest.mark.parametrize("way", ["whole-products", "triton"])
@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_the_two_masks_of_a_gpu_differ_and_both_gradients_use_them(layout, way, monkeypatch):
    """With fc2 as the identity, what one mask drops the other must not drop too."""
    as_on_a_gpu(way, monkeypatch)
    size, rows = 32, 64
    eye, zero = torch.eye(size).expand(1, -1, -1), torch.zeros(1, size)
    x = torch.ones(1, rows, size) if layout == "padded" else torch.ones(rows, size)
    x.requires_grad_()
    offsets = None if layout == "padded" else torch.tensor([rows], dtype=torch.int32)
    options = {"activation": "linear", "offsets": offsets, "seed": 5}
    one = ops.expert_ffn(x, eye, zero, eye, zero, activation_dropout_p=0.5, **options)
    two = ops.expert_ffn(x, eye, zero, eye, zero, dropout_p=0.5, **options)
    both = ops.expert_ffn(
        x, eye, zero, eye, zero, activation_dropout_p=0.5, dropout_p=0.5, **options
    )
    assert abs((both != 0).float().mean() - 0.25) < 0.03
    torch.testing.assert_close(both, one * two)
    both.sum().backward()
    torch.testing.assert_close(x.grad, both.detach())


def test_weights_are_drawn_on_the_cpu_whatever_the_default_device():
    """A CPU generator fills no tensor of another device."""
    want = Experts(range(E), M, F, seed=1)
    experts = Experts(range(E), M, F, seed=2)
    with torch.device("meta"):
        experts.reset_parameters(1)
        assert Experts(range(E), M, F).fc1_weight.is_meta
    for a, b in zip(experts.parameters(), want.parameters(), strict=True):
        assert torch.equal(a, b)


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
def test_only_a_simulated_rank_draws_its_weights_where_they_are(device):
    for ranks in (0, E):
        groups = build_groups(E, simulate_world_size=ranks)
        with torch.device(device):
            layer = MoELayer(M, E, F, groups=groups, seed=1)
        assert layer.experts.draw_on_cpu == (ranks == 0)
        same = device == "cpu" or ranks == 0
        want = Experts(groups.local_experts, M, F, seed=1)
        for param, other in zip(layer.experts.parameters(), want.parameters(), strict=True):
            assert param.device.type == device and torch.equal(param.cpu(), other) == same
            assert 0 < param.abs().max() <= M**-0.5  # the larger bound of the two


def test_a_gradient_is_added_as_it_comes():
    """One of another layout would be copied, once per expert weight and step."""
    for device in ("cpu", "meta"):
        experts = Experts(range(E), M, F, seed=1).to(device)
        out = experts(ExpertRows(torch.randn(E, N, M, device=device)))
        with Dispatched() as seen:
            out.sum().backward()
        assert "expert_ffn_bwd" in seen.names and "clone" not in seen.names
        assert all(p.grad.stride() == p.stride() for p in experts.parameters())
