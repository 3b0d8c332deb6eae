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
OFFSETS = {
    "padded": None, "ragged": [4, 4, 9], "full": [2, 9, 12], "empty": [0, 0, 0],
    "large": [70, 70, 98],
}  # fmt: skip
GATED = ("swiglu", "geglu")
FORMULAS = ("gelu", "gelu_accurate", "relu_squared", "silu", "relu", "tanh", *GATED)
NAMES = ("rows", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")


@pytest.fixture(params=["one-block", "many-blocks"])
def way(request, monkeypatch):
    """The rows of an expert in one block, as in small layers, or in several."""
    if request.param == "many-blocks":
        monkeypatch.setattr(_expert_rows, "_PART_NUMEL", 1)
        monkeypatch.setattr(_expert_rows, "_MIN_ROWS", 2)


def tensors(layout, dtype=torch.float64, requires_grad=True, halves=1):
    generator = torch.Generator().manual_seed(5)
    # sizes at which torch hands halves to oneDNN
    count, m, f = (100, 64, 96) if layout == "large" else (12, M, F)
    rows = (E, N, m) if OFFSETS[layout] is None else (count, m)
    shapes = [rows, (E, halves * f, m), (E, halves * f), (E, m, f), (E, m)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    offsets = OFFSETS[layout]
    if offsets is not None:  # every second number of another tensor: not contiguous
        offsets = torch.tensor(offsets, dtype=torch.int32).repeat_interleave(2)[::2]
    return [x.div(m**0.5).to(dtype).requires_grad_(requires_grad) for x in made], offsets


def row_by_row(args, offsets, activation):
    """Each row through the network of its expert; rows of nobody are zero here."""
    rows, w1, b1, w2, b2 = args
    flat, size = rows.reshape(-1, rows.shape[-1]), rows.shape[1]
    ends = range(size, len(flat) + 1, size) if offsets is None else offsets.tolist()
    out = []
    for r, row in enumerate(flat):
        owners = [x for x in range(len(w1)) if r < ends[x]]
        y = torch.zeros_like(row)
        if owners:
            x = owners[0]
            y = w2[x] @ naive.ACTIVATIONS[activation](w1[x] @ row + b1[x]) + b2[x]
        out.append(y)
    return torch.stack(out).view(rows.shape)


LOOPED = [
    *((layout, "gelu", torch.float64) for layout in OFFSETS),
    # in fp32 torch has other functions than in fp64
    *((layout, activation, torch.float32) for layout in ("padded", "ragged")
      for activation in FORMULAS),
    *((layout, activation, half) for layout in ("ragged", "large")
      for activation in ("gelu", *GATED) for half in (torch.float16, torch.bfloat16)),
    ("padded", "gelu", torch.bfloat16), ("padded", "swiglu", torch.float64),
    ("empty", "geglu", torch.float64),
]  # fmt: skip


@pytest.mark.parametrize("case", LOOPED, ids=str)
def test_equals_a_loop_over_rows(case, way):
    """Products in the rows' dtype, bias and activation in fp32 at least; the loop in fp64.

    In kernels, without biases: test_product.py.
    """
    layout, activation, dtype = case
    args, offsets = tensors(layout, dtype, halves=1 + (activation in GATED))
    torch.manual_seed(6)  # of d_out: sums of few rows may cancel, which no tolerance covers
    d_out = torch.randn(args[0].shape, dtype=torch.float64).to(dtype)
    used = slice(None) if offsets is None else slice(int(offsets[-1]))
    if offsets is not None:  # rows of nobody are not read
        args[0].data[used.stop :] = d_out[used.stop :] = float("nan")
    wide = [x.detach().double().requires_grad_() for x in args]
    want = row_by_row(wide, offsets, activation)
    if want.requires_grad:  # some row belongs to somebody
        want.backward(d_out.double())
    got = ops.expert_ffn(*args, activation=activation, offsets=offsets)
    got.backward(d_out)
    with torch.no_grad():
        evaluated = ops.expert_ffn(*args, activation=activation, offsets=offsets)
    assert got.dtype == evaluated.dtype == dtype
    assert_close("evaluated", evaluated[used], want[used], dtype)
    assert_close("out", got[used], want[used], dtype)
    for name, leaf, wanted in zip(NAMES, args, wide, strict=True):
        rows = used if name == "rows" else slice(None)
        exact = torch.zeros_like(wanted) if wanted.grad is None else wanted.grad
        assert_close(name, leaf.grad[rows], exact[rows], dtype)
        assert leaf.grad.stride() == leaf.stride(), name


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


def test_nothing_is_kept_without_gradients(monkeypatch):
    calls = spied(monkeypatch, torch_backend, "network_fwd")
    args, _ = tensors("padded")
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            ops.expert_ffn(*args, activation="gelu")
    sizes = [(kept.hidden.numel(), kept.active.numel()) for _, _, (_, kept) in calls]
    assert sizes == [(0, 0), (E * N * F, E * N * F)]


@pytest.mark.interpreted
def test_the_two_masks_of_a_gpu_differ_and_both_gradients_use_them(backend):
    """With fc2 as the identity, what one mask drops the other must not drop too."""
    backend("triton")
    eye, zero = torch.eye(32).expand(1, -1, -1), torch.zeros(1, 32)
    x = torch.ones(32, 32, requires_grad=True)
    given = {"activation": "linear", "offsets": torch.tensor([32]).int(), "seed": 5}
    one, two, both = (
        ops.expert_ffn(x, eye, zero, eye, zero, activation_dropout_p=p, dropout_p=q, **given)
        for p, q in ((0.5, 0.0), (0.0, 0.5), (0.5, 0.5))
    )
    assert abs((both != 0).float().mean() - 0.25) < 0.03
    torch.testing.assert_close(both, one * two)
    both.sum().backward()
    torch.testing.assert_close(x.grad, both.detach())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
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
    experts = Experts(range(E), M, F, seed=2)
    with torch.device("meta"):  # a CPU generator fills no tensor of another device
        experts.reset_parameters(1)
    assert torch.equal(experts.fc1_weight, Experts(range(E), M, F, seed=1).fc1_weight)
