"""Bias, activation and dropout of the experts' hidden layer in plain torch.

Works through the input in blocks that stay in the cache, so that the sum with the bias, which
is recomputed in the backward, never travels to memory.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements per block: 8 MiB of fp32. Smaller blocks start too many parallel regions.
_BLOCK_NUMEL = 1 << 21

_aten = torch.ops.aten


def _gelu(z: Tensor) -> Tensor:
    return _aten.gelu.out(z, out=z)


def _d_gelu(dy: Tensor, z: Tensor) -> Tensor:
    return _aten.gelu_backward.grad_input(dy, z, grad_input=z)


def _gelu_tanh(z: Tensor) -> Tensor:
    return _aten.gelu.out(z, approximate="tanh", out=z)


def _d_gelu_tanh(dy: Tensor, z: Tensor) -> Tensor:
    return _aten.gelu_backward.grad_input(dy, z, approximate="tanh", grad_input=z)


def _silu(z: Tensor) -> Tensor:
    return F.silu(z, inplace=True)


def _d_silu(dy: Tensor, z: Tensor) -> Tensor:
    return _aten.silu_backward.grad_input(dy, z, grad_input=z)


def _d_relu(dy: Tensor, z: Tensor) -> Tensor:
    return _aten.threshold_backward.grad_input(dy, z, 0, grad_input=z)


def _relu_squared(z: Tensor) -> Tensor:
    return z.relu_().square_()


def _d_relu_squared(dy: Tensor, z: Tensor) -> Tensor:
    return z.relu_().mul_(2).mul_(dy)


def _d_tanh(dy: Tensor, z: Tensor) -> Tensor:
    return _aten.tanh_backward.grad_input(dy, z.tanh_(), grad_input=z)


def _identity(z: Tensor) -> Tensor:
    return z


def _d_identity(dy: Tensor, z: Tensor) -> Tensor:
    return z.copy_(dy)


# name -> (activation of z, gradient from dy and z), both in place of z; the names are those of
# fairseq's activations
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": (_gelu, _d_gelu),
    "gelu_accurate": (_gelu_tanh, _d_gelu_tanh),
    "gelu_fast": (_gelu_tanh, _d_gelu_tanh),
    "linear": (_identity, _d_identity),
    "relu": (torch.relu_, _d_relu),
    "relu_squared": (_relu_squared, _d_relu_squared),
    "silu": (_silu, _d_silu),
    "swish": (_silu, _d_silu),
    "tanh": (torch.tanh_, _d_tanh),
}


def _acc_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _as_3d(h: Tensor) -> Tensor:
    return h if h.dim() == 3 else h[None]


def _blocks(h_enF: Tensor, offsets_e: Tensor | None) -> Iterator[tuple[slice, slice, slice]]:
    """(experts, first index, second index): parts of h that one slice of the bias belongs to.

    On CPU a part has about _BLOCK_NUMEL elements; with offsets, h has shape (1, R, F).
    """
    limit = _BLOCK_NUMEL if h_enF.device.type == "cpu" else h_enF.numel()
    row_step = max(1, limit // max(1, h_enF.shape[2]))
    if offsets_e is None:
        num_experts, num_rows, _ = h_enF.shape
        expert_step = max(1, row_step // max(1, num_rows))
        for expert in range(0, num_experts, expert_step):
            experts = slice(expert, expert + expert_step)
            for start in range(0, num_rows, row_step):
                yield experts, experts, slice(start, start + row_step)
        return
    start = 0
    # NOTE: on a GPU this is a device-to-host sync; the Triton twin has none.
    for expert, end in enumerate(offsets_e.tolist()):
        for first in range(start, end, row_step):
            yield slice(expert, expert + 1), slice(0, 1), slice(first, min(first + row_step, end))
        start = end


def _zero_tail(h_enF: Tensor, offsets_e: Tensor | None) -> None:
    if offsets_e is not None:
        h_enF[:, int(offsets_e[-1]) :] = 0


def _keep_scale(h_enF: Tensor, dropout_p: float, seed: Tensor) -> Tensor:
    """0 or 1 / (1 - p) for each element, the same for the same seed."""
    # NOTE: on a GPU reading the seed is a device-to-host sync; the Triton twin has none.
    generator = torch.Generator(device=h_enF.device).manual_seed(int(seed))
    keep = torch.empty(h_enF.shape, dtype=_acc_dtype(h_enF.dtype), device=h_enF.device)
    return keep.bernoulli_(1.0 - dropout_p, generator=generator).div_(1.0 - dropout_p)


def bias_act_fwd(
    h: Tensor,
    bias: Tensor,
    *,
    activation: str,
    offsets: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
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
    h_enF, y_enF = _as_3d(h), _as_3d(y)
    bias_e1F = bias.to(acc)[:, None]
    keep_enF = _keep_scale(h_enF, dropout_p, seed) if dropout_p > 0 else None
    for experts, *part in _blocks(h_enF, offsets):
        part = tuple(part)
        if h.dtype == acc:  # straight into the result: no temporary at all
            z = torch.add(h_enF[part], bias_e1F[experts], out=y_enF[part])
        else:
            z = h_enF[part] + bias_e1F[experts]
        function(z)
        if keep_enF is not None:
            z.mul_(keep_enF[part])
        if h.dtype != acc:
            y_enF[part] = z
    _zero_tail(y_enF, offsets)
    return y


def bias_act_bwd(
    dy: Tensor,
    h: Tensor | None,
    bias: Tensor,
    *,
    activation: str,
    offsets: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    needs_h: bool = True,
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`bias_act_fwd`: d_h like dy and d_bias (e, F) in the dtype of bias.

    ``h`` is not read for ``linear`` and may be None there. Without ``needs_h`` d_h comes back with
    shape (0,).
    """
    gradient = ACTIVATIONS[activation][1]
    linear = activation == "linear"
    acc = _acc_dtype(dy.dtype)
    d_h = torch.empty_like(dy, memory_format=torch.contiguous_format) if needs_h else None
    dy_enF = _as_3d(dy)
    h_enF = None if linear else _as_3d(h)
    d_h_enF = _as_3d(d_h) if needs_h else None
    bias_e1F = bias.to(acc)[:, None]
    d_bias_eF = torch.zeros_like(bias, dtype=acc)
    keep_enF = _keep_scale(dy_enF, dropout_p, seed) if dropout_p > 0 else None
    for experts, *part in _blocks(dy_enF, offsets):
        part = tuple(part)
        z = dy_enF[part].to(acc)
        if keep_enF is not None:
            z = z * keep_enF[part]
        if not linear:
            d_out = z
            if needs_h and d_h.dtype == acc:
                z = torch.add(h_enF[part], bias_e1F[experts], out=d_h_enF[part])
            else:
                z = h_enF[part] + bias_e1F[experts]
            gradient(d_out, z)
        d_bias_eF[experts] += z.sum(dim=1)
        if needs_h and (linear or d_h.dtype != acc):
            d_h_enF[part] = z
    if not needs_h:
        return dy.new_empty(0), d_bias_eF.to(bias.dtype)
    _zero_tail(d_h_enF, offsets)
    return d_h, d_bias_eF.to(bias.dtype)
