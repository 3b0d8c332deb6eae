"""Options of routing and their translation into an :class:`MoEConfig`."""

# no postponed annotations here: fairseq reads the types of dataclass fields
from dataclasses import dataclass
from typing import Optional

from fairseq.dataclass import ChoiceEnum

from ..config import (
    BALANCE_CHOICES,
    BALANCE_SCOPES,
    DROP_POLICIES,
    EXPERT_GRAD_NORMALIZATIONS,
    LOAD_BIASES,
    ROUTERS,
    SCORE_FUNCTIONS,
    SECOND_EXPERT_POLICIES,
    MoEConfig,
    resolve_capacity,
)
from ..ranges import ranges_of
from .option_fields import option

_ROUTING = ranges_of(MoEConfig)


@dataclass
class RoutingOptions:
    """How tokens choose experts, and what an expert's gradient is divided by."""

    # options of fairseq's moe branch
    moe_gating_use_fp32: Optional[bool] = option(
        None, "compute the gate with fp32 output (the default; see --moe-gating-use-model-dtype)"
    )
    moe_second_expert_policy: ChoiceEnum(SECOND_EXPERT_POLICIES) = option(
        "sampling",
        "choices after the first: 'all': the next best expert; 'sampling': the best after adding "
        "Gumbel noise; 'random': the next best, kept with probability K * gate. Evaluation takes "
        "the next best and keeps it",
    )
    moe_normalize_gate_prob_before_dropping: bool = option(
        False, "normalise the gate values of a token before, not after, dropping over capacity"
    )
    moe_top1_expert: bool = option(False, "route each token to one expert, not two")
    moe_eval_capacity_token_fraction: Optional[float] = option(
        None,
        "evaluation capacity of an expert as a fraction of the tokens of a batch; <= 0: the "
        "training formula (default: evaluation drops no token; the moe branch's default is 0.25)",
        _ROUTING["eval_capacity_token_fraction"],
    )
    moe_normalize_expert_grad: ChoiceEnum(EXPERT_GRAD_NORMALIZATIONS) = option(
        "world_size",
        "divide expert gradients by the number of ranks (the true gradient) or by its square root",
    )
    use_moe_pad_mask: bool = option(False, "do not route padding tokens")
    moe_batch_prioritized_routing: bool = option(
        False, "give capacity to the tokens with the highest gate values first"
    )

    # what those lack
    moe_top_k: Optional[int] = option(
        None,
        "experts per token (default: 2, or 1 with --moe-top1-expert)",
        _ROUTING["top_k"],
    )
    moe_capacity_factor: Optional[float] = option(
        None,
        "training capacity: f > 0: top_k * f * tokens / experts per expert and rank; 0: drop "
        "nothing; f < 0: what is needed, up to that of -f (default: 1.0)",
        _ROUTING["capacity_factor"],
    )
    moe_eval_capacity_factor: Optional[float] = option(
        None,
        "evaluation capacity, the same meaning (default: 0, drop nothing)",
        _ROUTING["eval_capacity_factor"],
    )
    moe_gating_use_model_dtype: bool = option(
        False, "round the gate's logits to the model's dtype (turns fp32 gating off)"
    )
    # choices and help, and the routers' own options: see registered.py
    moe_router: str = option("linear", "the gate")
    moe_gate_noise: float = option(
        0.0,
        "standard deviation, times the expert count, of noise on the logits in training",
        _ROUTING["gate_noise"],
    )
    moe_input_jitter: float = option(
        0.0,
        "multiply the gate's input by uniform(1-j, 1+j) in training",
        _ROUTING["input_jitter"],
    )
    moe_input_dropout: float = option(
        0.0, "dropout on the input of MoE layers in training", _ROUTING["input_dropout"]
    )
    moe_z_loss_wt: float = option(
        0.0,
        "weight of the router z-loss inside the gate loss (arXiv 2202.08906)",
        _ROUTING["z_loss_weight"],
    )
    moe_load_importance_loss: bool = option(
        False, "load and importance losses (arXiv 1701.06538) for GShard's; needs --moe-gate-noise"
    )
    moe_gate_loss_scope: ChoiceEnum(BALANCE_SCOPES) = option(
        "rank",
        "tokens that the balance loss balances: 'rank': those of each rank and batch; 'global': of "
        "all ranks together, in training; 'sequence': of every sequence by itself",
    )
    moe_gate_loss_choices: ChoiceEnum(BALANCE_CHOICES) = option(
        "first", "choices of a token that the balance loss counts: the 'first', or 'all'"
    )
    moe_load_bias: ChoiceEnum(LOAD_BIASES) = option(
        "none",
        "balance experts by a bias on their selection that follows the load, without a loss: "
        "'quantile': every update as far as its tokens need; 'sign': by --moe-load-bias-rate; "
        "needs --moe-second-expert-policy all",
    )
    moe_load_bias_rate: float = option(
        0.001, "step of --moe-load-bias sign", _ROUTING["load_bias_rate"]
    )
    moe_load_bias_entropy: bool = option(
        False, "experimental: multiply the load bias by the relative entropy of a token's gate"
    )
    moe_overflow_rerouting: int = option(
        0,
        "choices after the first top-k that a token may try where an expert is full",
        _ROUTING["overflow_rerouting"],
    )
    moe_drop_policy: ChoiceEnum(DROP_POLICIES) = option(
        "position",
        "what a full expert drops: the last in the batch ('position'), the least gate values "
        "('probability'), or 'random' tokens (in training)",
    )
    moe_score_function: ChoiceEnum(SCORE_FUNCTIONS) = option(
        "softmax", "gate values: the 'softmax' of the logits, or the 'sigmoid' of each"
    )
    moe_route_scale: float = option(
        1.0, "factor of the weights of the experts' outputs", _ROUTING["route_scale"]
    )
    moe_null_experts: int = option(
        0,
        "experts that compute nothing, beside the others: a token that chooses one has an expert "
        "less, so that the number of experts of a token is its own",
        _ROUTING["null_experts"],
    )
    moe_eom: float = option(
        0.0,
        "expert output masking: probability by which training leaves out an output of an expert; "
        "evaluation multiplies by what is kept",
        _ROUTING["expert_output_masking"],
    )
    moe_fom: float = option(
        0.0,
        "final output masking: the same of an MoE layer's whole output of a token",
        _ROUTING["final_output_masking"],
    )


