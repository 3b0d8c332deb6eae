"""Bias, activation and dropout of the experts' hidden layer in plain torch.

Legend: e local experts, N rows per expert, R rows, F hidden dim.

Works through the input in blocks that stay in the cache, so that the sum with the bias, which
is recomputed in the backward, never travels to memory.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements per block: 256 KiB of fp32, a share of a core's second-level cache.
_BLOCK_NUMEL = 1 << 18

_aten = torch.ops.aten


def _d_relu_squared(dy: Tensor, z: Tensor) -> Tensor:
    return dy * z.relu().mul_(2)


def _d_tanh(dy: Tensor, z: Tensor) -> Tensor:
    return _aten.tanh_backward(dy, z.tanh())


def _gelu_tanh(z: Tensor) -> Tensor:
    return F.gelu(z, approximate="tanh")


def _d_gelu_tanh(dy: Tensor, z: Tensor) -> Tensor:
    return _aten.gelu_backward(dy, z, approximate="tanh")


def _identity(z: Tensor) -> Tensor:
    return z


def _d_identity(dy: Tensor, z: Tensor) -> Tensor:
    return dy


def _d_relu(dy: Tensor, z: Tensor) -> Tensor:
    return _aten.threshold_backward(dy, z, 0)


def _relu_squared(z: Tensor) -> Tensor:
    return z.relu().square_()


# name -> (function, gradient from (dy, z)); the names are those of fairseq's activations
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": (F.gelu, _aten.gelu_backward),
    "gelu_accurate": (_gelu_tanh, _d_gelu_tanh),
    "gelu_fast": (_gelu_tanh, _d_gelu_tanh),
    "linear": (_identity, _d_identity),
    "relu": (F.relu, _d_relu),
    "relu_squared": (_relu_squared, _d_relu_squared),
    "silu": (F.silu, _aten.silu_backward),
    "swish": (F.silu, _aten.silu_backward),
    "tanh": (torch.tanh, _d_tanh),
}


def _acc_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _segments(h: Tensor, offsets_e: Tensor | None) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, end row) over the rows of h viewed as (R, F)."""
    if offsets_e is None:
        num_rows = h.shape[1]
        for expert in range(h.shape[0]):
            yield expert, expert * num_rows, (expert + 1) * num_rows
        return
    start = 0
    # NOTE: on a GPU this is a device-to-host sync; the Triton twin has none.
    for expert, end in enumerate(offsets_e.tolist()):
        yield expert, start, end
        start = end


def _blocks(h: Tensor, offsets_e: Tensor | None) -> Iterator[tuple[int, slice]]:
    """(expert, rows) in pieces of at most _BLOCK_NUMEL elements on CPU."""
    rows_per_block = max(1, _BLOCK_NUMEL // max(1, h.shape[-1]))
    for expert, start, end in _segments(h, offsets_e):
        step = rows_per_block if h.device.type == "cpu" else max(1, end - start)
        for first in range(start, end, step):
            yield expert, slice(first, min(first + step, end))


def _keep_scale(h: Tensor, dropout_p: float, seed: Tensor) -> Tensor:
    """(R, F) 0 or 1 / (1 - p), the same for the same seed."""
    # NOTE: on a GPU reading the seed is a device-to-host sync; the Triton twin has none.
    generator = torch.Generator(device=h.device).manual_seed(int(seed))
    keep = torch.rand((h.numel() // max(1, h.shape[-1]), h.shape[-1]), generator=generator,
                      dtype=torch.float32, device=h.device) >= dropout_p
    return keep.to(_acc_dtype(h.dtype)).div_(1.0 - dropout_p)


def bias_act_fwd(
    h: Tensor, bias: Tensor, *, activation: str, offsets: Tensor | None = None,
    dropout_p: float = 0.0, seed: Tensor | None = None,
) -> Tensor:
    """dropout(activation(h + bias)) in fp32 (fp64 for fp64), returned in the dtype of h.

    Args:
        h: (e, N, F), or (R, F) with ``offsets``.
        bias: (e, F).
        activation: a key of :data:`ACTIVATIONS`.
        offsets: (e,) int32 end row of each expert; rows past the last come out zero.
        dropout_p: probability of zeroing an element, 0 <= p < 1.
        seed: int64 scalar tensor; needed when dropout_p > 0.
    """
    function = ACTIVATIONS[activation][0]
    acc = _acc_dtype(h.dtype)
    y = torch.empty_like(h, memory_format=torch.contiguous_format)
    h_RF, y_RF = h.reshape(-1, h.shape[-1]), y.view(-1, h.shape[-1])
    keep_RF = _keep_scale(h, dropout_p, seed) if dropout_p > 0 else None
    bias_eF = bias.to(acc)
    end = 0
    for expert, rows in _blocks(h, offsets):
        out = function(h_RF[rows].to(acc) + bias_eF[expert])
        if keep_RF is not None:
            out = out * keep_RF[rows]
        y_RF[rows] = out
        end = rows.stop
    y_RF[end:] = 0
    return y


def bias_act_bwd(
    dy: Tensor, h: Tensor, bias: Tensor, *, activation: str, offsets: Tensor | None = None,
    dropout_p: float = 0.0, seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`bias_act_fwd`: d_h like h and d_bias (e, F) in the dtype of bias."""
    gradient = ACTIVATIONS[activation][1]
    acc = _acc_dtype(h.dtype)
    d_h = torch.empty_like(h, memory_format=torch.contiguous_format)
    h_RF, d_h_RF = h.reshape(-1, h.shape[-1]), d_h.view(-1, h.shape[-1])
    dy_RF = dy.reshape(-1, h.shape[-1])
    keep_RF = _keep_scale(h, dropout_p, seed) if dropout_p > 0 else None
    bias_eF = bias.to(acc)
    d_bias_eF = torch.zeros_like(bias_eF)
    end = 0
    for expert, rows in _blocks(h, offsets):
        d_out = dy_RF[rows].to(acc)
        if keep_RF is not None:
            d_out = d_out * keep_RF[rows]
        d_z = gradient(d_out, h_RF[rows].to(acc) + bias_eF[expert])
        d_bias_eF[expert] += d_z.sum(dim=0)
        d_h_RF[rows] = d_z
        end = rows.stop
    d_h_RF[end:] = 0
    return d_h, d_bias_eF.to(bias.dtype)
