"""MoEConfig and ExchangeConfig: capacities computed by hand, and refusals with their values."""

from dataclasses import fields

import pytest

import fairseq_tutel.moe  # noqa: F401  registers what is chosen by name
from fairseq_tutel.config import ExchangeConfig, ExpertConfig, MoEConfig, exchange_size


@pytest.mark.parametrize("tokens, training, options, slots", [
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
])  # fmt: skip
def test_capacity(tokens, training, options, slots):
    assert MoEConfig(**options).capacity(tokens, training) == slots


@pytest.mark.parametrize("factor, static", [(1.0, True), (0.0, False), (-1.0, False)])
def test_only_fixed_capacity_in_training_is_static(factor, static):
    config = MoEConfig(num_experts=4, capacity_factor=factor, eval_capacity_factor=factor)
    assert config.is_static(training=True) == static and not config.is_static(training=False)


def make(config, **options):
    return config(**({"num_experts": 4} if config is MoEConfig else {}), **options)


CHOICES = [
    (config, field) for config in (MoEConfig, ExchangeConfig, ExpertConfig)
    for field in fields(config)
    if field.metadata["choices"]
]  # fmt: skip


@pytest.mark.parametrize("config, field", CHOICES, ids=lambda each: getattr(each, "name", None))
def test_unknown_choices_are_refused(config, field):
    value = "other" if isinstance(field.default, str) else 3
    listing = ", ".join(map(str, field.metadata["choices"]))
    with pytest.raises(ValueError, match=f"{field.name}={value!r} is unknown; .* of {listing}"):
        make(config, **{field.name: value})


LOADS = {"load_importance_loss": True, "gate_noise": 1.0}
BIAS, GLOBAL, FORCED = {"load_bias": "sign"}, {"balance_scope": "global"}, {"benchmark": True}
PAIRS = {"num_expert_groups": 2, "top_groups": 1}
BEFORE = {"normalize_before_dropping": True, "unnormalized_weights": True}
AT_RANDOM = {"drop_policy": "random", "batch_prioritized": True}
DRAWN = {**BIAS, "second_expert_policy": "sampling"}


@pytest.mark.parametrize("config, options, words", [
    (MoEConfig, {"top_k": 5}, ["top_k=5 ", " 4"]),
    (MoEConfig, {"router": "hash"}, ["'hash'", "cosine, linear"]),
    (MoEConfig, {"load_importance_loss": True}, ["needs gate_noise"]),
    (MoEConfig, DRAWN, ["load_bias='sign'", "second_expert_policy='all'", "'sampling'"]),
    (MoEConfig, {**BIAS, "top_k": 4}, ["load_bias='sign'", "top_k=4"]),
    (MoEConfig, {**BIAS, **LOADS}, ["load_importance_loss", "load_bias='sign'"]),
    (MoEConfig, {**GLOBAL, **LOADS}, ["load_importance_loss", "balance_scope='global'"]),
    (MoEConfig, {"overflow_rerouting": 1.5}, ["overflow_rerouting=1.5 must be a whole numb"]),
    (MoEConfig, AT_RANDOM, ["batch_prioritized", "drop_policy='random'"]),
    (MoEConfig, BEFORE, ["normalize_before_dropping contradicts unnormalized_weights"]),
    (MoEConfig, {"num_expert_groups": 3}, ["num_expert_groups=3 must divide", " 4"]),
    (MoEConfig, {**PAIRS, "top_groups": 3}, ["top_groups=3 of num_expert_groups=2"]),
    (MoEConfig, {**PAIRS, "top_k": 3}, ["top_k=3", "the 2 experts of top_groups=1"]),
    (MoEConfig, {**PAIRS, "overflow_rerouting": 1}, ["overflow_rerouting=1", "the 2 experts"]),
    (MoEConfig, {"num_expert_groups": 4, "top_groups": 2}, ["=4 has one", "group_score='max'"]),
    (MoEConfig, {**PAIRS, "second_expert_policy": "random"}, ["=2 needs", "not 'random'"]),
    (MoEConfig, {**PAIRS, "load_bias": "quantile"}, ["=2 needs", "'quantile'"]),
    (MoEConfig, {**PAIRS, "null_experts": 2}, ["=2 needs null_experts=0"]),
    (MoEConfig, {**PAIRS, **LOADS}, ["load_importance_loss", "num_expert_groups=2"]),
    (MoEConfig, {"null_experts": 2, **LOADS}, ["load_importance_loss", "null_experts=2"]),
    (MoEConfig, {"force_load": "3,1"}, ["force_load=3,1 only", "benchmark=True"]),
    (MoEConfig, {**FORCED, "force_load": "3,x"}, ["force_load=3,x must be numbers"]),
    (MoEConfig, {**FORCED, "force_load": "0,0"}, ["force_load=0,0 must be numbers"]),
    (MoEConfig, {**FORCED, "force_load": "1,-1"}, ["force_load=1,-1 must be numbers"]),
    (MoEConfig, {**FORCED, "force_load": "1,1,1,1,1"}, ["5 shares for 4 experts"]),
    (MoEConfig, {**FORCED, "force_load": "3,1,1,0"}, ["an expert 0.6", "=2 the", " 0.5"]),
    (ExchangeConfig, {"algorithm": "quick"}, ["'quick' is unknown; choose one of 2dh, linear"]),
    (ExchangeConfig, {"ranks_per_node": -1}, ["ranks_per_node=-1 must be at least 0"]),
])  # fmt: skip
def test_impossible_values_are_refused(config, options, words):
    with pytest.raises(ValueError) as error:
        make(config, **options)
    assert all(word in str(error.value) for word in words)


def test_the_name_of_an_algorithm_is_short_for_an_exchange():
    assert ExchangeConfig.of("2dh") == ExchangeConfig(algorithm="2dh", ranks_per_node=0)
    config = ExchangeConfig("2dh", ranks_per_node=4)
    assert ExchangeConfig.of(config) is config


def test_experts_and_ranks_divide():
    for experts, ranks in ((1, 4), (2, 4), (4, 4), (12, 4), (7, 7), (5, 1)):
        assert exchange_size(experts, ranks) == min(experts, ranks)
    for experts, ranks in ((3, 4), (6, 4), (4, 3), (5, 2)):
        with pytest.raises(ValueError, match=f"{experts} experts.*{ranks} ranks"):
            exchange_size(experts, ranks)
