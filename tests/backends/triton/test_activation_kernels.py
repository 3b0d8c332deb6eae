"""Bias + activation + dropout: extreme values, masks, and what is not computed."""

import pytest
import torch
from helpers import naive
from helpers.assertions import assert_close
from helpers.inputs import expert_rows
from test_kernels import FP32, GATED, OTHERS, SHAPES

from fairseq_tutel.backends import triton as kernels


def rows_of_experts(offsets):
    """The rows that belong to an expert: others are unspecified."""
    return slice(None) if offsets is None else slice(int(offsets[-1]))


@pytest.mark.parametrize("shape", ["padded", "tail"])
def test_linear_needs_no_h(shape, device):
    """Nor does it write d_h where that is dy itself."""
    h, bias, dy, offsets = expert_rows(*SHAPES[shape], FP32, device)
    options = {"activation": "linear", "offsets": offsets}
    d_h, d_bias = kernels.bias_act_bwd(dy, None, bias, **options)
    want_h, want_bias = kernels.bias_act_bwd(dy, h, bias, **options)
    used = rows_of_experts(offsets)
    assert torch.equal(d_h[used], want_h[used]) and torch.equal(d_bias, want_bias)
    assert torch.equal(d_h[used], dy[used])
    d_h, d_bias = kernels.bias_act_bwd(dy, None, bias, needs_h=False, **options)
    assert d_h.shape == (0,) and torch.equal(d_bias, want_bias)


def exact_gelu(z):
    """Compute in fp64, without the cancellation of 1 + erf for negative z."""
    z = z.double()
    return 0.5 * z * torch.special.erfc(-z * 0.5**0.5)


def test_gelu_is_accurate_in_its_tail(device):
    """The bounds that the docstring of the kernels' normal distribution names."""
    z = torch.linspace(-6, 6, 2 * 2048 + 1, device=device).view(1, -1, 17)  # few columns
    zero, one = torch.zeros(1, 17, device=device), torch.ones_like(z)
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


@pytest.mark.parametrize("activation", ["gelu", *OTHERS])
def test_extreme_values(activation, device):
    z = torch.tensor([-80.0, -9.0, -1e-4, -1e-20, 0.0, 1e-20, 1e-4, 9.0, 80.0], device=device)
    h, zero, one = z[None, None], torch.zeros(1, z.numel(), device=device), torch.ones_like(z)
    dy = one[None, None]
    y = kernels.bias_act_fwd(h, zero, activation=activation)
    d_h, _ = kernels.bias_act_bwd(dy, h, zero, activation=activation)
    options = {"activation": activation, "offsets": None}
    want = naive.bias_act(h.double(), zero.double(), **options)
    exact = dy.double(), h.double(), zero.double()
    want_h, _ = naive.bias_act_bwd(*exact, **options)
    if activation == "gelu":  # 1 + erf leaves nothing of it below -8.3, in fp64 too
        want = exact_gelu(h)
    # elementwise: a ratio over all would not see what happens near 0
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(d_h.double(), want_h, rtol=1e-5, atol=1e-7)


# F no multiple of 4; ragged
DROPPED = {"padded": ((2, 24, 38), None), "ragged": ((50, 40), [13, 44])}


@pytest.mark.parametrize("shape", DROPPED)
def test_masks_are_random(shape, device):
    p = 0.3
    h, bias, _, offsets = expert_rows(*DROPPED[shape], FP32, device)
    seeds = [torch.tensor(s, dtype=torch.int64, device=device) for s in (7, 8)]
    options = {"activation": "linear", "offsets": offsets}
    plain = kernels.bias_act_fwd(h, bias, **options)
    y, other = (kernels.bias_act_fwd(h, bias, dropout_p=p, seed=seed, **options) for seed in seeds)
    used = rows_of_experts(offsets)
    keep, keep_other = y[used] != 0, other[used] != 0
    assert_close("y", y[used], plain[used] * keep / (1 - p), FP32)
    assert abs(keep.float().mean().item() - (1 - p)) < 0.04
    # another seed draws independently: both keep with probability (1 - p)^2
    assert abs((keep & keep_other).float().mean().item() - (1 - p) ** 2) < 0.04
    # neighbours in a row (which share one draw of Philox) and in a column are independent
    assert abs((keep[..., 1:] & keep[..., :-1]).float().mean() - (1 - p) ** 2) < 0.04
    assert abs((keep[..., 1:, :] & keep[..., :-1, :]).float().mean() - (1 - p) ** 2) < 0.04
    # no two rows and no two columns share their draws
    flat = keep.reshape(-1, keep.shape[-1])
    assert flat.unique(dim=0).shape == flat.unique(dim=1).shape == flat.shape


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize(("shape", "ends"), [((2, 9, 13), None), ((20, 6), [7, 15])])
def test_both_passes_drop_the_same(shape, ends, activation, device):
    halves = 2 if activation in GATED else 1
    h, bias, dy, offsets = expert_rows(shape, ends, FP32, device, halves)
    dropout = {"dropout_p": 0.5, "seed": torch.tensor(3, device=device)}
    options = {"activation": activation, "offsets": offsets}
    used = rows_of_experts(offsets)
    y = kernels.bias_act_fwd(h, bias, **dropout, **options)
    kept = y != 0
    plain = kernels.bias_act_fwd(h, bias, **options)
    torch.testing.assert_close(y[used], torch.where(kept, plain / 0.5, 0.0)[used])
    d_h, d_bias = kernels.bias_act_bwd(dy, h, bias, **dropout, **options)
    want_h, want_bias = kernels.bias_act_bwd(torch.where(kept, dy / 0.5, 0.0), h, bias, **options)
    torch.testing.assert_close(d_h[used], want_h[used])
    torch.testing.assert_close(d_bias, want_bias)
