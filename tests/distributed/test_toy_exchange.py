"""An exchange from outside the package: one class in one file, chosen by its name."""

import pytest
import torch
import torch.distributed as dist
from helpers.distributed import on_ranks
from helpers.layers import M, compare_with_linear
from test_exchange import LINKS

from fairseq_tutel.config import EXCHANGES
from fairseq_tutel.distributed import build_groups, register_exchange
from fairseq_tutel.distributed.exchanges import ExchangeAlgorithm
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.tuning import ExchangeTuner

EXPERTS = 8


class BroadcastExchange(ExchangeAlgorithm):
    """A broadcast per rank; each takes what is meant for it."""

    @classmethod
    def partitions(cls, num_ranks, ranks_per_node):
        return {"own": [list(range(num_ranks))]}

    @classmethod
    def predict(cls, num_bytes, num_ranks, network):
        return num_ranks * num_bytes / network.node_bandwidth

    def move(self, rows, received, direction, splits):
        ranks, me = self.groups.ep_size, self.groups.ep_rank
        equal = [rows.shape[0] // ranks] * ranks
        to, by = (equal, equal) if splits is None else splits.sizes(direction.outward)
        table = [torch.empty(ranks, dtype=torch.int64) for _ in range(ranks)]
        dist.all_gather(table, torch.tensor(to), group=self.subgroups["own"])
        arrived = []
        for source, sizes in enumerate(row.tolist() for row in table):
            data = rows if source == me else rows.new_empty(sum(sizes), *rows.shape[1:])
            dist.broadcast(data, group=self.subgroups["own"], group_src=source)
            arrived.append(data.split(sizes)[me])
        assert [len(part) for part in arrived] == by
        torch.cat(arrived, out=received)


@on_ranks(2)
def test_a_layer_with_it_equals_the_linear_one_bit_for_bit_and_the_tuner_tries_it():
    layer = MoELayer(M, EXPERTS, 8, groups=build_groups(EXPERTS))
    for names in (["linear"], ["linear", "toy-broadcast"]):  # not "2dh": the ranks are on one node
        if len(names) == 2:
            register_exchange("toy-broadcast")(BroadcastExchange)
        tuner = ExchangeTuner([layer], ["algorithm"], steps=2, max_loss=1.0)
        assert tuner.choices == [{"algorithm": name} for name in names]
        used = set()
        for _ in range(30):
            x = torch.randn(9, M, requires_grad=True)
            step = tuner.agree(9, x.dtype)
            used.add(step.exchange.algorithm)
            layer(x, step=step).sum().backward()
        assert used == set(names)
    for layout in ("padded", "ragged"):
        compare_with_linear("toy-broadcast", EXPERTS, layout)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(EXCHANGES, "_classes", dict(EXCHANGES._classes))
    return register_exchange("toy-broadcast")(BroadcastExchange)


def test_it_is_a_choice_with_help_and_with_a_predicted_time(registered):
    assert "toy-broadcast" in EXCHANGES and EXCHANGES.get("toy-broadcast") is registered
    assert EXCHANGES.summary("toy-broadcast").startswith("A broadcast per rank")
    with pytest.raises(ValueError, match="choose one of 2dh, .*toy-broadcast"):
        EXCHANGES.get("toy")
    times = {name: EXCHANGES.get(name).predict(64e6, 512, LINKS) for name in EXCHANGES}
    assert times["toy-broadcast"] == pytest.approx(512 * 64e6 / LINKS.node_bandwidth)