def moe_config(args, num_experts: int) -> MoEConfig:
    """The routing options of a model config (or argparse namespace) as an :class:`MoEConfig`.

    Raises:
        ValueError: an impossible value, or two options that contradict each other.
    """
    if args.moe_gating_use_fp32 and args.moe_gating_use_model_dtype:
        raise ValueError(
            "--moe-gating-use-fp32 and --moe-gating-use-model-dtype contradict each other"
        )
    router = str(args.moe_router)
    fp32 = not args.moe_gating_use_model_dtype and args.moe_gating_use_fp32 is not False
    return MoEConfig(
        num_experts=num_experts,
        **resolve_capacity(
            top1_expert=args.moe_top1_expert,
            # the default of 2 means one expert where there is only one
            top_k=1 if num_experts == 1 and args.moe_top_k is None else args.moe_top_k,
            capacity_factor=args.moe_capacity_factor,
            eval_capacity_factor=args.moe_eval_capacity_factor,
            eval_capacity_token_fraction=args.moe_eval_capacity_token_fraction,
        ),
        second_expert_policy=str(args.moe_second_expert_policy),
        normalize_before_dropping=args.moe_normalize_gate_prob_before_dropping,
        batch_prioritized=args.moe_batch_prioritized_routing,
        use_pad_mask=args.use_moe_pad_mask,
        gating_fp32=fp32,
        router=router,
        router_options=ROUTERS.options_of_flags(router, args),
        gate_noise=args.moe_gate_noise,
        input_jitter=args.moe_input_jitter,
        input_dropout=args.moe_input_dropout,
        z_loss_weight=args.moe_z_loss_wt,
        load_importance_loss=args.moe_load_importance_loss,
        balance_scope=str(args.moe_gate_loss_scope),
        balance_choices=str(args.moe_gate_loss_choices),
        load_bias=str(args.moe_load_bias),
        load_bias_rate=args.moe_load_bias_rate,
        score_function=str(args.moe_score_function),
        load_bias_entropy=args.moe_load_bias_entropy,
        overflow_rerouting=args.moe_overflow_rerouting,
        drop_policy=str(args.moe_drop_policy),
        route_scale=args.moe_route_scale,
        null_experts=args.moe_null_experts,
        expert_output_masking=args.moe_eom,
        final_output_masking=args.moe_fom,
    )
