"""Experts of whose hidden units a rank holds a slice."""

import pytest
import torch
from helpers.slices import join_slices

from fairseq_tutel.distributed import slice_dim, take_slice
from fairseq_tutel.moe import Experts


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_slices_of_the_initial_weights_are_together_those_of_whole_experts(slices):
    whole = Experts(range(3, 5), 6, 8, seed=1)
    parts = [
        Experts(range(3, 5), 6, 8, seed=1, hidden_slice=(s, slices), num_holders=2 * slices)
        for s in range(slices)
    ]
    state, states = whole.state_dict(), [part.state_dict() for part in parts]
    for name, want in state.items():
        got = join_slices([each[name] for each in states], name)
        assert torch.equal(got, want), name
        for s, each in enumerate(states):
            assert torch.equal(take_slice(want, name, s, slices), each[name]), name
    copies = {name: param.copies for name, param in parts[0].named_parameters()}
    assert copies.pop("fc2_bias") == 2 * slices and set(copies.values()) == {2}
    with pytest.raises(ValueError, match="the 8 hidden units of an expert cannot be cut into 3"):
        Experts(range(2), 6, 8, hidden_slice=(0, 3))
    with pytest.raises(ValueError, match="gate.wg.weight is no tensor of an expert"):
        slice_dim("gate.wg.weight")
