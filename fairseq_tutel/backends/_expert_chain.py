"""The experts' network as a chain of whole products, as a GPU computes it.

Each room gives its own elementwise functions and its own product of ragged rows. Products are
written so that a gradient has the layout of what it belongs to: a transposed one would be copied
as it is added to the parameter's.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Functions(NamedTuple):
    """What differs between the rooms.

    Attributes:
        bias_act_fwd, bias_act_bwd: as in ``activation.py``.
        rows_product: (rows (R, A), weight (e, A, B) of any strides, offsets) -> (R, B), each
            expert's rows times its weight.
        weight_gradient: (d (R, A), rows (R, B), offsets) -> (e, A, B), ``d.T @ rows`` over each
            expert's rows.
    """

    bias_act_fwd: Callable[..., Tensor]
    bias_act_bwd: Callable[..., tuple[Tensor, Tensor]]
    rows_product: Callable[[Tensor, Tensor, Tensor], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]


def _product(to: Functions, rows: Tensor, weight: Tensor, offsets: Tensor | None) -> Tensor:
    if offsets is None:
        return torch.bmm(rows, weight)
    return to.rows_product(rows, weight, offsets)


def _weight_gradient(to: Functions, d: Tensor, rows: Tensor, offsets: Tensor | None) -> Tensor:
    if offsets is None:
        return torch.bmm(d.transpose(1, 2), rows)
    return to.weight_gradient(d, rows, offsets)


def _seeds(seed: Tensor | None, dropout_p: tuple[float, float]) -> tuple[Tensor | None, ...]:
    """One seed for each mask: of one seed both would be made of the same numbers."""
    return seed, seed + 1 if dropout_p[1] > 0 else None


def chain_fwd(
    to: Functions,
    rows: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    *,
    activation: str,
    offsets: Tensor | None,
    dropout_p: tuple[float, float],
    seed: Tensor | None,
    keep_hidden: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``expert_ffn_fwd`` of both rooms: the output, and the hidden values before and after the
    activation, (R, F) each, or (0, F) without ``keep_hidden``.
    """
    first, second = _seeds(seed, dropout_p)
    hidden = _product(to, rows, fc1_weight.transpose(1, 2), offsets)
    active = to.bias_act_fwd(
        hidden, fc1_bias, activation=activation, offsets=offsets, dropout_p=dropout_p[0], seed=first
    )
    width = hidden.shape[-1]
    if not keep_hidden:
        hidden = hidden.new_empty((0, width))
    out = _product(to, active, fc2_weight.transpose(1, 2), offsets)
    out = to.bias_act_fwd(
        out, fc2_bias, activation="linear", offsets=offsets, dropout_p=dropout_p[1], seed=second
    )
    if not keep_hidden:
        active = active.new_empty((0, width))
    return out, hidden.view(-1, width), active.view(-1, width)


def chain_bwd(
    to: Functions,
    d_out: Tensor,
    rows: Tensor,
    hidden_RF: Tensor,
    active_RF: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    *,
    activation: str,
    offsets: Tensor | None,
    dropout_p: tuple[float, float],
    seed: Tensor | None,
    needs_rows: bool,
    needs_params: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``expert_ffn_bwd`` of both rooms: gradients of the rows, fc1's weight and bias, fc2's."""
    d_rows, d_out, d_hidden, d_b1, d_b2 = chain_rows_bwd(
        to,
        d_out,
        hidden_RF,
        fc1_weight,
        fc1_bias,
        fc2_weight,
        fc2_bias,
        activation=activation,
        offsets=offsets,
        dropout_p=dropout_p,
        seed=seed,
        needs_rows=needs_rows,
        needs_params=needs_params,
    )
    if not needs_params:
        return d_rows, *(w.new_empty(0) for w in (fc1_weight, fc1_bias, fc2_weight, fc2_bias))
    active = active_RF.view(d_hidden.shape)
    d_w2 = _weight_gradient(to, d_out, active, offsets)
    d_w1 = _weight_gradient(to, d_hidden, rows, offsets)
    return d_rows, d_w1, d_b1, d_w2, d_b2


def chain_rows_bwd(
    to: Functions,
    d_out: Tensor,
    hidden_RF: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    *,
    activation: str,
    offsets: Tensor | None,
    dropout_p: tuple[float, float],
    seed: Tensor | None,
    needs_rows: bool = True,
    needs_params: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All but weight gradients: of the rows, of the output before its dropout, of the values before
    the activation, of fc1's bias and of fc2's.
    """
    first, second = _seeds(seed, dropout_p)
    hidden = hidden_RF.view(*d_out.shape[:-1], fc1_weight.shape[1])
    # without dropout and unused rows the gradient passes fc2's bias as it is
    changes = dropout_p[1] > 0 or offsets is not None
    d_b2 = fc2_bias.new_empty(0)
    if changes or needs_params:
        d_rows, d_b2 = to.bias_act_bwd(
            d_out,
            None,
            fc2_bias,
            activation="linear",
            offsets=offsets,
            dropout_p=dropout_p[1],
            seed=second,
            needs_h=changes,
        )
        d_out = d_rows if changes else d_out
    d_hidden = _product(to, d_out, fc2_weight, offsets)
    # not in place, which would save R x F numbers: a kernel that is tuned runs several times on
    # what it is given, so that the tuner would have to keep a copy of just that size
    d_hidden, d_b1 = to.bias_act_bwd(
        d_hidden,
        hidden,
        fc1_bias,
        activation=activation,
        offsets=offsets,
        dropout_p=dropout_p[0],
        seed=first,
    )
    d_rows = _product(to, d_hidden, fc1_weight, offsets) if needs_rows else d_out.new_empty(0)
    return d_rows, d_out, d_hidden, d_b1, d_b2


def chain_chunks_bwd_params(
    to: Functions,
    chunks: Sequence[tuple[Tensor, ...]],
    offsets: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor]:
    """``expert_chunks_bwd_params`` of both rooms, which copy the rows of each expert together.

    The copies cost a few percent of the products, and keep sums in the accumulators of one product.
    """
    d_outs, d_hiddens, rows, _, actives = zip(*chunks, strict=True)
    actives = [x.view(d.shape) for x, d in zip(actives, d_hiddens, strict=True)]
    if offsets[0] is None:

        def joined(parts):
            return torch.cat(parts, 1)

        ends = None
    else:
        ends_De = torch.stack(offsets)
        count_De = ends_De.diff(dim=1, prepend=torch.zeros_like(ends_De[:, :1]))
        ends = count_De.sum(0).cumsum(0, dtype=torch.int32)
        order = _expert_order(count_De, sum(len(x) for x in rows))

        def joined(parts):
            whole = torch.cat(parts)
            return whole if order is None else whole.index_select(0, order)

    d_w2 = _weight_gradient(to, joined(d_outs), joined(actives), ends)
    d_w1 = _weight_gradient(to, joined(d_hiddens), joined(rows), ends)
    return d_w1, d_w2


def _expert_order(count_De: Tensor, num_rows: int) -> Tensor | None:
    """Where the rows of each expert are, if those of chunks follow each other."""
    chunks, experts = count_De.shape
    if experts == 1:
        return None
    expert = torch.arange(experts, device=count_De.device).repeat(chunks)
    return expert.repeat_interleave(count_De.flatten(), output_size=num_rows).argsort(stable=True)
