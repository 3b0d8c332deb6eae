"""All-to-all options: :class:`ExchangeConfig`, and the number of ranks that exchange tokens."""

from __future__ import annotations

from dataclasses import dataclass

from .formats import WIRES, listed
from .options import OptionError, at_least, check_options, documented, option
from .registry import EXCHANGES

OVERLAP_DEGREES = (1, 2, 4, 8)
_WIRES = ("same", *WIRES)
_BUT = [f"{w.auto!r} for {name!r}" for name, w in WIRES.items() if w.auto != name]
_AUTO = ", but ".join(["'auto': as `wire`", ", ".join(_BUT)])
EXPERT_PLACEMENTS = ("replicated", "sliced")


@documented
@dataclass(frozen=True)
class ExchangeConfig:
    """All-to-all between ranks: algorithm, overlap, wire formats. All ranks must agree on it.

    ``MoELayer(exchange="2dh")`` is short for ``MoELayer(exchange=ExchangeConfig("2dh"))``.
    """

    algorithm: str = option(
        "linear",
        "all-to-all algorithm",
        registry=EXCHANGES,
        flag="--moe-exchange",
        alias="--moe-a2a",
        or_auto=True,
    )
    ranks_per_node: int = option(0, "ranks per node, for 2dh; 0: detected", at_least(0))
    overlap_degree: int = option(
        1,
        "chunks (1, 2, 4 or 8) of an exchange; experts compute one while others travel",
        choices=OVERLAP_DEGREES,
        or_auto=True,
    )
    wire: str = option(
        "same",
        f"format of tokens on their way to the experts: 'same': their dtype; {listed(WIRES)}. "
        "Ignored if not narrower than their dtype",
        choices=_WIRES,
    )
    wire_back: str = option(
        "auto", f"format of the experts' outputs; {_AUTO}", choices=("auto", *_WIRES)
    )
    wire_grad: str = option("auto", f"format of both gradients; {_AUTO}", choices=("auto", *_WIRES))
    wire_compact: bool = option(
        False, "with a training capacity, send only the rows in use; the host waits for counts"
    )
    r: int = option(
        1,
        "ranks that a token is sent to, of those with slices of its expert: 1, a divisor of the "
        "number of slices, or 0 (none: weights travel)",
        at_least(0),
        flag="--moe-parallelism-r",
        or_auto=True,
    )

    balance_ranks: bool = option(
        False, "without a capacity, let ranks with few rows compute rows of busy ranks"
    )
    balance_tolerance: float = option(
        1.05,
        "accepted rows of the busiest rank, over the mean",
        at_least(1),
        needs=["balance_ranks"],
    )
    balance_min_rows: int = option(
        0,
        "rows that pay for moving an expert's weights; 0: measured, so rounding differs between "
        "runs",
        at_least(0),
        needs=["balance_ranks"],
    )

    def __post_init__(self):
        check_options(self)
        if self.balance_ranks and self.algorithm != "linear":
            given = f"not {self.algorithm!r}"
            raise OptionError(f"`balance_ranks=True` needs `algorithm='linear'`, {given}")

    def wire_of(self, *, back: bool = False, gradient: bool = False) -> str:
        """Return the choice for tokens, for outputs (``back``) or for gradients; never auto."""
        given = self.wire_grad if gradient else self.wire_back if back else self.wire
        if given != "auto":
            return given
        return self.wire if self.wire == "same" else WIRES[self.wire].auto

    @property
    def compresses(self) -> bool:
        """Whether any direction may travel in fewer bits than its dtype."""
        ways = (self.wire_of(), self.wire_of(back=True), self.wire_of(gradient=True))
        return any(wire != "same" for wire in ways)

    @classmethod
    def of(cls, exchange: ExchangeConfig | str) -> ExchangeConfig:
        """Return the config itself, or the one with this algorithm and defaults."""
        return cls(exchange) if isinstance(exchange, str) else exchange


def exchange_size(num_experts: int, world_size: int, expert_parallel_size: int = 0) -> int:
    """Return P, the number of ranks that exchange tokens and together hold every expert once.

    ``expert_parallel_size`` 0 chooses the largest, min(E, W). ValueError is raised if E is below 1,
    neither of E and W divides the other, or P does not divide both.
    """
    size = expert_parallel_size
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts} must be at least 1")
    if not size:
        if num_experts % world_size and world_size % num_experts:
            both = f"{num_experts} experts cannot be spread over {world_size} ranks"
            raise ValueError(f"{both}: one number must divide the other")
        return min(num_experts, world_size)
    if not isinstance(size, int) or size < 0 or world_size % size or num_experts % size:
        raise ValueError(
            f"expert_parallel_size={size} (--moe-expert-parallel-size) must divide the number of "
            f"ranks, {world_size}, and that of experts, {num_experts}: a group holds all experts"
        )
    return size
