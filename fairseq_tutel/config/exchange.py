"""How rows travel between ranks: :class:`ExchangeConfig`, and how many ranks exchange them."""

from __future__ import annotations

from dataclasses import dataclass

from .options import at_least, check_options, documented, option
from .registry import EXCHANGES

OVERLAP_DEGREES = (1, 2, 4, 8)
WIRES = ("same", "bf16", "fp16", "fp8")
EXPERT_PLACEMENTS = ("replicated", "sliced")


@documented
@dataclass(frozen=True)
class ExchangeConfig:
    """Everything that decides how rows travel between ranks, which compare it in each step."""

    algorithm: str = option(
        "linear", "how tokens travel between ranks", flag="--moe-a2a", or_auto=True
    )
    ranks_per_node: int = option(
        0,
        "ranks that share a node, for exchanges that distinguish nodes; 0: as the machines have it",
        at_least(0),
    )
    overlap_degree: int = option(
        1,
        "chunks (1, 2, 4 or 8) in which tokens travel to the experts and back, so that one is "
        "computed while others travel; pays where travelling takes about as long as computing. "
        "Results change by rounding at most; dropout inside the experts draws a mask per chunk",
        choices=OVERLAP_DEGREES,
        or_auto=True,
    )
    wire: str = option(
        "same",
        "how tokens are written on their way to the experts: 'same': as they are; 'bf16'; 'fp16' "
        "and 'fp8': with a scale per 128 values, so that nothing overflows. Where that is not "
        "narrower than the tokens' own dtype they travel as they are",
        choices=WIRES,
    )
    wire_back: str = option(
        "auto",
        "the same for the experts' outputs; 'auto': as `wire`, but 'bf16' where that is 'fp8'",
        choices=("auto", *WIRES),
    )
    wire_grad: str = option(
        "auto",
        "the same for gradients, both ways ('fp8' is e5m2 there, e4m3 elsewhere)",
        choices=("auto", *WIRES),
    )
    wire_compact: bool = option(
        False,
        "with a capacity in training, only the rows in use travel and are computed; the host waits "
        "for the counts of each layer",
    )
    r: int = option(
        1,
        "where several ranks hold parts of an expert: ranks that each of its tokens is sent to. "
        "1: to one rank, which gathers the rest of the expert's weights; more, a divisor of the "
        "number of parts: to so many, of which each gathers and computes a part; 0: tokens stay "
        "where they are, and every rank gathers the weights of all experts. Fewer ranks mean "
        "fewer copies of tokens, more ranks fewer weights that travel",
        at_least(0),
        flag="--moe-parallelism-r",
        or_auto=True,
    )

    def __post_init__(self):
        EXCHANGES.get(self.algorithm)
        check_options(self)

    def wire_of(self, *, back: bool = False, gradient: bool = False) -> str:
        """One of WIRES: of tokens, of outputs (``back``), or of gradients on either way."""
        given = self.wire_grad if gradient else self.wire_back if back else self.wire
        if given != "auto":
            return given
        return "bf16" if self.wire == "fp8" else self.wire

    @property
    def compresses(self) -> bool:
        """Whether anything may travel in fewer bits than it has."""
        ways = (self.wire_of(), self.wire_of(back=True), self.wire_of(gradient=True))
        return any(wire != "same" for wire in ways)

    @classmethod
    def of(cls, exchange: ExchangeConfig | str) -> ExchangeConfig:
        """The value itself, or that of an algorithm's name with defaults for the rest."""
        return exchange if isinstance(exchange, cls) else cls(exchange)


def exchange_size(num_experts: int, world_size: int, expert_parallel_size: int = 0) -> int:
    """P, ranks that exchange tokens with each other and hold every expert once between them.

    ``expert_parallel_size``: P if it is chosen; 0: as many as can be, min(E, W). Raises ValueError
    where E and W do not divide, or P is not a divisor of both.
    """
    size = expert_parallel_size
    if not size:
        if num_experts % world_size and world_size % num_experts:
            raise ValueError(
                f"{num_experts} experts cannot be spread over {world_size} ranks: one number must "
                "divide the other (choose an expert count that is a multiple or a divisor of "
                f"{world_size})"
            )
        return min(num_experts, world_size)
    if not isinstance(size, int) or size < 0 or world_size % size or num_experts % size:
        raise ValueError(
            f"expert_parallel_size={size} (--moe-expert-parallel-size) must divide the number of "
            f"ranks, {world_size}, and that of experts, {num_experts}: so many ranks hold all of "
            "them together"
        )
    return size
