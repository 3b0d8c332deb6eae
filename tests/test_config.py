"""MoEConfig: capacities computed by hand, and every refusal with its values."""

import math

import pytest

from fairseq_tutel.config import ExchangeConfig, MoEConfig, check_divisible, resolve_capacity

UNSET = {
    "top1_expert": False,
    "top_k": None,
    "capacity_factor": None,
    "eval_capacity_factor": None,
    "eval_capacity_token_fraction": None,
}


@pytest.mark.parametrize(
    "tokens, training, options, slots",
    [
        # training on the 2021 branch: ceil(T/E) and 2*ceil(T/E)
        (100, True, {"num_experts": 8, "top_k": 1}, 13),
        (100, True, {"num_experts": 8, "top_k": 2}, 26),
        (24576, True, {"num_experts": 512, "top_k": 2}, 96),
        # Tutel: K * int(f * ceil(T/E))
        (100, True, {"num_experts": 8, "top_k": 2, "capacity_factor": 1.25}, 32),
        (100, True, {"num_experts": 8, "top_k": 2, "capacity_factor": -1.25}, 32),
        (100, True, {"num_experts": 8, "top_k": 2, "capacity_factor": 0.0}, None),
        # never less than one slot, not even without tokens
        (0, True, {"num_experts": 8}, 1),
        (1, True, {"num_experts": 8, "capacity_factor": 0.01}, 1),
        # evaluation
        (100, False, {"num_experts": 8}, None),
        (100, False, {"num_experts": 8, "eval_capacity_factor": 2.0}, 52),
        (100, False, {"num_experts": 8, "eval_capacity_token_fraction": 0.25}, 25),
        (101, False, {"num_experts": 8, "eval_capacity_token_fraction": 0.25}, 26),
        (100, True, {"num_experts": 8, "eval_capacity_token_fraction": 0.25}, 26),
    ],
)
def test_capacity(tokens, training, options, slots):
    assert MoEConfig(**options).capacity(tokens, training) == slots


def test_only_fixed_capacity_in_training_is_static():
    for factor, static in ((1.0, True), (0.0, False), (-1.0, False)):
        config = MoEConfig(num_experts=4, capacity_factor=factor, eval_capacity_factor=factor)
        assert config.is_static(training=True) == static
        assert not config.is_static(training=False)


@pytest.mark.parametrize(
    "given, want",
    [
        ({}, {"top_k": 2, "capacity_factor": 1.0, "eval_capacity_factor": 0.0}),
        ({"top1_expert": True}, {"top_k": 1}),
        ({"top1_expert": True, "top_k": 1}, {"top_k": 1}),
        ({"top_k": 4, "capacity_factor": 0.0}, {"top_k": 4, "capacity_factor": 0.0}),
        ({"eval_capacity_factor": -2.0}, {"eval_capacity_factor": -2.0}),
        ({"eval_capacity_token_fraction": 0.25}, {"eval_capacity_token_fraction": 0.25}),
        # the 2021 meaning of <= 0: the training formula
        (
            {"eval_capacity_token_fraction": -1.0},
            {"eval_capacity_token_fraction": 0.0, "eval_capacity_factor": 1.0},
        ),
        (
            {"eval_capacity_token_fraction": 0.0, "capacity_factor": 1.5},
            {"eval_capacity_token_fraction": 0.0, "eval_capacity_factor": 1.5},
        ),
    ],
)
def test_two_vocabularies_for_capacity(given, want):
    resolved = resolve_capacity(**{**UNSET, **given})
    assert {k: resolved[k] for k in want} == want
    MoEConfig(num_experts=4, **resolved)


@pytest.mark.parametrize(
    "given, names",
    [
        ({"top1_expert": True, "top_k": 2}, ("--moe-top1-expert", "--moe-top-k 2")),
        (
            {"eval_capacity_factor": 1.0, "eval_capacity_token_fraction": 0.25},
            ("--moe-eval-capacity-token-fraction 0.25", "--moe-eval-capacity-factor 1.0"),
        ),
    ],
)
def test_conflicts_name_both_options(given, names):
    with pytest.raises(ValueError) as caught:
        resolve_capacity(**{**UNSET, **given})
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_experts": 0}, "num_experts=0 must be at least 1"),
        ({"num_experts": 4, "top_k": 5}, "top_k=5 .* 4"),
        ({"num_experts": 4, "top_k": 0}, "top_k=0"),
        ({"num_experts": 4, "second_expert_policy": "best"}, "'best'.*sampling, all, random"),
        ({"num_experts": 4, "router": "hash"}, "'hash'.*cosine, linear"),
        ({"num_experts": 4, "capacity_factor": math.nan}, "capacity_factor=nan"),
        ({"num_experts": 4, "eval_capacity_factor": math.inf}, "eval_capacity_factor=inf"),
        ({"num_experts": 4, "eval_capacity_token_fraction": 1.5}, "fraction=1.5.*at most 1"),
        ({"num_experts": 4, "gate_noise": -1.0}, "gate_noise=-1.0"),
        ({"num_experts": 4, "z_loss_weight": -0.1}, "z_loss_weight=-0.1"),
        ({"num_experts": 4, "input_jitter": 1.0}, "jitter=1.0 must be at least 0 and below 1"),
        ({"num_experts": 4, "input_dropout": -0.5}, "input_dropout=-0.5"),
        ({"num_experts": 4, "load_importance_loss": True}, "gate_noise=0.0"),
    ],
)
def test_impossible_values_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"algorithm": "quick"}, "'quick' is unknown; choose one of 2dh, auto, linear"),
        ({"ranks_per_node": -1}, "ranks_per_node=-1 must be at least 0"),
        ({"overlap_degree": 3}, "overlap_degree=3 must be one of 1, 2, 4, 8"),
        ({"ranks_per_node": 2.5}, "ranks_per_node=2.5 must be a whole number"),
        ({"wire": "fp4"}, "wire='fp4' is unknown; choose one of same, bf16, fp16, fp8"),
        ({"wire_back": "none"}, "wire_back='none' is unknown; choose one of auto, same,"),
    ],
)
def test_impossible_exchanges_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ExchangeConfig(**options)


def test_the_name_of_an_algorithm_is_short_for_an_exchange():
    assert ExchangeConfig.of("2dh") == ExchangeConfig(algorithm="2dh", ranks_per_node=0)
    config = ExchangeConfig("auto", ranks_per_node=4)
    assert ExchangeConfig.of(config) is config


@pytest.mark.parametrize("experts, ranks", [(1, 4), (2, 4), (4, 4), (12, 4), (7, 7), (5, 1)])
def test_numbers_that_divide_are_accepted(experts, ranks):
    check_divisible(experts, ranks)


@pytest.mark.parametrize("experts, ranks", [(3, 4), (6, 4), (4, 3), (5, 2)])
def test_numbers_that_do_not_divide_are_refused(experts, ranks):
    with pytest.raises(ValueError, match=f"{experts} experts.*{ranks} ranks"):
        check_divisible(experts, ranks)
