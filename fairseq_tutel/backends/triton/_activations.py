"""Activations and their derivatives as device functions of the activation kernels."""

import triton
import triton.language as tl

# fairseq's name -> the formula in the kernels
FORMULA = {
    "gelu": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "linear": "linear",
    "relu": "relu",
    "relu_squared": "relu_squared",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


@triton.jit
def tanh(z):
    """Compute tanh from the exponential; near 0, where that cancels, from the Taylor series.

    Example: 0 -> 0, 0.5 -> 0.46211716, -20 -> -1.
    """
    decay = tl.exp(-2.0 * tl.abs(z))
    large = (1.0 - decay) / (1.0 + decay)
    large = tl.where(z < 0.0, -large, large)
    z2 = z * z
    series = z * (1.0 + z2 * (-1.0 / 3.0 + z2 * (2.0 / 15.0 - z2 * (17.0 / 315.0))))
    return tl.where(z2 < 0.01, series, large)


@triton.jit
def normal_cdf(z):
    """Return the standard normal distribution's cdf and exp(-z^2 / 2) at fp32 z, without a branch.

    The form is that of Abramowitz and Stegun 7.1.26, upper tail = polynomial(t) * exp(-a^2 / 2)
    with t = 1 / (1 + 0.35 a), a = |z|. Its coefficients are fitted here in fp64, so that the
    *relative* error of the tail is smallest: 3.1e-7 for a < 13.3, where fp32 ends. The lower half
    is the tail itself and not a difference, so gelu(z) = z * cdf is right to 3e-6 of itself for
    z in [-6, 0], most of which is the rounding of the exponent, and to 1.5e-6 for z > 0.

    Example: 0 -> (0.5, 1), 1 -> (0.8413447, 0.6065307), -40 -> (0, 0).
    """
    density = tl.exp2(-0.7213475204444817 * z * z)
    # The square of 1 / sqrt is two instructions on a GPU, a division eight.
    root = tl.rsqrt(1.0 + 0.35 * tl.abs(z))
    t = root * root
    tail = 0.04894226677725644
    tail = tail * t - 0.2021185224057451
    tail = tail * t + 0.24063945824434768
    tail = tail * t - 0.0170221104475249
    tail = tail * t + 0.15596073735876134
    tail = tail * t + 0.13335533791619134
    tail = tail * t + 0.14027029889429835
    tail = tail * t - 2.7312546201530008e-05
    tail *= density
    return tl.where(z < 0.0, tail, 1.0 - tail), density


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """Apply the activation to fp32 values; gelus as in Hendrycks and Gimpel (1606.08415)."""
    if ACTIVATION == "gelu":
        cdf, _ = normal_cdf(z)
        return z * cdf
    elif ACTIVATION == "gelu_tanh":
        return 0.5 * z * (1.0 + tanh(0.7978845608028654 * (z + 0.044715 * z * z * z)))
    elif ACTIVATION == "relu":
        return tl.where(z < 0.0, 0.0, z)  # where, so that NaN passes through
    elif ACTIVATION == "relu_squared":
        return tl.where(z < 0.0, 0.0, z * z)
    elif ACTIVATION == "silu":
        return z * tl.sigmoid(z)
    elif ACTIVATION == "tanh":
        return tanh(z)
    else:
        tl.static_assert(ACTIVATION == "linear")
        return z


@triton.jit
def activate_bwd(z, ACTIVATION: tl.constexpr):
    """Return the derivative of :func:`activate` at fp32 values."""
    if ACTIVATION == "gelu":
        cdf, density = normal_cdf(z)
        return cdf + 0.3989422804014327 * z * density
    elif ACTIVATION == "gelu_tanh":
        t = tanh(0.7978845608028654 * (z + 0.044715 * z * z * z))
        slope = 0.7978845608028654 * (1.0 + 0.134145 * z * z)
        return 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * slope
    elif ACTIVATION == "relu":
        return tl.where(z > 0.0, 1.0, 0.0)
    elif ACTIVATION == "relu_squared":
        return tl.where(z > 0.0, 2.0 * z, 0.0)
    elif ACTIVATION == "silu":
        s = tl.sigmoid(z)
        return s * (1.0 + z * (1.0 - s))
    elif ACTIVATION == "tanh":
        t = tanh(z)
        return 1.0 - t * t
    else:
        tl.static_assert(ACTIVATION == "linear")
        return tl.full(z.shape, 1.0, tl.float32)
