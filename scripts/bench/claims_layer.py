"""Time of one MoE layer, forward and backward, on paper: this package's and the dense formulation.

Bytes of a layer's elementwise work, with R rows of M and F hidden numbers, b bytes each:

    activation          2 R F b forward, 3 R F b backward
    dispatch, combine   R M b read and written, R M b read and T M b written; their gradients:
                        3 R M b, and R M b read and T M b written

The dense formulation computes R = E C rows, too. It adds products with masks of T x E x C, and
passes over them (:mod:`claims_dense`).
"""

from dataclasses import dataclass

from claims_dense import mask_bytes

from fairseq_tutel.config import EXCHANGES, OVERLAP_DEGREES
from fairseq_tutel.plan.hardware import Hardware
from fairseq_tutel.plan.speed import exposed


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer on each of ``gpus`` ranks."""

    tokens: int  # T, per GPU
    model_dim: int  # M
    hidden_dim: int  # F
    experts: int  # E, over all GPUs
    gpus: int
    top_k: int = 2
    capacity_factor: float = 1.0
    element: int = 2  # bytes of a number

    @property
    def rows(self) -> float:
        """R, rows that each GPU sends and computes."""
        return self.top_k * self.capacity_factor * self.tokens

    @property
    def mask_numbers(self) -> float:
        """T E C, numbers of a mask of the dense formulation."""
        return self.tokens * self.rows


def layer_time(
    shape: LayerShape,
    hardware: Hardware,
    *,
    dense: bool = False,
    algorithm: str = "linear",
    overlap_degree: int = 1,
) -> float:
    """Return seconds of both passes of a layer, whose exchanges have ``overlap_degree`` chunks."""
    b, rows = shape.element, shape.rows
    rate = hardware.product_rate(b)
    # FLOPs of the experts' forward pass; the backward pass has twice as many
    products = 4 * rows * shape.model_dim * shape.hidden_dim / rate
    wide, narrow = rows * shape.model_dim * b, shape.tokens * shape.model_dim * b
    moved = 5 * rows * shape.hidden_dim * b + 7 * wide + 2 * narrow
    seconds = 3 * products
    if dense:
        # dispatch and combine forward; backward x's, the rows' and the combining mask's gradient
        seconds += 5 * 2 * shape.mask_numbers * shape.model_dim / rate
        moved += shape.mask_numbers * mask_bytes(1, b)
    if shape.gpus > 1:
        predict = EXCHANGES.get(algorithm).predict
        chunk = predict(wide / overlap_degree, shape.gpus, hardware)
        part = products / overlap_degree
        seconds += exposed(chunk, part, chunk, overlap_degree)
        seconds += exposed(chunk, part, chunk, overlap_degree, meanwhile=products)
    return seconds + moved / hardware.stream


def best_layer_time(shape: LayerShape, hardware: Hardware) -> float:
    """Return the least seconds over exchanges and overlap degrees, as the tuner would find them."""
    return min(
        layer_time(shape, hardware, algorithm=algorithm, overlap_degree=degree)
        for algorithm in ("linear", "2dh")
        for degree in OVERLAP_DEGREES
    )
