"""Tokens to experts, or weights to tokens (r): refusals, simulations. Values: test_fuzz.py."""

import dataclasses

import pytest
import torch
from helpers.distributed import on_ranks
from helpers.layers import HIDDEN, M, make_layer, run, tokens_of

from fairseq_tutel.distributed import (
    build_groups,
    expert_parallelism,
    possible_r,
    process_world,
    sync_step,
)
from fairseq_tutel.moe import MoELayer


@on_ranks(4)
def test_refusals_on_ranks():
    """Others: test_refusals.py."""
    rank, world_size = process_world()
    groups = build_groups(2, placement="sliced")
    layer = make_layer(groups)
    x, _, rows = tokens_of((6,) * world_size)
    with pytest.raises(ValueError, match=r"disagree on r: 0 on ranks \[1\]; 1 on ranks \[0, 2"):
        layer(x[rows], r=0 if rank == 1 else 1)
    step = sync_step(6, layer.step_settings(x.dtype, r=2), groups)
    with pytest.raises(ValueError, match="this call's options make r 0, but .* for this step has"):
        layer(x[rows], step=step, r=0)
    layer(x[rows], step=step, r=2)
    with pytest.raises(ValueError, match="8 hidden units .* cut into 3") as caught:
        MoELayer(M, 2, HIDDEN, groups=dataclasses.replace(groups, num_replicas=3))
    assert "\n" not in str(caught.value)


def test_simulated_ranks_copy_what_they_would_send_and_gather():
    for experts in (2, 8):
        groups = build_groups(experts, simulate_world_size=8, placement="sliced")
        layer = make_layer(groups)
        x = torch.randn(12, M, dtype=torch.float64)
        for r in possible_r(groups):
            parallelism = expert_parallelism(groups, r)
            assert parallelism.gather_size == (8 if r == 0 else groups.num_slices // r)
            found = run(layer, x, x, r=r)
            assert found["y"].shape == x.shape
            assert all(torch.isfinite(value).all() for value in found.values())
            prepared = layer.experts.prepare(x.dtype, parallelism)
            held = experts if r == 0 else 1
            assert prepared.params[0].shape == (held, HIDDEN // (r or 1), M)
            assert prepared.params[2].shape == (held, M, HIDDEN // (r or 1))
