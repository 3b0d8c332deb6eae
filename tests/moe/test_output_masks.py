"""Expert and final output masking: what training leaves out, and what evaluation makes of it."""

import pytest
import torch
from helpers.assertions import rms_ratio

from fairseq_tutel.moe import MoELayer

M, E, T = 6, 4, 4000
P = 0.3
MASKS = ("expert_output_masking", "final_output_masking")


def make(**options):
    torch.manual_seed(0)
    options.setdefault("capacity_factor", 0.0)
    return MoELayer(M, E, 8, seed=1, **options).double()


def tokens(count=T):
    return torch.randn(count, M, generator=torch.Generator().manual_seed(5)).double()


@pytest.mark.parametrize("factor", [2.0, 0.0, -2.0], ids=["padded", "ragged", "dynamic"])
@pytest.mark.parametrize("name", MASKS)
def test_training_leaves_out_whole_outputs_of_tokens(name, factor):
    """With one expert per token; nothing is scaled. A shared expert is of the final output."""
    x, options = tokens(), {"top_k": 1, "capacity_factor": factor, "shared_expert_dim": 3}
    layer, plain = make(**options, **{name: P}), make(**options)(x)
    y, shared = layer(x), layer.shared_expert(x)
    left = torch.zeros_like(shared) if name == "final_output_masking" else shared
    lost_T = (y - left).abs().amax(1) < 1e-12
    torch.testing.assert_close(y[~lost_T], plain[~lost_T])
    assert lost_T.double().mean() == pytest.approx(P, abs=5 * (P * (1 - P) / T) ** 0.5)


def test_outputs_of_experts_are_left_out_one_by_one():
    """Each of two is there or not, in all four combinations, on their own."""
    layer = make(top_k=2, second_expert_policy="all", expert_output_masking=P)
    one = tokens(1)
    weights = layer.eval()(one) / (1 - P)  # both
    layer.train()
    found = torch.unique(layer(one.expand(T, M)).round(decimals=9), dim=0, return_counts=True)
    rows, shares = found[0], found[1] / T
    assert len(rows) == 4 and rms_ratio((rows.sum(0) / 2)[None], weights) < 1e-6
    want = sorted([P * P, P * (1 - P), P * (1 - P), (1 - P) ** 2])
    assert shares.sort().values.tolist() == pytest.approx(want, abs=0.04)


def test_evaluation_has_the_expected_value():
    x = tokens(50)
    plain = make().eval()(x)
    masked = make(expert_output_masking=0.25, final_output_masking=0.5).eval()(x)
    assert rms_ratio(masked, 0.75 * 0.5 * plain) < 1e-12
