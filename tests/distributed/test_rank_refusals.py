"""What placements, exchanges and the balance of ranks refuse in one process, by words."""

import pytest
import torch

from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import build_groups, register_exchange, slice_dim
from fairseq_tutel.distributed.exchanges import LocalCopy
from fairseq_tutel.moe import MoELayer

BALANCED = {"balance_ranks": True, "balance_min_rows": 1}
SLICED = {"placement": "sliced", "simulate_world_size": 4}
X = torch.zeros(2, 8)


def layer(count=8, call=None, exchange=None, placement="replicated", **options):
    groups = build_groups(count, simulate_world_size=4, placement=placement)
    given = {"groups": groups, "exchange": exchange or ExchangeConfig(**BALANCED)}
    made = MoELayer(8, count, **given, **{"capacity_factor": 0, **options})
    return made(X, **call) if call else made


REFUSED = [
    (lambda: layer(call={"capacity_factor": 2.0}), "capacity_factor=2.0"),
    (lambda: layer(2, placement="sliced"), "placement='sliced'"),
    (lambda: ExchangeConfig(**BALANCED, algorithm="2dh"), "algorithm='linear', not '2dh'"),
    (lambda: MoELayer(8, 2, exchange="quick"), "'quick' is unknown; choose one of 2dh, linear;"),
    (lambda: register_exchange("linear")(LocalCopy), "'linear' is registered already"),
    (lambda: slice_dim("gate.wg.weight"), "gate.wg.weight is no tensor of an expert"),
    (lambda: build_groups(0), "num_experts=0 must be at least 1"),
    (lambda: build_groups(3, simulate_world_size=8), "3 experts.*8 ranks"),
    (lambda: build_groups(4, placement="cut"), "'cut' is unknown; choose one of replicated"),
    (lambda: build_groups(2, expert_parallel_size=1, **SLICED),
     "expert_parallel_size=1 .* placement='sliced'"),
    (lambda: layer(8, {"r": 2}, ExchangeConfig()), "r=2 .* whole: choose one of 0, 1$"),
    (lambda: layer(2, {"r": 3}, ExchangeConfig(), "sliced"),
     "r=3 .* does not fit 2 experts on .* choose one of 0, 1, 2"),
    (lambda: layer(2, None, ExchangeConfig(), "sliced", experts=[torch.nn.Linear(8, 8)]),
     "experts=Linear: modules of one's own cannot be cut into"),
    (lambda: layer(4, {"r": 0}, ExchangeConfig(), experts=[torch.nn.Linear(8, 8)]),
     "r=0, .* weights of modules of one's own .Linear. cannot"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()
