"""Experts of whose hidden units a rank holds a slice."""

import pytest
import torch
from helpers.slices import join_slices

from fairseq_tutel.distributed import slice_dim, take_slice
from fairseq_tutel.moe.experts import Experts, SwiGLUExperts


@pytest.mark.parametrize(
    ("network", "options"), [(Experts, None), (SwiGLUExperts, {"bias": True})], ids=["ffn", "gated"]
)
@pytest.mark.parametrize("slices", [1, 2, 4])
def test_slices_of_the_initial_weights_are_together_those_of_whole_experts(
    slices, network, options
):
    def make(seed=1, **slicing):
        return network(range(3, 5), 6, 8, seed=seed, options=options, **slicing)

    def part(s, seed=1):
        return make(seed, hidden_slice=(s, slices), num_holders=2 * slices)

    whole, parts = make(), [part(s) for s in range(slices)]
    state, states = whole.state_dict(), [part.state_dict() for part in parts]
    for name, want in state.items():
        got = join_slices([each[name] for each in states], name)
        assert torch.equal(got, want), name
        for s, each in enumerate(states):
            assert torch.equal(take_slice(want, name, s, slices), each[name]), name
    other = part(slices - 1, seed=2)
    other.load_state_dict(state)  # of whole experts
    assert torch.equal(other.fc1_weight, parts[-1].fc1_weight)
    copies = {name: param.copies for name, param in parts[0].named_parameters()}
    assert copies.pop("fc2_bias") == 2 * slices and set(copies.values()) == {2}


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="the 8 hidden units of an expert cannot be cut into 3"):
        Experts(range(2), 6, 8, hidden_slice=(0, 3))
    with pytest.raises(ValueError, match="gate.wg.weight is no tensor of an expert"):
        slice_dim("gate.wg.weight")
