"""Gradients of the experts' network and of combine, from fewer kept values, in plain torch.

Kept are fc1's products, or nothing but tokens and routing. The rest is computed again, one expert
after the other, so that it is no larger than the rows of one expert.

An output before combining is ``out = fc2(a)``. The gradient of its weight is ``<dy, out>``, or
``<dy fc2, a> + <dy, bias>``. The gradient of ``a`` needs the product ``dy fc2`` anyway, and the
second product of the forward pass is not repeated.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._fp8 import rounded_rows
from .._weights import row_weights
from ._expert_rows import Group, Network, groups_of, of_group, sum_params, sum_rows
from ._memory import empty
from .dispatch import dispatch_bwd, dispatch_fwd, zero_unused


class _LeanNetwork(Network):
    """Network whose backward pass computes the activation again, and fc1's products if asked."""

    def lean_backward(
        self,
        group: Group,
        params: Sequence[Tensor | None],
        x_gNM: Tensor,
        dy_gNM: Tensor,
        weight_gN: Tensor,
        saved_pRF: Tensor | None,
        d_weight_gN: Tensor,
        d_rows_gNM: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of a group's weighted outputs; write those of weights and rows.

        ``dy_gNM`` is the gradient of their sum for each row. ``saved_pRF`` are fc1's products; None
        to compute them again. Return the gradients of fc2's output before dropout, (g, N, M), and
        of fc1's, (g, N, p F), and fc2's input, (g, N, F), in the dtype of the rows.
        """
        w1, b1, w2, b2 = of_group(params, group)
        w1_rounded = rounded_rows(w1) if self.fp8 and saved_pRF is None else w1
        d_fc2, shape = torch.empty_like(dy_gNM), dy_gNM.shape[:2]
        d_fc1 = d_fc2.new_empty((*shape, w1.shape[1]))
        active_gNF = d_fc2.new_empty((*shape, self.hidden_dim))
        for part in self._parts(dy_gNM):
            dy, weight = dy_gNM[:, part], weight_gN[:, part, None]
            active, d_z = active_gNF[:, part], d_fc1[:, part]
            keep_active, keep_out = self._masks(group.rows.start + part.start, dy)
            if keep_out is not None:
                dy = (dy * keep_out).to(dy.dtype)
            if saved_pRF is None:
                x = x_gNM[:, part]
                z = self._first(x, w1_rounded, b1, self._buffers(x))
            else:
                z = self._saved(group, part, saved_pRF, b1)
            d_active = torch.bmm(dy, w2).to(self.acc)
            if keep_active is not None:
                d_active.mul_(keep_active)
            d_weight = self._activate_both(d_active, z, weight, active, d_z)
            if keep_active is not None:
                active.copy_(active * keep_active)
            if b2 is not None:
                d_weight += torch.bmm(dy, b2[:, :, None])[..., 0]
            d_weight_gN[:, part] = d_weight
            torch.mul(dy, weight, out=d_fc2[:, part])
            if d_rows_gNM is not None:
                torch.bmm(d_z, w1, out=d_rows_gNM[:, part])
        return d_fc2, d_fc1, active_gNF

    def _activate_both(
        self, d_active: Tensor, z: Sequence[Tensor], weight: Tensor, active: Tensor, d_fc1: Tensor
    ) -> Tensor:
        """Write the activation, and the gradient of z times the rows' weights, (g, N, p F).

        ``d_active`` is the gradient of the activation without the weights; it is overwritten.
        Return the gradient of the weights but for fc2's bias, (g, N).
        """
        gate, *up = z
        same_dtype = active.dtype == self.acc
        wide = active if same_dtype else torch.empty_like(gate)
        self.activation(gate, wide)
        if not up:
            d_z = d_fc1 if same_dtype else torch.empty_like(gate)
            d_weight = torch.mul(d_active, wide, out=d_z).sum(-1)
            self.activation_bwd(d_active.mul_(weight), gate, d_z)
            if d_z is not d_fc1:
                d_fc1.copy_(d_z)
        else:
            d_gate, d_up = d_fc1.chunk(2, -1)
            d_value = wide * d_active
            d_weight = (d_value * up[0]).sum(-1)
            d_up.copy_(d_value.mul_(weight))
            d_active.mul_(weight).mul_(up[0])
            d_gate.copy_(self.activation_bwd(d_active, gate, d_value))
            wide.mul_(up[0])
        if wide is not active:
            active.copy_(wide)
        return d_weight


def lean_ffn_bwd(
    dy_TM: Tensor,
    x_TM: Tensor,
    topk_weight_TK: Tensor,
    dest_row_TK: Tensor,
    src_pair_R: Tensor,
    saved: Tensor,
    *params: Tensor | None,
    needs_x: bool = True,
    needs_params: bool = True,
    offsets: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``combine(expert_ffn(dispatch(x)))``.

    ``saved`` is the second value of ``expert_ffn_fwd``, (R, p F), or (0, p F): fc1 is applied
    again. Return d_x (T, M), d_weight (T, K), and the gradients of fc1's weight and bias and of
    fc2's, (0,) if not needed or no bias. NOTE: on a GPU the host waits for offsets and seed.
    """
    (num_rows,), (experts, model_dim, hidden_dim) = src_pair_R.shape, params[2].shape
    network = _LeanNetwork(x_TM, hidden_dim, **options)
    weight_R = row_weights(topk_weight_TK, src_pair_R, network.acc)
    saved_pRF = network.planes(saved) if len(saved) else None
    d_rows_RM = empty(x_TM, (num_rows if needs_x else 0, model_dim))
    d_weight_R = weight_R.new_zeros(num_rows + 1)  # one more entry, for dropped pairs
    d_w1, d_w2 = (empty(w, w.shape if needs_params else (0,)) for w in params[::2])
    d_b1, d_b2 = network.bias_gradients(params, needs_params)
    gather = _gatherer(dest_row_TK, src_pair_R)
    rows = x_TM.new_empty((experts, 0 if offsets is not None else num_rows // experts, model_dim))
    for group in groups_of(rows, hidden_dim, offsets):
        x, dy = (group.shape(gather(tokens, group.rows)) for tokens in (x_TM, dy_TM))
        d_rows = group.split(d_rows_RM) if needs_x else None
        weights = group.split(weight_R), group.split(d_weight_R)
        d_fc2, d_fc1, active = network.lean_backward(
            group, params, x, dy, weights[0], saved_pRF, weights[1], d_rows
        )
        if needs_params:
            sum_params(group, (d_fc2, d_fc1, x, active), (d_w1, d_b1, d_w2, d_b2))
    d_weight_TK = d_weight_R[dest_row_TK.long()].to(topk_weight_TK.dtype)
    d_x_TM = dispatch_bwd(d_rows_RM, dest_row_TK) if needs_x else d_rows_RM.view(-1)
    return d_x_TM, d_weight_TK, d_w1, d_b1.to(x_TM.dtype), d_w2, d_b2.to(x_TM.dtype)


def lean_chunk_bwd(
    dy: Tensor,
    rows: Tensor,
    saved: Tensor,
    weight_R: Tensor,
    *params: Tensor | None,
    needs_rows: bool = True,
    offsets: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of rows times their weights, but those of fc1's and fc2's weights.

    ``dy`` is the gradient of the weighted outputs' sum, for each row, like ``rows``. Return d_rows
    like ``dy``, (0,) unless needed; d_weight (R,); gradients of fc2's output like ``dy``, and of
    fc1's, (R, p F); fc2's input (R, F); gradients of the biases in fp32 (fp64).
    """
    model_dim, hidden_dim = params[2].shape[1:]
    network = _LeanNetwork(dy, hidden_dim, **options)
    dy_RM, rows_RM = dy.reshape(-1, model_dim), rows.reshape(-1, model_dim)
    num_rows = len(dy_RM)
    saved_pRF = network.planes(saved) if len(saved) else None
    d_rows = empty(dy, dy.shape if needs_rows else (0,))
    d_fc2_RM = torch.empty_like(dy_RM)
    d_fc1_RF = empty(dy, (num_rows, params[0].shape[1]))
    active_RF = empty(dy, (num_rows, hidden_dim))
    d_weight_R = torch.empty_like(weight_R)
    d_b1, d_b2 = network.bias_gradients(params)
    for group in groups_of(dy, hidden_dim, offsets):
        x, d_out, weight = (group.split(each) for each in (rows_RM, dy_RM, weight_R))
        d_group = group.split(d_rows.view(dy_RM.shape)) if needs_rows else None
        d_weight = group.split(d_weight_R)
        d_fc2, d_fc1, active = network.lean_backward(
            group, params, x, d_out, weight, saved_pRF, d_weight, d_group
        )
        group.split(d_fc2_RM).copy_(d_fc2)
        group.split(d_fc1_RF).copy_(d_fc1)
        group.split(active_RF).copy_(active)
        sum_rows(d_fc1, d_b1[group.experts])
        sum_rows(d_fc2, d_b2[group.experts])
    return d_rows, d_weight_R, d_fc2_RM.view(dy.shape), d_fc1_RF, active_RF, d_b1, d_b2


def _gatherer(dest_row_TK: Tensor, src_pair_R: Tensor) -> Callable[[Tensor, slice], Tensor]:
    """Return a function of tokens (T, M) and a slice of the rows: these rows, zero if unused."""
    if dest_row_TK.numel() == 0:
        return lambda x_TM, rows: dispatch_fwd(x_TM, dest_row_TK, src_pair_R[rows])
    token_R = src_pair_R.clamp(min=0).long() // dest_row_TK.shape[1]
    return lambda x_TM, rows: zero_unused(x_TM.index_select(0, token_R[rows]), src_pair_R[rows])
