"""Tokens to experts, or weights to tokens (r): refusals and dropout. Values: test_fuzz.py."""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist
from helpers.assertions import rms_ratio
from helpers.distributed import on_ranks
from helpers.layers import HIDDEN, M, make_layer, run, tokens_of
from torch import nn

from fairseq_tutel import ops
from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import (
    build_groups,
    expert_parallelism,
    possible_r,
    process_world,
    sync_step,
)
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.moe.source_dropout import SourceDropout


def _refuse_what_does_not_fit():
    rank, world_size = process_world()
    groups = build_groups(2, placement="sliced")
    layer = make_layer(groups)
    x, _, rows = tokens_of((6,) * world_size)
    with pytest.raises(ValueError, match=r"disagree on r: 0 on ranks \[1\]; 1 on ranks \[0, 2"):
        layer(x[rows], r=0 if rank == 1 else 1)
    with pytest.raises(
        ValueError, match=r"r=3 .* does not fit 2 experts on .* choose one of 0, 1, 2"
    ):
        layer(x[rows], r=3)
    with pytest.raises(ValueError, match=r"r=2 .* whole: choose one of 0, 1$"):
        make_layer(build_groups(world_size), exchange=ExchangeConfig(r=2))
    step = sync_step(6, layer.step_settings(x.dtype, r=2), groups)
    with pytest.raises(ValueError, match="this call's options make r 0, but .* for this step has"):
        layer(x[rows], step=step, r=0)
    layer(x[rows], step=step, r=2)
    own = [nn.Linear(M, M)]
    with pytest.raises(ValueError, match="experts=Linear: modules of one's own cannot be cut into"):
        make_layer(groups, experts=own)
    with pytest.raises(ValueError, match="r=0, .* weights of modules of one's own .Linear. cannot"):
        make_layer(build_groups(world_size), experts=own)(x[rows].double(), r=0)
    with pytest.raises(ValueError, match="8 hidden units .* cut into 3") as caught:
        MoELayer(M, 2, HIDDEN, groups=dataclasses.replace(groups, num_replicas=3))
    assert "\n" not in str(caught.value)


def _dropout():
    """Masks of dropout after fc2 are those of the tokens, at any r."""
    _, world_size = process_world()
    x, target, rows = tokens_of()
    for experts in (2, world_size):
        groups, outputs = build_groups(experts, placement="sliced"), []
        for layout in ("padded", "ragged"):
            layer = make_layer(groups, layout, dropout=0.5)
            for r, degree in itertools.product(possible_r(groups), (1, 4)):
                torch.manual_seed(dist.get_rank())
                config = ExchangeConfig(overlap_degree=degree, r=r)
                outputs.append(run(layer, x[rows], target[rows], exchange=config))
                torch.manual_seed(dist.get_rank())  # the same masks again, recomputed
                recomputed = run(layer, x[rows], target[rows], False, exchange=config)
                torch.testing.assert_close(recomputed, outputs[-1], rtol=1e-12, atol=1e-12)
        whole = run(layer.eval(), x[rows], target[rows])
        for found in outputs:
            for name in ("y", "x"):
                torch.testing.assert_close(found[name], outputs[0][name], rtol=0, atol=1e-12)
        assert not len(whole["y"]) or rms_ratio(outputs[0]["y"], whole["y"]) > 0.1


@on_ranks(4, timeout=250)
def test_refusals_and_what_every_r_has_in_common():
    _refuse_what_does_not_fit()
    _dropout()


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


def test_dropout_is_that_of_the_pair_of_each_row():
    """Rows of two tokens with two choices, of two parts each; some are empty."""
    pair_of_row = [7, 0, -1, 2, 5, 4]  # t * 4 + part * 2 + choice
    rows, keep = torch.randn(6, M), torch.rand(4, M) < 0.5
    drop = SourceDropout(keep, copies=2, dropout=0.5)
    dest_row = torch.empty(2, 4, dtype=torch.int32)  # only its shape counts
    got = drop(rows, dest_row, torch.tensor(pair_of_row, dtype=torch.int32))
    for row, pair in enumerate(pair_of_row):
        if pair >= 0:
            choice = 2 * (pair // 4) + pair % 2
            assert torch.equal(got[row], torch.where(keep[choice], 2 * rows[row], 0.0))


def test_parts_of_an_expert_draw_unlike_masks():
    seeds = []
    for part in range(3):
        torch.manual_seed(0)
        seed = ops.FFNOptions("relu", (0.5, 0.0), part).draw_seed(torch.device("cpu"))
        seeds += [int(seed), int(seed) + 1]  # of both masks
    assert len(set(seeds)) == 6
