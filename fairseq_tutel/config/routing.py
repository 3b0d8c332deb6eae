"""Routing options: :class:`MoEConfig`, and the rules that keep them consistent.

Capacity has two vocabularies: the 2021 flags of fairseq's ``moe`` branch (``K * ceil(T/E)`` rows
per expert and rank in training, a fraction of the tokens in evaluation), and Tutel's factors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from .force_load import check_force_load
from .options import NO_FLAG, OptionError, Range, above, at_least, check_options, documented, option
from .presets import PRESETS
from .registry import ROUTERS, Options

# divisors of expert gradients: an option of training
EXPERT_GRAD_NORMALIZATIONS = ("world_size", "sqrt_world_size")

_PROBABILITY = Range(0, 1, high_open=True)


@documented
@dataclass(frozen=True)
class MoEConfig:
    """Routing of an MoE layer: router, capacity, losses, load balance."""

    num_experts: int = option(
        MISSING, "experts of a layer over all ranks (E)", at_least(1), flag="--moe-expert-count"
    )
    top_k: int = option(2, "experts per token (K)", at_least(1), flag_default=None)
    capacity_factor: float = option(
        1.0,
        "most rows of an expert per rank in training. f > 0: K * int(f * ceil(tokens / experts)),"
        " the rest is dropped; 0: no limit; f < 0: as needed, up to the capacity of -f",
        flag_default=None,
    )
    eval_capacity_factor: float = option(
        0.0, "capacity in evaluation, as `capacity_factor`; 0: no limit", flag_default=None
    )
    eval_capacity_token_fraction: float = option(
        0.0,
        "capacity in evaluation as a fraction of the batch's tokens",
        Range(high=1),
        flag_default=None,
        note="; <= 0: the training formula (default: not given; Meta's default is 0.25)",
    )
    second_expert_policy: str = option(
        "all",
        "choices after the first: 'all': the next best; 'sampling': the best after Gumbel noise; "
        "'random': the next best, kept with probability K * its gate value (GShard, arXiv "
        "2006.16668). Evaluation takes the next best",
        choices=("sampling", "all", "random"),
        flag_default=PRESETS["meta"]["second_expert_policy"],
    )
    normalize_before_dropping: bool = option(
        False,
        "normalise gate values before drops, not after",
        flag="--moe-normalize-gate-prob-before-dropping",
    )
    unnormalized_weights: bool = option(
        False, "weights are plain gate values (OLMoE, arXiv 2409.02060), as for K = 1"
    )
    batch_prioritized: bool = option(
        False,
        "the highest gate values get capacity first (arXiv 2106.05974)",
        flag="--moe-batch-prioritized-routing",
    )
    use_pad_mask: bool = option(False, "do not route padding", flag="--use-moe-pad-mask")
    gating_fp32: bool = option(
        True,
        "compute fp32 logits from any dtype",
        flag="--moe-gating-use-fp32",
        flag_default=None,
        note=" (default: on; off with --moe-gating-use-model-dtype)",
    )
    router: str = option("linear", "the gate", registry=ROUTERS, options="router_options")
    gate_noise: float = option(
        0.0, "noise on the logits in training: standard deviation times experts", at_least(0)
    )
    input_jitter: float = option(
        0.0, "multiply the gate's input by uniform(1-j, 1+j) in training", _PROBABILITY
    )
    input_dropout: float = option(0.0, "dropout before routing", _PROBABILITY)
    z_loss_weight: float = option(
        0.0,
        "weight of the router z-loss in the gate loss (arXiv 2202.08906)",
        at_least(0),
        flag="--moe-z-loss-wt",
        group="balance",
    )
    load_importance_loss: bool = option(
        False,
        "load and importance losses (arXiv 1701.06538) in place of the balance loss; needs "
        "`gate_noise` > 0",
        group="balance",
        needs=["gate_noise"],
    )
    balance_scope: str = option(
        "rank",
        "tokens that are balanced together: those of a 'rank', all ranks ('global', arXiv "
        "2501.11873), all ranks in the 'update' so far, or a 'sequence' (arXiv 2412.19437)",
        choices=("rank", "global", "update", "sequence"),
        flag="--moe-gate-loss-scope",
        group="balance",
    )
    balance_choices: str = option(
        "first",
        "count the 'first' choices (Meta's), or 'all', divided by K",
        choices=("first", "all"),
        flag="--moe-gate-loss-choices",
        group="balance",
    )
    balance_over: str = option(
        "unpadded",
        "average over 'unpadded' tokens, 'all' (Meta's), or 'longest': all, and zeros up to the "
        "longest rank (Meta's with --max-tokens; default of transformer_moe)",
        choices=("unpadded", "all", "longest"),
        flag="--moe-gate-loss-over",
        flag_default="all",
        group="balance",
    )
    load_bias: str = option(
        "none",
        "bias on the selection of experts, moved by their load: 'quantile': after each update by "
        "as much as its tokens need (arXiv 2607.24653); 'sign': by `load_bias_rate` (arXiv "
        "2408.15664); 'frozen': never. K > 1 needs `second_expert_policy='all'`",
        choices=("none", "sign", "quantile", "frozen"),
        group="balance",
    )
    load_bias_rate: float = option(
        0.001, "step of `load_bias='sign'`", above(0), group="balance", needs=["load_bias=sign"]
    )
    score_function: str = option(
        "softmax",
        "gate values: 'softmax' of the logits, or 'sigmoid' of each (arXiv 2412.19437)",
        choices=("softmax", "sigmoid"),
    )
    num_expert_groups: int = option(
        1,
        "groups of neighbouring experts (arXiv 2412.19437). More than 1 needs "
        "`second_expert_policy='all'`",
        at_least(1),
    )
    top_groups: int = option(
        1, "groups that a token may choose from", at_least(1), needs=["num_expert_groups"]
    )
    group_score: str = option(
        "top2",
        "score of a group: 'top2': sum of its two largest (DeepSeek-V3); 'max': its largest "
        "(DeepSeek-V2, arXiv 2405.04434)",
        choices=("top2", "max"),
        needs=["num_expert_groups"],
    )
    drop_policy: str = option(
        "position",
        "what a full expert drops: the last tokens ('position'), the smallest gate values "
        "('probability'), or any pairs in training ('random')",
        choices=("position", "probability", "random"),
    )
    overflow_rerouting: int = option(
        0, "further experts that a token may try if one is full", at_least(0)
    )
    route_scale: float = option(1.0, "factor of the normalised output weights", above(0))
    expert_output_masking: float = option(
        0.0,
        "probability of masking an expert's output in training (NLLB, arXiv 2207.04672)",
        _PROBABILITY,
        flag="--moe-eom",
    )
    final_output_masking: float = option(
        0.0, "the same for a token's whole output", _PROBABILITY, flag="--moe-fom"
    )
    local_drop: float = option(
        0.0,
        "probability that a training step exchanges nothing; the rank's own experts compute its "
        "tokens (arXiv 2205.14336)",
        _PROBABILITY,
        flag="--moe-local-drop",
    )
    null_experts: int = option(
        0, "additional experts that compute nothing (arXiv 2410.07348)", at_least(0)
    )
    benchmark: bool = option(
        False,
        "the run only measures speed: accept `force_load`, with which training is worthless",
        flag=NO_FLAG,
    )
    force_load: str = option(
        "",
        "shares of the load, with commas, in place of the gate's choices. The list repeats: `3,1` "
        "gives every first expert three times the pairs of every second, `1` is an even load. "
        "Weights are the gate's. Needs `benchmark`",
        flag=NO_FLAG,
    )
    router_options: Options | Mapping[str, Any] | None = option(
        None, "the router's own options, by name or as an object of its class ``Options``"
    )

    def __post_init__(self):
        check_options(self)
        if self.top_k > self.num_experts:
            raise OptionError(f"`top_k={self.top_k}` must be at most {self.num_experts} (experts)")
        self._check_load_importance_loss()
        self._check_load_bias()
        self._check_groups()
        if self.batch_prioritized and self.drop_policy != "position":
            raise OptionError(
                f"`batch_prioritized` and `drop_policy={self.drop_policy!r}` both say which tokens "
                "a full expert drops: give one of them"
            )
        if self.force_load:
            check_force_load(self.force_load, self.num_experts, self.top_k, self.benchmark)
        if self.unnormalized_weights and self.normalize_before_dropping:
            raise OptionError("`normalize_before_dropping` contradicts `unnormalized_weights`")

    def _check_load_importance_loss(self) -> None:
        if not self.load_importance_loss:
            return
        others = ["balance_scope", "balance_choices", "load_bias", "score_function", "null_experts"]
        others.append("num_expert_groups")
        for name in others:
            if getattr(self, name) != getattr(type(self), name):
                other = f"`{name}={getattr(self, name)!r}`"
                raise OptionError(f"`load_importance_loss` or {other}: give one of them")

    def _check_load_bias(self) -> None:
        if self.load_bias == "none":
            return
        if self.top_k > 1 and self.second_expert_policy != "all":
            raise OptionError(
                f"`load_bias={self.load_bias!r}` needs `second_expert_policy='all'`, not "
                f"{self.second_expert_policy!r}: drawn choices do not answer to a bias"
            )
        if self.top_k == self.num_outputs and self.moves_load_bias:
            given = f"`load_bias={self.load_bias!r}` has nothing to choose"
            raise OptionError(f"{given}: `top_k={self.top_k}` takes all experts")

    def _check_groups(self) -> None:
        groups = self.num_expert_groups
        if groups == 1:
            return
        given = f"`num_expert_groups={groups}`"
        if self.num_experts % groups:
            raise OptionError(f"{given} must divide the number of experts, {self.num_experts}")
        if self.top_groups > groups:
            raise OptionError(f"`top_groups={self.top_groups}` of {given} cannot be chosen")
        allowed = self.num_experts // groups * self.top_groups
        if self.top_k + self.overflow_rerouting > allowed:
            raise OptionError(
                f"`top_k={self.top_k}` and `overflow_rerouting={self.overflow_rerouting}` are more "
                f"choices than the {allowed} experts of `top_groups={self.top_groups}`"
            )
        if self.group_score == "top2" and groups == self.num_experts:
            raise OptionError(f"{given} has one expert per group: give `group_score='max'`")
        if self.top_k > 1 and self.second_expert_policy != "all":
            raise OptionError(
                f"{given} needs `second_expert_policy='all'`, not {self.second_expert_policy!r}: "
                "drawn choices do not keep to groups"
            )
        if self.null_experts or self.load_bias == "quantile":
            raise OptionError(
                f"{given} needs `null_experts=0` and no `load_bias='quantile'`, which compare all "
                "experts of a token; 'sign' works"
            )

    @property
    def moves_load_bias(self) -> bool:
        """Whether training moves the load bias."""
        return self.load_bias in ("sign", "quantile")

    @property
    def balances_over_ranks(self) -> bool:
        """Whether the balance loss in training needs the counts of all ranks."""
        return self.balance_scope in ("global", "update")

    @property
    def num_outputs(self) -> int:
        """Outputs of the gate, E + N: experts and null experts."""
        return self.num_experts + self.null_experts

    @property
    def balance_choices_counted(self) -> int:
        """Number of choices per token in the balance loss."""
        return 1 if self.balance_choices == "first" else self.top_k

    def capacity(self, num_tokens: int, training: bool) -> int | None:
        """Return C, the most rows that a rank may send to an expert, or None; T is the largest."""
        if not training and self.eval_capacity_token_fraction > 0:
            return math.ceil(self.eval_capacity_token_fraction * num_tokens)
        factor = self.capacity_factor if training else self.eval_capacity_factor
        if factor == 0:
            return None
        return max(1, self.top_k * int(abs(factor) * math.ceil(num_tokens / self.num_outputs)))

    def dispatch_rows(self, num_tokens: int) -> int:
        """Return R, the rows of a rank's dispatch buffer in training.

        R is E C with a fixed capacity. Without one it depends on the routing; the result is then
        the mean over the ranks, K T E / (E + N), as if all E + N were chosen equally often.
        """
        capacity = self.capacity(num_tokens, training=True)
        if capacity is None or not self.is_static(training=True):
            return -(-self.top_k * num_tokens * self.num_experts // self.num_outputs)
        return self.num_experts * capacity

    def is_static(self, training: bool) -> bool:
        """Return whether the capacity alone decides the sizes of buffers; never in evaluation."""
        return training and self.capacity_factor > 0
