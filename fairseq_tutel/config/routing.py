"""How tokens are routed: :class:`MoEConfig`, and the rules that make its options consistent.

Capacity has two vocabularies: the 2021 flags of fairseq's ``moe`` branch (in training ``K *
ceil(T/E)`` rows per expert and rank, in evaluation a fraction of the tokens), and Tutel's factors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from .options import OptionError, Range, above, at_least, check_options, documented, option
from .registry import ROUTERS, Options

# What an expert's gradient is divided by: an option of training.
EXPERT_GRAD_NORMALIZATIONS = ("world_size", "sqrt_world_size")

_PROBABILITY = Range(0, 1, high_open=True)


@documented
@dataclass(frozen=True)
class MoEConfig:
    """Everything that decides how tokens are routed; sizes of tensors are given to the modules."""

    num_experts: int = option(
        MISSING, "experts of a layer over all ranks (E)", at_least(1), flag="--moe-expert-count"
    )
    top_k: int = option(2, "experts per token (K)", at_least(1), flag_default=None)
    capacity_factor: float = option(
        1.0,
        "training capacity f, the most rows that an expert takes of a rank's tokens: f > 0: "
        "K * int(f * ceil(tokens / experts)), the rest is dropped; 0: nothing is dropped; f < 0: "
        "as many as are needed, up to the capacity of -f",
        flag_default=None,
    )
    eval_capacity_factor: float = option(
        0.0,
        "evaluation capacity, with the meaning of `capacity_factor`; 0 drops nothing",
        flag_default=None,
    )
    eval_capacity_token_fraction: float = option(
        0.0,
        "evaluation capacity of an expert as a fraction of the tokens of a batch, in place of "
        "`eval_capacity_factor`",
        Range(high=1),
        flag_default=None,
        note="; <= 0: the training formula (default: not given, evaluation drops nothing; "
        "Meta's default is 0.25)",
    )
    second_expert_policy: str = option(
        "all",
        "choices after the first: 'all': the next best experts; 'sampling': the best after Gumbel "
        "noise is added to the logits; 'random': the next best, kept with probability K * its gate "
        "value (GShard, arXiv 2006.16668, section 3.2). Evaluation keeps the next best",
        choices=("sampling", "all", "random"),
        flag_default="sampling",
    )
    normalize_before_dropping: bool = option(
        False,
        "divide the K gate values of a token by their sum before, not after, pairs over capacity "
        "are dropped",
        flag="--moe-normalize-gate-prob-before-dropping",
    )
    unnormalized_weights: bool = option(
        False,
        "weight the outputs of a token's K experts by its gate values as they are, which is what "
        "K = 1 does in any case, in place of their shares of their sum (OLMoE, arXiv 2409.02060)",
    )
    batch_prioritized: bool = option(
        False,
        "give capacity to the tokens with the highest gate values first (arXiv 2106.05974)",
        flag="--moe-batch-prioritized-routing",
    )
    use_pad_mask: bool = option(
        False,
        "do not route padding tokens: fairseq's model gives its mask to the layers. One that is "
        "given to a layer is always used",
        flag="--use-moe-pad-mask",
    )
    gating_fp32: bool = option(
        True,
        "compute the gate's logits with fp32 output from inputs of any dtype",
        flag="--moe-gating-use-fp32",
        flag_default=None,
        note=" (default: on; --moe-gating-use-model-dtype turns it off)",
    )
    router: str = option("linear", "the gate")
    gate_noise: float = option(
        0.0,
        "normal noise on the logits in training: its standard deviation times the number of "
        "experts",
        at_least(0),
    )
    input_jitter: float = option(
        0.0, "multiply the gate's input by uniform(1-j, 1+j) in training", _PROBABILITY
    )
    input_dropout: float = option(
        0.0, "dropout on the layer's input before routing, in training", _PROBABILITY
    )
    z_loss_weight: float = option(
        0.0,
        "weight of the router z-loss, mean(logsumexp(logits)^2), inside the gate loss (arXiv "
        "2202.08906, equation 5)",
        at_least(0),
        flag="--moe-z-loss-wt",
        group="balance",
    )
    load_importance_loss: bool = option(
        False,
        "the load and importance losses of arXiv 1701.06538 (appendix A) in place of GShard's "
        "balance loss; needs a `gate_noise` > 0",
        group="balance",
    )
    balance_scope: str = option(
        "rank",
        "tokens over which the balance loss balances: 'rank': those of each rank and batch; "
        "'global': of all ranks together, in training (arXiv 2501.11873); 'sequence': of every "
        "sequence by itself (arXiv 2412.19437, equation 17)",
        choices=("rank", "global", "sequence"),
        flag="--moe-gate-loss-scope",
        group="balance",
    )
    balance_choices: str = option(
        "first",
        "choices of a token that the balance loss counts: the 'first', as Meta's, or 'all', "
        "divided by K",
        choices=("first", "all"),
        flag="--moe-gate-loss-choices",
        group="balance",
    )
    balance_over: str = option(
        "unpadded",
        "tokens of which balance loss and z-loss are means where padding is masked: those that are "
        "'unpadded'; or 'all', as Meta's, where padding and what stands in it change the loss; "
        "'longest': all, and zeros that fill up each rank's tokens to as many as the longest one "
        "has, as Meta's with --max-tokens (the default of transformer_moe)",
        choices=("unpadded", "all", "longest"),
        flag="--moe-gate-loss-over",
        flag_default="all",
        group="balance",
    )
    load_bias: str = option(
        "none",
        "balance experts by a bias on their selection that follows their load, without a loss: "
        "'quantile': after every update by as much as its tokens would need (arXiv 2607.24653; "
        "recommended); 'sign': by `load_bias_rate` (arXiv 2408.15664). Needs "
        "`second_expert_policy='all'` where K > 1",
        choices=("none", "sign", "quantile"),
        group="balance",
    )
    load_bias_rate: float = option(0.001, "step of `load_bias='sign'`", above(0), group="balance")
    score_function: str = option(
        "softmax",
        "gate values: the 'softmax' of the logits, or the 'sigmoid' of each (arXiv 2412.19437, "
        "equation 15); losses and entropy take it divided by its sum",
        choices=("softmax", "sigmoid"),
    )
    drop_policy: str = option(
        "position",
        "what a full expert drops: the last tokens of the batch ('position'), those with the least "
        "gate values ('probability'), or any ('random', in training; else by position)",
        choices=("position", "probability", "random"),
    )
    overflow_rerouting: int = option(
        0,
        "further choices after the first K that a token may try where an expert is full",
        at_least(0),
    )
    route_scale: float = option(
        1.0, "factor of the weights of the experts' outputs, after their normalisation", above(0)
    )
    expert_output_masking: float = option(
        0.0,
        "probability by which training leaves out an output of an expert (NLLB's EOM, arXiv "
        "2207.04672); evaluation multiplies by what is kept",
        _PROBABILITY,
        flag="--moe-eom",
    )
    final_output_masking: float = option(
        0.0,
        "the same of the layer's whole output of a token (NLLB's FOM)",
        _PROBABILITY,
        flag="--moe-fom",
    )
    local_drop: float = option(
        0.0,
        "probability by which training leaves out both exchanges of a layer, per step: its tokens "
        "are then computed by their own rank's experts (gating dropout, arXiv 2205.14336)",
        _PROBABILITY,
        flag="--moe-local-drop",
    )
    null_experts: int = option(
        0,
        "experts beside the others that compute nothing: a token that chooses one has an expert "
        "less, so that the number of its experts is the token's own (arXiv 2410.07348)",
        at_least(0),
    )
    router_options: Options | Mapping[str, Any] | None = option(
        None, "the router's own options, by name or as an object of its class ``Options``"
    )

    def __post_init__(self):
        check_options(self)
        if self.top_k > self.num_experts:
            raise OptionError(
                f"`top_k={self.top_k}` must lie between 1 and the number of experts, "
                f"{self.num_experts}"
            )
        router_options = ROUTERS.options(self.router, self.router_options)
        object.__setattr__(self, "router_options", router_options)
        self._check_load_importance_loss()
        self._check_load_bias()
        if self.batch_prioritized and self.drop_policy != "position":
            raise OptionError(
                f"`batch_prioritized` and `drop_policy={self.drop_policy!r}` both say which tokens "
                "a full expert drops: give one of them"
            )
        if self.unnormalized_weights and self.normalize_before_dropping:
            raise OptionError(
                "`normalize_before_dropping` and `unnormalized_weights` contradict each other: "
                "give one of them"
            )

    def _check_load_importance_loss(self) -> None:
        if not self.load_importance_loss:
            return
        if self.gate_noise <= 0:
            raise OptionError(
                "`load_importance_loss` needs a `gate_noise` > 0: the load is estimated from the "
                f"noise's distribution, and `gate_noise={self.gate_noise}`"
            )
        others = ["balance_scope", "balance_choices", "load_bias", "score_function", "null_experts"]
        for name in others:
            if getattr(self, name) != getattr(type(self), name):
                raise OptionError(
                    "`load_importance_loss` and its noise are for GShard's choice and loss, not "
                    f"for `{name}={getattr(self, name)!r}`: give one or the other"
                )

    def _check_load_bias(self) -> None:
        if self.load_bias == "none":
            return
        if self.top_k > 1 and self.second_expert_policy != "all":
            raise OptionError(
                f"`load_bias={self.load_bias!r}` needs `second_expert_policy='all'`, not "
                f"{self.second_expert_policy!r}: drawn choices do not answer to a bias"
            )
        if self.top_k == self.num_outputs:
            raise OptionError(
                f"`load_bias={self.load_bias!r}` has nothing to choose: `top_k={self.top_k}` takes "
                "all experts"
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

        ``num_tokens``: T, which all ranks agreed on (the largest of them).
        """
        if not training and self.eval_capacity_token_fraction > 0:
            return math.ceil(self.eval_capacity_token_fraction * num_tokens)
        factor = self.capacity_factor if training else self.eval_capacity_factor
        if factor == 0:
            return None
        return max(1, self.top_k * int(abs(factor) * math.ceil(num_tokens / self.num_outputs)))

    def dispatch_rows(self, num_tokens: int) -> int:
        """R, rows of a rank's dispatch buffer in training: E C with a fixed capacity, else K T.

        Without a fixed capacity the number of received rows depends on the routing; K T is the mean
        over the ranks, of which N null experts, chosen as often as others, take their share
        N / (E + N).
        """
        capacity = self.capacity(num_tokens, training=True)
        if capacity is None or not self.is_static(training=True):
            return -(-self.top_k * num_tokens * self.num_experts // self.num_outputs)
        return self.num_experts * capacity

    def is_static(self, training: bool) -> bool:
        """Whether buffers are sized by the capacity alone, so that no size depends on the data.

        Not in evaluation: Meta's 0.25 T rows per expert fill E/8 times the memory of training.
        """
        return training and self.capacity_factor > 0
