"""An exchange from outside the package: one class in one file, chosen by its name."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.distributed import run_ranks

from fairseq_tutel.config import EXCHANGES
from fairseq_tutel.distributed import (
    build_groups,
    process_world,
    register_exchange,
)
from fairseq_tutel.distributed.exchanges import Exchange
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.plan import load_config, load_hardware, make_plan, read_settings

M, EXPERTS = 6, 8
CONFIGS = Path(__file__).parents[2] / "configs"


class BroadcastExchange(Exchange):
    """A broadcast per rank; each takes what is meant for it."""

    @classmethod
    def partitions(cls, num_ranks, ranks_per_node):
        return {"own": [list(range(num_ranks))]}

    @classmethod
    def predict(cls, num_bytes, num_ranks, links):
        return num_ranks * num_bytes / links.node_bandwidth

    def move(self, rows, received, leg, parts):
        ranks, me = self.groups.ep_size, self.groups.ep_rank
        equal = [rows.shape[0] // ranks] * ranks
        to, by = (equal, equal) if parts is None else parts.splits(leg.outward)
        table = [torch.empty(ranks, dtype=torch.int64) for _ in range(ranks)]
        dist.all_gather(table, torch.tensor(to), group=self.subgroups["own"])
        arrived = []
        for source, sizes in enumerate(row.tolist() for row in table):
            data = rows if source == me else rows.new_empty(sum(sizes), *rows.shape[1:])
            dist.broadcast(data, group=self.subgroups["own"], group_src=source)
            arrived.append(data.split(sizes)[me])
        assert [len(part) for part in arrived] == by
        torch.cat(arrived, out=received)


def _train(name, factor):
    rank, _ = process_world()
    torch.manual_seed(7)
    layer = MoELayer(
        M, EXPERTS, 8, groups=build_groups(EXPERTS), exchange=name, seed=3, capacity_factor=factor
    )
    torch.manual_seed(rank)
    x = torch.randn(9 + rank, M, requires_grad=True)
    y, aux = layer(x, return_aux=True)
    (y.square().sum() + aux.loss).backward()
    return [y.detach(), x.grad, *(param.grad for param in layer.parameters())]


def _compare():
    register_exchange("toy-broadcast")(BroadcastExchange)
    for factor in (1.0, 0.0):
        ours, theirs = (_train(name, factor) for name in ("toy-broadcast", "linear"))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert ours[1].abs().sum() > 0


def test_a_layer_with_it_equals_the_linear_one_bit_for_bit():
    run_ranks(_compare, 2)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(EXCHANGES, "_classes", dict(EXCHANGES._classes))
    return register_exchange("toy-broadcast")(BroadcastExchange)


def test_it_is_a_choice_with_help_and_with_a_predicted_time(registered):
    assert "toy-broadcast" in EXCHANGES and EXCHANGES.get("toy-broadcast") is registered
    assert EXCHANGES.summary("toy-broadcast").startswith("A broadcast per rank")
    with pytest.raises(ValueError, match="choose one of 2dh, .*toy-broadcast"):
        EXCHANGES.get("toy")
    config = load_config(CONFIGS, "meta_1.1t", ["+model.moe_a2a=toy-broadcast"])
    hardware = load_hardware(CONFIGS, "a100-80g")
    plan = make_plan(read_settings(config, "meta_1.1t", gpus=512), hardware)
    want = 512 * plan.work.exchange_bytes / hardware.node_bandwidth * plan.work.exchanges
    assert plan.time.all_to_all == pytest.approx(want)
