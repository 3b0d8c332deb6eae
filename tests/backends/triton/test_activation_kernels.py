"""Bias + activation + dropout: kernels against their twins in fp64, output and gradients."""

import pytest
import torch
from helpers.assertions import assert_close

from fairseq_tutel.backends import torch as torch_backend
from fairseq_tutel.backends import triton as kernels

ACTIVATIONS = sorted(torch_backend.ACTIVATIONS)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PADDED = [
    pytest.param((3, 19, 45), None, id="e3-N19-F45"),  # tiles and columns partly filled
    pytest.param((1, 8, 32), None, id="e1-N8-F32"),  # exactly one tile
    pytest.param((5, 0, 7), None, id="no-rows"),
]
RAGGED = [
    pytest.param((40, 45), [13, 13, 31], id="empty-expert-and-tail"),
    pytest.param((17, 33), [17, 17], id="all-on-first"),
    pytest.param((17, 33), [0, 17], id="all-on-last"),
    pytest.param((16, 8), [0, 0, 0, 0, 0], id="only-tail"),
    pytest.param((0, 8), [0, 0], id="no-rows"),
]


def make(shape, ends, dtype, device):
    generator = torch.Generator().manual_seed(shape[0])
    num_experts = shape[0] if ends is None else len(ends)
    h, dy = (2 * torch.randn(shape, generator=generator) for _ in range(2))
    bias = torch.randn(num_experts, shape[-1], generator=generator)
    offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32, device=device)
    if ends is not None:  # what lies in the tail must not matter
        h[ends[-1] :] = float("nan")
        dy[ends[-1] :] = float("nan")
    return h.to(dtype).to(device), bias.to(dtype).to(device), dy.to(dtype).to(device), offsets


def check(shape, ends, activation, dtype, device):
    h, bias, dy, offsets = make(shape, ends, dtype, device)
    options = {"activation": activation, "offsets": offsets}
    y = kernels.bias_act_fwd(h, bias, **options)
    assert y.dtype == dtype
    want = torch_backend.bias_act_fwd(h.double(), bias.double(), **options)
    assert_close("y", y, want, dtype)
    d_h, d_bias = kernels.bias_act_bwd(dy, h, bias, **options)
    exact = dy.double(), h.double(), bias.double()
    want_h, want_bias = torch_backend.bias_act_bwd(*exact, **options)
    assert d_h.dtype == d_bias.dtype == dtype
    assert_close("d_h", d_h, want_h, dtype)
    assert_close("d_bias", d_bias, want_bias, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation, dtype, device):
    check((2, 9, 45), None, activation, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "ends"), PADDED + RAGGED)
def test_every_shape(shape, ends, dtype, device):
    check(shape, ends, "gelu", dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "ends"), PADDED + RAGGED)
def test_linear_needs_no_h(shape, ends, dtype, device):
    """Nor does it write d_h where that is dy itself."""
    h, bias, dy, offsets = make(shape, ends, dtype, device)
    options = {"activation": "linear", "offsets": offsets}
    d_h, d_bias = kernels.bias_act_bwd(dy, None, bias, **options)
    want_h, want_bias = kernels.bias_act_bwd(dy, h, bias, **options)
    assert torch.equal(d_h, want_h) and torch.equal(d_bias, want_bias)
    used = slice(None) if ends is None else slice(0, ends[-1])
    assert torch.equal(d_h[used], dy[used])
    d_h, d_bias = kernels.bias_act_bwd(dy, None, bias, needs_h=False, **options)
    assert d_h.shape == (0,) and torch.equal(d_bias, want_bias)
    with pytest.raises(ValueError, match="gelu needs h"):
        kernels.bias_act_bwd(dy, None, bias, activation="gelu", offsets=offsets)


def exact_gelu(z):
    """In fp64, without the cancellation of 1 + erf for negative z."""
    z = z.double()
    return 0.5 * z * torch.special.erfc(-z * 0.5**0.5)


def test_gelu_is_accurate_in_its_tail(device):
    """The bounds that the docstring of the kernels' normal distribution names."""
    z = torch.linspace(-6, 6, 2 * 2048 + 1, device=device)[None, None]
    zero, one = torch.zeros(1, z.numel(), device=device), torch.ones_like(z)
    y = kernels.bias_act_fwd(z, zero, activation="gelu").double()
    slope = kernels.bias_act_bwd(one, z, zero, activation="gelu")[0].double()
    want = exact_gelu(z)
    tail = z < 0
    assert ((y - want) / want)[tail].abs().max() < 3e-6
    assert ((y - want) / want)[z > 0].abs().max() < 1.5e-6
    assert (y - want)[tail].abs().max() < 3e-7
    density = torch.exp(-0.5 * z.double() ** 2) / (2 * torch.pi) ** 0.5
    want = 0.5 * torch.special.erfc(-z.double() * 0.5**0.5) + z.double() * density
    assert (slope - want).abs().max() < 6e-7


