"""What bench_flows.py makes of its times."""

import bench_flows
import pytest


def test_both_orders_have_the_same_steps_and_their_ratio_is_by_round():
    both = bench_flows.orders([0, 1, 2], 2)
    assert both == {"never": [0, 0, 1, 1, 2, 2], "every step": [0, 1, 2, 0, 1, 2]}
    # a machine that is three times slower in some rounds, and 1 % more for every switch
    took = {0: 3.0, 1: 2.0, 2: 1.0}
    factor = {"never": 1.0, "every step": 1.01}
    speeds = [1.0, 3.0, 1.0, 3.0, 3.0]
    seconds = {
        name: [[speed * factor[name] * took[r] for r in order] for speed in speeds]
        for name, order in both.items()
    }
    cost = bench_flows.cost(seconds)
    assert cost["ratio"] == pytest.approx(1.01) and cost["standard_error"] < 1e-9
    times = bench_flows.by_r(seconds, both)
    assert times["never"] == pytest.approx({"0": 9.0, "1": 6.0, "2": 3.0})
    assert times["every step"]["2"] == pytest.approx(3.03)
