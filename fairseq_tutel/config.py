"""Options of an MoE layer and the rules that make them consistent.

This is the one place where an option gets its meaning: the command line, Hydra configs, the
stand-alone layer, the planner and the tests all build an :class:`MoEConfig`, and an
:class:`ExchangeConfig`. Standard library only, so that it can be read where neither torch nor
fairseq is installed.

Two vocabularies describe capacity. The 2021 flags of fairseq's ``moe`` branch fix it in training
(top-1: ``ceil(T/E)``, top-2: ``2*ceil(T/E)`` slots per expert and rank) and give evaluation a
fraction of the tokens. Tutel's capacity factor ``f`` covers more: ``f > 0`` gives
``K*int(f*ceil(T/E))`` slots, ``f == 0`` drops nothing, ``f < 0`` takes what is needed up to
``K*int(-f*ceil(T/E))``. Both are accepted; saying one thing with both is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .ranges import FINITE, Range, as_argument, at_least, check_ranges, one_of, ranges_of
from .registry import Options, Registry

SECOND_EXPERT_POLICIES = ("sampling", "all", "random")
BALANCE_SCOPES = ("rank", "global", "sequence")
BALANCE_CHOICES = ("first", "all")
DROP_POLICIES = ("position", "probability", "random")
LOAD_BIASES = ("none", "sign", "quantile")
SCORE_FUNCTIONS = ("softmax", "sigmoid")
EXPERT_GRAD_NORMALIZATIONS = ("world_size", "sqrt_world_size")
WIRES = ("same", "bf16", "fp16", "fp8")
EXPERT_PLACEMENTS = ("replicated", "sliced")
# Routers register themselves, see fairseq_tutel.moe.routers.
ROUTERS: Registry[Any] = Registry("router", home="fairseq_tutel.moe.routers", flag_prefix="moe")
EXCHANGES: Registry[Any] = Registry(
    "exchange", home="fairseq_tutel.distributed.exchanges", flag_prefix="moe_a2a"
)


def _option(allowed: Range, **default: Any) -> Any:
    return field(**default, metadata={"range": allowed})


_CHOICES = {
    "second_expert_policy": SECOND_EXPERT_POLICIES,
    "balance_scope": BALANCE_SCOPES,
    "balance_choices": BALANCE_CHOICES,
    "drop_policy": DROP_POLICIES,
    "load_bias": LOAD_BIASES,
    "score_function": SCORE_FUNCTIONS,
}


@dataclass(frozen=True)
class MoEConfig:
    """Everything that decides how tokens are routed; sizes of tensors are given to the modules.

    Attributes:
        num_experts: E, experts of a layer over all ranks.
        top_k: K, experts per token, 1 <= K <= E.
        capacity_factor: training capacity, Tutel's meaning (see the module docstring).
        eval_capacity_factor: evaluation capacity, the same meaning; 0 drops nothing.
        eval_capacity_token_fraction: if > 0, evaluation gives each expert ``ceil(fraction * T)``
            slots and ``eval_capacity_factor`` is not looked at (option of fairseq's ``moe``
            branch).
        second_expert_policy: how choices after the first are made: ``all`` takes the next best,
            ``sampling`` adds Gumbel(0, 1) noise to the logits first, ``random`` keeps choice j > 1
            only with probability ``min(1, K * gate_j)`` (GShard, section 3.2 of arXiv 2006.16668,
            for K = 2).
        normalize_before_dropping: divide the K gate values by their sum before, not after, tokens
            over capacity are dropped.
        batch_prioritized: give slots in order of decreasing top gate probability (arXiv
            2106.05974).
        use_pad_mask: do not route padding tokens.
        gating_fp32: compute the gate's logits with fp32 output (half inputs, fp32 accumulation).
        router: a registered name: ``linear``, ``cosine``, or one of a user's own.
        router_options: its own options, by name or as an object of its class ``Options``; becomes
            such an object.
        gate_noise: standard deviation times E of normal noise on the logits, in training only.
        input_jitter: multiply the gate's input by uniform(1-j, 1+j), in training only.
        input_dropout: dropout on the layer's input before routing, in training only.
        z_loss_weight: weight of mean(logsumexp(logits)^2) added to the aux loss (arXiv 2202.08906,
            eq. 5).
        load_importance_loss: use the load and importance losses of arXiv 1701.06538 (appendix A) in
            place of GShard's; needs gate_noise > 0.
        balance_scope: tokens over which the balance loss balances: those of a ``rank``, of all
            ranks (``global``, in training; arXiv 2501.11873), or of each ``sequence`` (arXiv
            2412.19437, eq. 17).
        balance_choices: whose counts it takes: ``first`` choices, or ``all``, divided by K.
        load_bias: select experts with a bias that follows their load: by the ``sign`` of what they
            lack (arXiv 2408.15664), or by a ``quantile`` of what tokens would need (arXiv
            2607.24653); see :mod:`fairseq_tutel.moe.load_bias`.
        load_bias_rate: step of ``sign``.
        load_bias_entropy: multiply the bias by the entropy of the token's gate distribution over
            that of an even one; experimental.
        score_function: what gate values are: the ``softmax`` of the logits, or the ``sigmoid`` of
            each (arXiv 2412.19437, eq. 15); losses and entropy take it divided by its sum.
        drop_policy: whose pairs a full expert drops: those that come last in the batch
            (``position``), have the least gate value (``probability``), or any tokens (``random``,
            in training; else by position).
        overflow_rerouting: R, so many further experts a token may try whose expert is full.
        route_scale: factor of the combine weights after their normalisation.
        expert_output_masking: probability by which training leaves out an output of an expert
            (NLLB's EOM, arXiv 2207.04672; see :mod:`fairseq_tutel.moe.output_masks`).
        final_output_masking: the same of the layer's whole output of a token (FOM).
        null_experts: N experts beside the E that compute nothing: a token that chooses one has an
            expert less (arXiv 2410.07348). The gate has E + N outputs, and they are balanced
            together, so that a token has K * E / (E + N) experts on average.
    """

    num_experts: int = _option(at_least(1))
    top_k: int = _option(at_least(1), default=2)
    capacity_factor: float = _option(FINITE, default=1.0)
    eval_capacity_factor: float = _option(FINITE, default=0.0)
    eval_capacity_token_fraction: float = _option(Range(high=1), default=0.0)
    second_expert_policy: str = "all"
    normalize_before_dropping: bool = False
    batch_prioritized: bool = False
    use_pad_mask: bool = False
    gating_fp32: bool = True
    router: str = "linear"
    gate_noise: float = _option(at_least(0), default=0.0)
    input_jitter: float = _option(Range(0, 1, high_open=True), default=0.0)
    input_dropout: float = _option(Range(0, 1, high_open=True), default=0.0)
    z_loss_weight: float = _option(at_least(0), default=0.0)
    load_importance_loss: bool = False
    balance_scope: str = "rank"
    balance_choices: str = "first"
    load_bias: str = "none"
    load_bias_rate: float = _option(Range(0, low_open=True), default=0.001)
    load_bias_entropy: bool = False
    score_function: str = "softmax"
    drop_policy: str = "position"
    overflow_rerouting: int = _option(at_least(0), default=0)
    route_scale: float = _option(Range(0, low_open=True), default=1.0)
    expert_output_masking: float = _option(Range(0, 1, high_open=True), default=0.0)
    final_output_masking: float = _option(Range(0, 1, high_open=True), default=0.0)
    null_experts: int = _option(at_least(0), default=0)
    router_options: Options | Mapping[str, Any] | None = None

    def __post_init__(self):
        for name in ("num_experts", "top_k", "overflow_rerouting", "null_experts"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a whole number")
        check_ranges(self, ranges_of(MoEConfig), as_argument)
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k={self.top_k} must lie between 1 and the number of experts, "
                f"{self.num_experts}"
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(choices)}"
                )
        router_options = ROUTERS.options(self.router, self.router_options)
        object.__setattr__(self, "router_options", router_options)
        if self.load_importance_loss and self.gate_noise <= 0:
            raise ValueError(
                "load_importance_loss needs gate_noise > 0: the load is estimated from the noise's "
                f"distribution, and gate_noise={self.gate_noise}"
            )
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        if self.batch_prioritized and self.drop_policy != "position":
            raise ValueError(
                f"batch_prioritized and drop_policy={self.drop_policy!r} both say which tokens a "
                "full expert drops: give one of them"
            )
        if self.load_importance_loss:
            for name in (
                "balance_scope",
                "balance_choices",
                "load_bias",
                "score_function",
                "null_experts",
            ):
                if getattr(self, name) != getattr(type(self), name):
                    raise ValueError(
                        "load_importance_loss and its noise are for GShard's choice and loss, not "
                        f"for {name}={getattr(self, name)!r}: give one or the other"
                    )
        if self.load_bias == "none":
            if self.load_bias_entropy:
                raise ValueError("load_bias_entropy weights a load_bias, and load_bias='none'")
            return
        if self.top_k > 1 and self.second_expert_policy != "all":
            raise ValueError(
                f"load_bias={self.load_bias!r} needs second_expert_policy='all', not "
                f"{self.second_expert_policy!r}: drawn choices do not answer to a bias"
            )
        if self.top_k == self.num_outputs:
            raise ValueError(
                f"load_bias={self.load_bias!r} has nothing to choose: top_k={self.top_k} takes all "
                "experts"
            )

    @property
    def num_outputs(self) -> int:
        """E + N, what a token chooses from: outputs of the gate."""
        return self.num_experts + self.null_experts

    @property
    def balance_choices_counted(self) -> int:
        """Choices of a token that the balance loss counts."""
        return 1 if self.balance_choices == "first" else self.top_k

    def capacity(self, num_tokens: int, training: bool) -> int | None:
        """Most tokens that one rank may send to one expert, or None where nothing is dropped.

        Args:
            num_tokens: T, the number of tokens that all ranks agreed on (the largest of them).
            training: whether the layer is in training mode.
        """
        if not training and self.eval_capacity_token_fraction > 0:
            return math.ceil(self.eval_capacity_token_fraction * num_tokens)
        factor = self.capacity_factor if training else self.eval_capacity_factor
        if factor == 0:
            return None
        return max(1, self.top_k * int(abs(factor) * math.ceil(num_tokens / self.num_outputs)))

    def is_static(self, training: bool) -> bool:
        """Whether buffers are sized by the capacity alone, so that no size depends on the data.

        Only fixed capacity in training is laid out so: evaluation with a capacity gives the same
        numbers from buffers of the size that is needed, where the reference's default of 0.25 T
        slots per expert fills E/8 times more memory than training does.
        """
        return training and self.capacity_factor > 0


@dataclass(frozen=True)
class ExchangeConfig:
    """Everything that decides how rows travel between ranks; the same on all of them.

    Ranks compare it as one value, when exchanges are built and in each step. A field that is added
    here is compared like the others.

    Attributes:
        algorithm: a registered name: ``linear``, ``2dh``, ``auto``, ``pairwise``, or one of a
            user's own.
        ranks_per_node: of algorithms that distinguish nodes; 0: as the machines have it.
        overlap_degree: chunks in which rows are exchanged, so that experts compute one while others
            travel: 1, 2, 4 or 8. Results change by rounding at most (dropout inside the experts
            draws a mask per chunk, so another one), drops not at all.
        wire: how tokens are written on their way to the experts: ``same`` (as they are), ``bf16``,
            ``fp16`` or ``fp8`` (both with a scale per 128 values; e4m3 for values, e5m2 for
            gradients). Where it is not narrower than the tokens' own dtype they travel as they are.
        wire_back, wire_grad: the same for the experts' outputs, and for the gradients of both;
            ``auto``: as ``wire``, but ``bf16`` where that is ``fp8``.
        r: how experts are computed in parallel, where tokens and weights may both travel
            (:mod:`fairseq_tutel.distributed.flows`): 0: tokens stay and weights are gathered; 1:
            tokens go to one rank that has, or gathers, their expert; more, with experts in S slices
            a divisor of S: to so many ranks, of which each has a part of it. Results change by
            rounding at most, drops not at all.
        wire_compact: only rows in use travel, and are computed, where a fixed capacity would send
            buffers of its size; the host reads the counts of each layer for it.
    """

    algorithm: str = field(default="linear", metadata={"label": "the exchange"})
    ranks_per_node: int = _option(at_least(0), default=0)
    overlap_degree: int = _option(one_of(1, 2, 4, 8), default=1)
    wire: str = field(default="same", metadata={"label": "the wire format of tokens"})
    wire_back: str = field(default="auto", metadata={"label": "the wire format of outputs"})
    wire_grad: str = field(default="auto", metadata={"label": "the wire format of gradients"})
    wire_compact: bool = field(default=False, metadata={"label": "whether only rows in use travel"})
    r: int = _option(at_least(0), default=1)

    def __post_init__(self):
        EXCHANGES.get(self.algorithm)
        for name in ("wire", "wire_back", "wire_grad"):
            choices = WIRES if name == "wire" else ("auto", *WIRES)
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(choices)}"
                )
        for name in ("ranks_per_node", "overlap_degree", "r"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a whole number")
        check_ranges(self, ranges_of(ExchangeConfig), as_argument)

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


def resolve_capacity(
    *,
    top1_expert: bool,
    top_k: int | None,
    capacity_factor: float | None,
    eval_capacity_factor: float | None,
    eval_capacity_token_fraction: float | None,
) -> dict:
    """Translate the command line's two vocabularies into fields of :class:`MoEConfig`.

    Returns:
        ``top_k``, ``capacity_factor``, ``eval_capacity_factor`` and
        ``eval_capacity_token_fraction``.

    Raises:
        ValueError: if an old and a new option contradict each other; both are named.
    """
    if top1_expert and top_k not in (None, 1):
        raise ValueError(
            f"--moe-top1-expert and --moe-top-k {top_k} contradict each other: give one of them"
        )
    if eval_capacity_token_fraction is not None and eval_capacity_factor is not None:
        raise ValueError(
            f"--moe-eval-capacity-token-fraction {eval_capacity_token_fraction} and "
            f"--moe-eval-capacity-factor {eval_capacity_factor} both set the evaluation capacity: "
            "give one of them"
        )
    if top_k is None:
        top_k = 1 if top1_expert else 2
    train_factor = 1.0 if capacity_factor is None else capacity_factor
    fraction = eval_capacity_token_fraction
    if fraction is not None and fraction <= 0:
        # the 2021 meaning of a fraction <= 0: evaluate with the training formula
        eval_capacity_factor, fraction = train_factor, None
    return {
        "top_k": top_k,
        "capacity_factor": train_factor,
        "eval_capacity_factor": 0.0 if eval_capacity_factor is None else eval_capacity_factor,
        "eval_capacity_token_fraction": 0.0 if fraction is None else fraction,
    }


def exchange_size(num_experts: int, world_size: int, expert_parallel_size: int = 0) -> int:
    """Ranks that exchange tokens with each other, and hold every expert once between them.

    Args:
        num_experts: E.
        world_size: W.
        expert_parallel_size: S, their number if it is chosen; 0: as many as can be, min(E, W).

    Raises:
        ValueError: E and W do not divide; or S is not a divisor of both.
    """
    size = expert_parallel_size
    if not size:
        check_divisible(num_experts, world_size)
        return min(num_experts, world_size)
    if not isinstance(size, int) or size < 0 or world_size % size or num_experts % size:
        raise ValueError(
            f"expert_parallel_size={size} (--moe-expert-parallel-size) must divide the number of "
            f"ranks, {world_size}, and that of experts, {num_experts}: so many ranks hold all of "
            "them together"
        )
    return size


def check_divisible(num_experts: int, world_size: int) -> None:
    """Raise ValueError unless E is a multiple of W or W one of E."""
    if num_experts % world_size and world_size % num_experts:
        raise ValueError(
            f"{num_experts} experts cannot be spread over {world_size} ranks: one number must "
            f"divide the other (choose an expert count that is a multiple or a divisor of "
            f"{world_size})"
        )