def test_gelu_of_what_is_no_number(device):
    z = torch.tensor([float("nan"), float("inf"), 1e30, -1e30], device=device)[None, None]
    y = kernels.bias_act_fwd(z, torch.zeros(1, 4, device=device), activation="gelu")[0, 0]
    assert y[0].isnan() and y[1] == float("inf") and y[2] == z[0, 0, 2] and y[3] == 0


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_values(activation, device):
    z = torch.tensor([-80.0, -9.0, -1e-4, -1e-20, 0.0, 1e-20, 1e-4, 9.0, 80.0], device=device)
    h, zero, one = z[None, None], torch.zeros(1, z.numel(), device=device), torch.ones_like(z)
    dy = one[None, None]
    y = kernels.bias_act_fwd(h, zero, activation=activation)
    d_h, _ = kernels.bias_act_bwd(dy, h, zero, activation=activation)
    want = torch_backend.bias_act_fwd(h.double(), zero.double(), activation=activation)
    want_h, _ = torch_backend.bias_act_bwd(
        dy.double(), h.double(), zero.double(), activation=activation
    )
    if activation == "gelu":  # 1 + erf leaves nothing of it below -8.3, in fp64 too
        want = exact_gelu(h)
    # elementwise: a ratio over all would not see what happens near 0
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(d_h.double(), want_h, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("shape", "ends"),
    [
        pytest.param((2, 24, 38), None, id="padded"),  # F no multiple of 4
        pytest.param((50, 40), [13, 44], id="ragged"),
    ],
)
def test_dropout(shape, ends, device):
    p = 0.3
    h, bias, dy, offsets = make(shape, ends, torch.float32, device)
    seeds = [torch.tensor(s, dtype=torch.int64, device=device) for s in (7, 8)]
    options = {"activation": "linear", "offsets": offsets}
    plain = kernels.bias_act_fwd(h, bias, **options)
    y, other = (kernels.bias_act_fwd(h, bias, dropout_p=p, seed=seed, **options) for seed in seeds)
    used = slice(None) if ends is None else slice(0, ends[-1])
    keep, keep_other = y[used] != 0, other[used] != 0
    assert abs(keep.float().mean().item() - (1 - p)) < 0.04
    # another seed draws independently: both keep with probability (1 - p)^2
    assert abs((keep & keep_other).float().mean().item() - (1 - p) ** 2) < 0.04
    # neighbours in a row (which share one draw of Philox) and in a column are independent
    assert abs((keep[..., 1:] & keep[..., :-1]).float().mean() - (1 - p) ** 2) < 0.04
    assert abs((keep[..., 1:, :] & keep[..., :-1, :]).float().mean() - (1 - p) ** 2) < 0.04
    # no two rows and no two columns share their draws
    flat = keep.reshape(-1, keep.shape[-1])
    assert flat.unique(dim=0).shape == flat.unique(dim=1).shape == flat.shape
    assert_close("y", y[used], plain[used] * keep / (1 - p), torch.float32)
    # the backward draws the same mask
    options["activation"] = "gelu"
    d_h, d_bias = kernels.bias_act_bwd(dy, h, bias, dropout_p=p, seed=seeds[0], **options)
    scale = torch.zeros_like(h)
    scale[used] = keep / (1 - p)
    masked = torch.where(scale > 0, dy * scale, 0)
    want_h, want_bias = torch_backend.bias_act_bwd(
        masked.double(), h.double(), bias.double(), **options
    )
    assert_close("d_h", d_h, want_h, torch.float32)
    assert_close("d_bias", d_bias, want_bias, torch.float32)


def test_wrong_arguments_are_named(device):
    h, bias, dy, _ = make((2, 3, 4), None, torch.float32, device)
    with pytest.raises(ValueError, match=r"bias must have shape \(2, 4\), got \(1, 4\)"):
        kernels.bias_act_fwd(h, bias[:1], activation="gelu")
    with pytest.raises(ValueError, match="dropout needs a seed"):
        kernels.bias_act_fwd(h, bias, activation="gelu", dropout_p=0.5)
    with pytest.raises(ValueError, match="h must be one of.*got torch.float64"):
        kernels.bias_act_fwd(h.double(), bias, activation="gelu")
