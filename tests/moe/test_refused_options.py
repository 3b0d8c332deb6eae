"""Options of routing that contradict each other, or that no value is: each error names them."""

import math

import pytest

from fairseq_tutel.moe import MoEConfig

E = 6
LOADS = {"load_importance_loss": True, "gate_noise": 1.0}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"load_bias": "mean"}, ["load_bias='mean'", "none, sign, quantile"]),
        ({"score_function": "tanh"}, ["score_function='tanh'", "softmax, sigmoid"]),
        (
            {"load_bias": "sign", "second_expert_policy": "sampling"},
            ["load_bias='sign'", "second_expert_policy='all'", "'sampling'"],
        ),
        ({"load_bias": "sign", "top_k": E}, ["load_bias='sign'", f"top_k={E}"]),
        ({"load_bias": "sign", **LOADS}, ["load_importance_loss", "load_bias='sign'"]),
        ({"load_bias_rate": 0.0}, ["load_bias_rate=0.0 must be above 0"]),
        ({"route_scale": math.inf}, ["route_scale=inf must be a finite number"]),
        ({"balance_scope": "world"}, ["balance_scope='world'", "rank, global, sequence"]),
        ({"balance_choices": "second"}, ["balance_choices='second'", "first, all"]),
        ({"balance_over": "some"}, ["balance_over='some'", "unpadded, all"]),
        ({"balance_scope": "global", **LOADS}, ["load_importance_loss", "balance_scope='global'"]),
        ({"drop_policy": "last"}, ["drop_policy='last'", "position, probability, random"]),
        ({"overflow_rerouting": -1}, ["overflow_rerouting=-1 must be at least 0"]),
        ({"overflow_rerouting": 1.5}, ["overflow_rerouting=1.5 must be a whole number"]),
        (
            {"drop_policy": "random", "batch_prioritized": True},
            ["batch_prioritized", "drop_policy='random'"],
        ),
        ({"null_experts": 2, **LOADS}, ["load_importance_loss", "null_experts=2"]),
        ({"null_experts": -1}, ["null_experts=-1"]),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, words):
    with pytest.raises(ValueError) as error:
        MoEConfig(E, **options)
    assert all(word in str(error.value) for word in words)
