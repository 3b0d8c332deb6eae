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
    """tanh from the exponential; near 0, where that cancels, from the Taylor series.

    Example: 0 -> 0, 0.5 -> 0.46211716, -20 -> -1.
    """
    decay = tl.exp(-2.0 * tl.abs(z))
    large = (1.0 - decay) / (1.0 + decay)
    large = tl.where(z < 0.0, -large, large)
    z2 = z * z
    series = z * (1.0 + z2 * (-1.0 / 3.0 + z2 * (2.0 / 15.0 - z2 * (17.0 / 315.0))))
    return tl.where(z2 < 0.01, series, large)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """Activation of fp32 values; the gelus are those of Hendrycks and Gimpel (1606.08415)."""
    if ACTIVATION == "gelu":
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
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
    """Derivative of :func:`activate` at fp32 values."""
    if ACTIVATION == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        return cdf + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
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
