"""The operator of the experts' network against a loop over rows; routed: test_routed_ffn.py."""

import pytest
import torch
from helpers import naive
from helpers.assertions import assert_close, rms_ratio
from helpers.dispatched import spied
from torch.autograd import gradcheck

from fairseq_tutel import ops
from fairseq_tutel.backends import torch as torch_backend
from fairseq_tutel.backends.torch import _expert_rows
from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import Experts, MoELayer

E, N, M, F = 3, 5, 4, 6
OFFSETS = {"padded": None, "ragged": [4, 4, 9], "full": [2, 9, 12], "empty": [0, 0, 0]}
GATED = ("swiglu", "geglu")
FORMULAS = ("gelu", "gelu_accurate", "relu_squared", "silu", "relu", "tanh", *GATED)
NAMES = ("rows", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")


@pytest.fixture(params=["one-block", "many-blocks"])
def way(request, monkeypatch):
    """The rows of an expert in one block, as in small layers, or in several."""
    if request.param == "many-blocks":
        monkeypatch.setattr(_expert_rows, "_PART_NUMEL", 1)
        monkeypatch.setattr(_expert_rows, "_MIN_ROWS", 2)


def tensors(layout, dtype=torch.float64, requires_grad=True, halves=1, biased=True):
    generator = torch.Generator().manual_seed(5)
    rows = (E, N, M) if OFFSETS[layout] is None else (12, M)
    shapes = [rows, (E, halves * F, M), (E, halves * F), (E, M, F), (E, M)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    offsets = OFFSETS[layout]
    if offsets is not None:  # every second number of another tensor: not contiguous
        offsets = torch.tensor(offsets, dtype=torch.int32).repeat_interleave(2)[::2]
    made = [x.to(dtype).requires_grad_(requires_grad) for x in made]
    return (made if biased else [*made[:2], None, made[3], None]), offsets


def row_by_row(args, offsets, activation):
    """Each row through the network of its expert; rows of nobody are zero here."""
    rows, w1, b1, w2, b2 = args
    flat, count = rows.reshape(-1, rows.shape[-1]), len(w1)
    size = len(flat) // count
    ends = range(size, len(flat) + 1, size) if offsets is None else offsets.tolist()
    out = []
    for r, row in enumerate(flat):
        owners = [x for x in range(count) if r < ends[x]]
        if not owners:
            out.append(torch.zeros_like(row))
            continue
        x = owners[0]
        z = w1[x] @ row if b1 is None else w1[x] @ row + b1[x]
        hidden = naive.ACTIVATIONS[activation](z)
        out.append(w2[x] @ hidden if b2 is None else w2[x] @ hidden + b2[x])
    return torch.stack(out).view(rows.shape)


LOOPED = [
    *((layout, "gelu", torch.float64, True) for layout in OFFSETS),
    # in fp32 torch has other functions than in fp64
    *((layout, activation, torch.float32, True) for layout in ("padded", "ragged")
      for activation in FORMULAS if activation != "gelu"),
    *((layout, "gelu", half, True) for layout in ("padded", "ragged")
      for half in (torch.float32, torch.float16, torch.bfloat16)),
    *(("ragged", activation, half, True) for activation in GATED
      for half in (torch.float16, torch.bfloat16)),
    *((layout, activation, torch.float64, biased) for layout in ("padded", "ragged", "empty")
      for activation in GATED for biased in (False, True)),
]  # fmt: skip


@pytest.mark.parametrize("case", LOOPED, ids=str)
def test_equals_a_loop_over_rows(case, way):
    """Products in the rows' dtype, bias and activation in fp32 at least; the loop in fp64.

    In kernels: test_product.py.
    """
    layout, activation, dtype, biased = case
    args, offsets = tensors(layout, dtype, halves=1 + (activation in GATED), biased=biased)
    torch.manual_seed(6)  # of d_out: sums of few rows may cancel, which no tolerance covers
    given = {name: x for name, x in zip(NAMES, args, strict=True) if x is not None}
    wide = [None if x is None else x.detach().double().requires_grad_() for x in args]
    d_out = torch.randn(args[0].shape, dtype=torch.float64).to(dtype)
    want = row_by_row(wide, offsets, activation)
    if want.requires_grad:  # some row belongs to somebody
        want.backward(d_out.double())
    got = ops.expert_ffn(*args, activation=activation, offsets=offsets)
    got.backward(d_out)
    with torch.no_grad():
        evaluated = ops.expert_ffn(*args, activation=activation, offsets=offsets)
    assert got.dtype == evaluated.dtype == dtype
    used = slice(None) if offsets is None else slice(int(offsets[-1]))
    assert_close("evaluated", evaluated[used], want[used], dtype)
    assert_close("out", got[used], want[used], dtype)
    for (name, leaf), wanted in zip(given.items(), filter(torch.is_tensor, wide), strict=True):
        rows = used if name == "rows" else slice(None)
        exact = torch.zeros_like(wanted) if wanted.grad is None else wanted.grad
        assert_close(name, leaf.grad[rows], exact[rows], dtype)
        assert leaf.grad.stride() == leaf.stride(), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gated_products_that_other_libraries_take(dtype):
    """Sizes at which torch hands halves to oneDNN: both halves of an expert are one product."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(100, 64), (3, 192, 64), (3, 192), (3, 64, 96), (3, 64)]
    args = [torch.randn(shape, generator=generator).to(dtype) / 8 for shape in shapes]
    offsets = torch.tensor([70, 70, 98]).int()
    got = ops.expert_ffn(*args, activation="swiglu", offsets=offsets)
    want = row_by_row([tensor.double() for tensor in args], offsets, "swiglu")
    assert_close("out", got[:98], want[:98], dtype)


def test_any_number_of_threads(way):
    """The same masks on each, and another number in the backward pass; the same bits again."""
    args, _ = tensors("padded")
    d_out = torch.randn(args[0].shape, dtype=torch.float64)
    options = {"activation": "gelu", "activation_dropout_p": 0.3, "dropout_p": 0.2, "seed": 3}
    results, before = [], torch.get_num_threads()
    for forward, backward in ((1, 1), (1, 1), (3, 3), (3, 1)):
        torch.set_num_threads(forward)
        out = ops.expert_ffn(*args, **options)
        torch.set_num_threads(backward)
        results.append([out, *torch.autograd.grad(out, args, d_out)])
        assert torch.get_num_threads() == backward
    torch.set_num_threads(before)
    assert all(map(torch.equal, results[0], results[1]))
    for got in results[1:]:
        for name, a, b in zip(("out", *NAMES), got, results[0], strict=True):
            assert_close(name, a, b, torch.float64)


def test_a_gradient_of_gated_rows_is_rounded_once():
    """Both halves are summed first: each alone is too large for fp16."""
    numbers = ([[[1.0]]], [[[10.0], [-5.0]]], [[0.0, 15.0]], [[[1.0]]], [[0.0]])
    args = [torch.tensor(each).half().requires_grad_() for each in numbers]
    out = ops.expert_ffn(*args, activation="swiglu")
    out.backward(torch.full_like(out, 1000))
    wide = [torch.tensor(each).double().requires_grad_() for each in numbers]
    row_by_row(wide, None, "swiglu").backward(torch.full((1, 1, 1), 1000.0).double())
    torch.testing.assert_close(args[0].grad.double(), wide[0].grad, rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradients_of_many_rows_are_as_exact_as_one_product(dtype):
    """Weights of zeros and ones round no value, so all errors are those of the last products."""
    num_rows, model_dim, hidden_dim = 16384, 8, 256
    generator = torch.Generator().manual_seed(1)
    rows, d_out = torch.randn((2, 1, num_rows, model_dim), generator=generator).to(dtype)
    w1 = torch.eye(model_dim).repeat(hidden_dim // model_dim, 1)[None].to(dtype)
    w2 = torch.eye(model_dim, hidden_dim)[None].to(dtype)
    params = w1, torch.zeros(1, hidden_dim).to(dtype), w2, torch.zeros(1, model_dim).to(dtype)
    weights = w1.requires_grad_(), w2.requires_grad_()
    out = ops.expert_ffn(rows, *params, activation="linear")
    d_w1, d_w2 = torch.autograd.grad(out, weights, d_out)
    x, dy, w1, w2 = (t[0].detach() for t in (rows, d_out, w1, w2))
    for got, a, b in ((d_w1, dy @ w2, x), (d_w2, dy, x @ w1.mT)):
        want = a.double().mT @ b.double()
        error, of_one_product = rms_ratio(got[0], want), rms_ratio(a.mT @ b, want)
        assert error <= 1.2 * of_one_product


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_many_chunks_are_rounded_once(dtype):
    """As exact as those of one; added up chunk by chunk they are not. In fp64: test_product.py."""
    (rows, *params), _ = tensors("padded", dtype, requires_grad=False)
    options, d_out = ops.FFNOptions("relu", (0.0, 0.0)), torch.rand_like(rows)
    source = ops.Source(rows, None)
    _, saved = ops.network_fwd(source, params, options, ops.ActivationMemory(), None)
    *_, chunk = ops.network_bwd(source.like(d_out), source, None, saved, params, options)
    wide = [param.double().requires_grad_() for param in params]
    row_by_row([rows.double(), *wide], None, "relu").backward(d_out.double())
    once, added = (ops.network_bwd_params(n * [chunk], params) for n in (64, 1))
    limit = 2 * torch.finfo(dtype).eps
    for got, one, param in zip(once, added, wide, strict=True):
        total = torch.zeros_like(one)
        for _ in range(64):
            total += one
        assert rms_ratio(got, 64 * param.grad) < limit < rms_ratio(total, 64 * param.grad)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_gradcheck_with_dropout(layout, activation):
    args, offsets = tensors(layout, halves=1 + (activation in GATED))
    options = {"activation": activation, "offsets": offsets, "activation_dropout_p": 0.3,
               "dropout_p": 0.4, "seed": 3}  # fmt: skip
    used = len(args[0]) if offsets is None else int(offsets[-1])

    def of_used_rows(rows, *params):
        rows = torch.cat([rows, rows.new_zeros(len(args[0]) - used, *rows.shape[1:])])
        return ops.expert_ffn(rows, *params, **options)[:used]

    rows = args[0].detach()[:used].requires_grad_()
    assert gradcheck(of_used_rows, (rows, *args[1:]))


def test_unused_rows_may_hold_anything(way):
    """They are not read, in both directions."""
    args, offsets = tensors("ragged", requires_grad=False)
    results = []
    for poison in (0.0, float("nan")):
        args[0][9:] = poison
        leaves = [x.clone().requires_grad_() for x in args]
        out = ops.expert_ffn(*leaves, activation="gelu", offsets=offsets)
        d_out = torch.ones_like(out)
        d_out[9:] = poison
        d_rows, *d_params = torch.autograd.grad(out, leaves, d_out)
        results.append([out[:9], d_rows[:9], *d_params])
    for a, b in zip(*results, strict=True):
        assert a.isfinite().all() and torch.equal(a, b)


def test_only_needed_gradients_are_computed(monkeypatch):
    calls = spied(monkeypatch, torch_backend, "network_bwd")
    args, _ = tensors("padded", requires_grad=False)
    for wanted in ([0], [2], [0, 1]):
        leaves = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(args)]
        ops.expert_ffn(*leaves, activation="gelu").sum().backward()
        assert [x.grad is not None for x in leaves] == [i in wanted for i in range(5)]
    needs = [(kwargs["needs_rows"], kwargs["needs_params"]) for _, kwargs, _ in calls]
    assert needs == [(True, False), (False, True), (True, True)]


def test_nothing_is_kept_without_gradients(monkeypatch):
    calls = spied(monkeypatch, torch_backend, "network_fwd")
    args, _ = tensors("padded")
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            ops.expert_ffn(*args, activation="gelu")
    sizes = [(kept.hidden.numel(), kept.active.numel()) for _, _, (_, kept) in calls]
    assert sizes == [(0, 0), (E * N * F, E * N * F)]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("layout", ["padded", "full"])
def test_opcheck(layout, strided):
    """Outputs are contiguous, as the fake implementation says, also if the rows are not."""
    (rows, *params), offsets = tensors(layout, torch.float32, requires_grad=False)
    how = "gelu", 0.2, 0.1, False, False, False, "fast same"
    rest = (*4 * (None,), *params, offsets, torch.tensor(3), *how)
    op, bwd = torch.ops.fairseq_tutel.expert_ffn, torch.ops.fairseq_tutel.expert_ffn_bwd
    want = op(rows, *rest)[0]
    if strided:
        rows = rows.transpose(-1, -2).contiguous().transpose(-1, -2)
    rows = rows.clone().requires_grad_()
    # not test_aot_dispatch_dynamic: it adds up all outputs, and the second one has no gradient
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op.default, (rows, *rest), test_utils=tests)
    out, *saved = op(rows.detach(), *rest)
    assert out.is_contiguous()
    torch.testing.assert_close(out, want)
    for needs in ((True, False, True), (True, False, False), (False, False, True)):
        call = (torch.randn_like(rows), *saved, rows.detach(), *rest, *needs)
        torch.library.opcheck(bwd.default, call)


def test_errors():
    args, _ = tensors("padded", torch.float32)
    fitting = {**dict(zip(NAMES, args, strict=True)), "activation": "gelu"}
    for changes, words in (
        ({"activation": "sigmoid"}, "sigmoid"),
        ({"dropout_p": 1.0}, "dropout_p must be in"),
        ({"rows": torch.randn(E, N, M + 1)}, r"\(experts, rows, 4\)"),
        ({"fc2_bias": torch.randn(E, F)}, r"fc2_bias must be \(3, 4\), got \(3, 6\)"),
        ({"offsets": torch.tensor([1, 2, 3])}, "with offsets True"),
    ):
        with pytest.raises(ValueError, match=words):
            ops.expert_ffn(**{**fitting, **changes})


@pytest.mark.interpreted
@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_the_two_masks_of_a_gpu_differ_and_both_gradients_use_them(layout, backend):
    """With fc2 as the identity, what one mask drops the other must not drop too."""
    backend("triton")
    size, rows = 32, 32
    eye, zero = torch.eye(size).expand(1, -1, -1), torch.zeros(1, size)
    x = torch.ones(1, rows, size) if layout == "padded" else torch.ones(rows, size)
    x.requires_grad_()
    offsets = None if layout == "padded" else torch.tensor([rows], dtype=torch.int32)
    options = {"activation": "linear", "offsets": offsets, "seed": 5}
    one = ops.expert_ffn(x, eye, zero, eye, zero, activation_dropout_p=0.5, **options)
    two = ops.expert_ffn(x, eye, zero, eye, zero, dropout_p=0.5, **options)
    halves = {"activation_dropout_p": 0.5, "dropout_p": 0.5}
    both = ops.expert_ffn(x, eye, zero, eye, zero, **halves, **options)
    assert abs((both != 0).float().mean() - 0.25) < 0.03
    torch.testing.assert_close(both, one * two)
    both.sum().backward()
    torch.testing.assert_close(x.grad, both.detach())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_only_a_simulated_rank_draws_its_weights_where_they_are(device):
    want, experts = (Experts(range(E), M, F, seed=seed) for seed in (1, 2))
    with torch.device("meta"):  # a CPU generator fills no tensor of another device
        experts.reset_parameters(1)
    assert all(map(torch.equal, experts.parameters(), want.parameters()))
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
