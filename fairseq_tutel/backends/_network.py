"""Arguments and results of the functions of the experts' network, in both backends.

``network_fwd`` computes the outputs of rows. ``network_bwd`` computes the gradients of the rows and
of their weights, and either the gradients of the parameters or what they need later.
``network_bwd_params`` computes these from all chunks of rows at once.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Source(NamedTuple):
    """Rows of all experts of a rank: given, or gathered from tokens by the maps of dispatch."""

    values: Tensor  # (e, N, M), or (R, M) with offsets; with maps the tokens (T, M)
    offsets: Tensor | None  # (e,) int32 end row of each expert; None: equally many rows of each
    dest_row_TK: Tensor | None = None
    src_pair_R: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Return R."""
        if self.src_pair_R is not None:
            return self.src_pair_R.shape[0]
        return self.values.shape[:-1].numel()

    def like(self, values: Tensor) -> Source:
        """Return other values for the same rows."""
        return self._replace(values=values)


class Kept(NamedTuple):
    """Values of the forward pass for the backward pass; (0, ...) if they are computed again."""

    hidden: Tensor  # fc1's products, (R, p F), p = 2 for a gated network, in a backend's own order
    active: Tensor  # fc2's input, (R, F)


class Pending(NamedTuple):
    """Values of a chunk of rows from which the gradients of the parameters are computed."""

    d_out: Tensor  # gradient of fc2's output before dropout, like the rows
    d_hidden: Tensor  # (R, p F), gradient of fc1's output
    rows: Source
    active: Tensor  # (R, F), fc2's input
    d_fc1_bias: Tensor  # in fp32 (fp64); (0,) without the bias
    d_fc2_bias: Tensor


# gradients of fc1's weight and bias and of fc2's; (0,) if not needed, or of no bias
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
