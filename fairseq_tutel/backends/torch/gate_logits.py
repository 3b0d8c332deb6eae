"""The gate's product on a CPU, by blocks of tokens.

Legend: T tokens, M model dim, E experts.

The product is a narrow one: torch's threads would meet inside it more often than it is worth.
"""

import torch
from torch import Tensor

from ._threads import share_out

_BLOCK_TOKENS = 1024


def _blocks(num_tokens: int) -> list[slice]:
    starts = range(0, num_tokens, _BLOCK_TOKENS)
    return [slice(start, min(start + _BLOCK_TOKENS, num_tokens)) for start in starts]


def gate_logits_fwd(x_TM: Tensor, weight_EM: Tensor) -> Tensor:
    """``x @ weight.T``, (T, E)."""
    logits_TE = x_TM.new_empty((x_TM.shape[0], weight_EM.shape[0]))
    blocks = _blocks(x_TM.shape[0])

    def run(numbers):
        for number in numbers:
            part = blocks[number]
            torch.mm(x_TM[part], weight_EM.t(), out=logits_TE[part])

    share_out(run, len(blocks))
    return logits_TE


def gate_logits_bwd(
    d_logits_TE: Tensor,
    x_TM: Tensor,
    weight_EM: Tensor,
    *,
    needs_x: bool = True,
    needs_weight: bool = True,
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`gate_logits_fwd`: d_x (T, M) and d_weight (E, M).

    A gradient that is not needed comes back with shape (0,).
    """
    blocks = _blocks(x_TM.shape[0])
    d_x_TM = x_TM.new_empty(x_TM.shape if needs_x else 0)
    # summed in the order of the blocks, whichever thread computed them
    parts_BEM = x_TM.new_empty((len(blocks), *weight_EM.shape) if needs_weight else 0)

    def run(numbers):
        for number in numbers:
            part = blocks[number]
            if needs_x:
                torch.mm(d_logits_TE[part], weight_EM, out=d_x_TM[part])
            if needs_weight:
                torch.mm(d_logits_TE[part].t(), x_TM[part], out=parts_BEM[number])

    share_out(run, len(blocks))
    return d_x_TM, parts_BEM.sum(0) if needs_weight else parts_BEM
