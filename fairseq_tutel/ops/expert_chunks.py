"""The experts' network on rows that come in chunks: weight gradients once, over all of them.

Used by the overlap of exchange and experts, which has an autograd function of its own: gradients
are plain functions here.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .activation import dropout_seed
from .backend import implementation


class FFNOptions(NamedTuple):
    """As :func:`~fairseq_tutel.ops.expert_ffn` has them.

    Attributes:
        activation: by name.
        dropout_p: probabilities after the activation and after fc2.
        part: number of the hidden units' part that is computed, where other ranks compute others:
            ranks whose generators are alike draw unlike masks for unlike parts.
    """

    activation: str
    dropout_p: tuple[float, float]
    part: int = 0

    def draw_seed(self, device: torch.device) -> Tensor | None:
        """A seed of the masks of one call; None without dropout."""
        seed = dropout_seed(max(self.dropout_p), None, device)
        # two masks are made of each seed, by it and by its successor
        return seed if seed is None or not self.part else seed + 2 * self.part


class FFNChunk(NamedTuple):
    """What the backward pass needs of a chunk.

    Attributes:
        rows: (e, N, M), or (R, M) with offsets.
        hidden, active: of the implementation, before and after the activation.
        offsets: (e,) int32 end row of each expert, the last of which ends the rows; or None.
        seed: of the dropout masks.
    """

    rows: Tensor
    hidden: Tensor
    active: Tensor
    offsets: Tensor | None
    seed: Tensor | None


class FFNChunkGradient(NamedTuple):
    """Gradients within a chunk.

    Attributes:
        d_rows: like the rows; of shape (0,) if not needed.
        d_out: of the output before its dropout.
        d_hidden: (R, F), of the values before the activation.
        d_fc1_bias, d_fc2_bias: this chunk's part of them.
    """

    d_rows: Tensor
    d_out: Tensor
    d_hidden: Tensor
    d_fc1_bias: Tensor
    d_fc2_bias: Tensor


def ffn_chunk(
    rows: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    *,
    offsets: Tensor | None,
    options: FFNOptions,
    keep_hidden: bool,
) -> tuple[Tensor, FFNChunk]:
    """:func:`~fairseq_tutel.ops.expert_ffn` of a chunk, without autograd.

    Returns:
        the output, like rows; what :func:`ffn_chunk_bwd` needs, if ``keep_hidden``.
    """
    seed = options.draw_seed(rows.device)
    out, hidden, active = implementation("expert_ffn_fwd", rows)(
        rows,
        fc1_weight,
        fc1_bias,
        fc2_weight,
        fc2_bias,
        activation=options.activation,
        offsets=offsets,
        dropout_p=options.dropout_p,
        seed=seed,
        keep_hidden=keep_hidden,
    )
    return out, FFNChunk(rows, hidden, active, offsets, seed)


def ffn_chunk_bwd(
    d_out: Tensor,
    chunk: FFNChunk,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    *,
    options: FFNOptions,
    needs_rows: bool = True,
) -> FFNChunkGradient:
    """What has to be known before the gradient of the rows can be sent."""
    return FFNChunkGradient(
        *implementation("expert_chunk_bwd", d_out)(
            d_out,
            chunk.hidden,
            fc1_weight,
            fc1_bias,
            fc2_weight,
            fc2_bias,
            activation=options.activation,
            offsets=chunk.offsets,
            dropout_p=options.dropout_p,
            seed=chunk.seed,
            needs_rows=needs_rows,
        )
    )


def ffn_chunks_bwd_params(
    chunks: Sequence[FFNChunk],
    gradients: Sequence[FFNChunkGradient],
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    *,
    options: FFNOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of fc1's weight and bias and of fc2's, summed over all rows of all chunks.

    Args:
        chunks, gradients: in one order.
    """
    d_w1, d_w2 = implementation("expert_chunks_bwd_params", chunks[0].rows)(
        [
            (grad.d_out, grad.d_hidden, chunk.rows, chunk.hidden, chunk.active)
            for chunk, grad in zip(chunks, gradients, strict=True)
        ],
        [chunk.offsets for chunk in chunks],
        [chunk.seed for chunk in chunks],
        fc1_weight,
        fc1_bias,
        fc2_weight,
        activation=options.activation,
        dropout_p=options.dropout_p,
    )
    d_b1 = _sum([grad.d_fc1_bias for grad in gradients]).to(fc1_bias.dtype)
    d_b2 = _sum([grad.d_fc2_bias for grad in gradients]).to(fc2_bias.dtype)
    return d_w1, d_b1, d_w2, d_b2


def _sum(parts):
    acc = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    return torch.stack(parts).sum(0, dtype=acc)
