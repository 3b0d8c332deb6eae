"""Layers whose exchanges overlap with their experts, or are compressed, for bench_exchange.py.

A layer's time is that of its forward and backward pass. Beside the layer itself, at each degree,
the same layer is timed with experts that return their input (its exchanges alone, in as many
chunks: several in flight fill a link better than one, which is not overlap's merit), with copies in
place of exchanges (its experts alone), and with both (what is neither)::

    hidden share = (exchanges + experts - layer) / the smaller of exchanges and experts

where "what is neither" is taken off all three. The schedule itself hides less than everything: the
way of the first chunk and of the last is nobody's to hide. What it would hide with these parts is
stated beside what was measured, by the planner's formula; the difference is what both parts cost
each other, above all where they share cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.moe import MoELayer

DEGREES = (1, 2, 4, 8)


class Step:
    """One forward and backward pass of a layer."""

    def __init__(self, options, exchange: ExchangeConfig, *, experts: bool, sends: bool):
        torch.manual_seed(1)
        own = None if experts else [nn.Identity() for _ in range(options.experts_per_rank)]
        self.layer = MoELayer(
            options.model_dim,
            options.experts_per_rank * options.world_size,
            options.hidden_dim,
            top_k=2,
            capacity_factor=1.0,
            experts=own,
            exchange=exchange,
            skip_exchange=not sends,
            seed=1,
        )
        self.x = torch.randn(options.tokens, options.model_dim, requires_grad=True)

    def __call__(self) -> torch.Tensor:
        """The output; gradients are in the parameters."""
        self.layer.zero_grad(set_to_none=True)
        self.x.grad = None
        y = self.layer(self.x)
        y.backward(torch.ones_like(y))
        return y


def overlap_variants(options) -> dict[str, Callable[[], Any]]:
    """What takes turns."""
    plain = ExchangeConfig(options.algorithm, options.ranks_per_node)
    steps: dict[str, Callable[[], Any]] = {
        "experts": Step(options, plain, experts=True, sends=False),
        "rest": Step(options, plain, experts=False, sends=False),
    }
    for degree in options.degrees:
        config = ExchangeConfig(options.algorithm, options.ranks_per_node, overlap_degree=degree)
        steps[f"layer {degree}"] = Step(options, config, experts=True, sends=True)
        steps[f"exchange {degree}"] = Step(options, config, experts=False, sends=True)
    return steps


def overlap_rows(median: dict[str, float], degrees: Sequence[int]) -> list[dict[str, float]]:
    """By degree: seconds, the speed-up over the first degree, and the hidden share."""
    rest = median["rest"]
    experts = median["experts"] - rest
    rows = []
    for degree in degrees:
        layer, exchange = median[f"layer {degree}"], median[f"exchange {degree}"] - rest
        hidden = exchange + experts - (layer - rest)
        smaller = min(exchange, experts)
        rows.append(
            {
                "degree": degree,
                "layer": layer,
                "exchange_alone": exchange,
                "experts_alone": experts,
                "speedup": median[f"layer {degrees[0]}"] / layer,
                "hidden_share": hidden / smaller,
                "hidden_by_schedule": (exchange - _exposed(exchange, experts, degree)) / smaller,
            }
        )
    return rows


def _exposed(exchange: float, experts: float, degree: int) -> float:
    """Seconds of exchanges that the schedule leaves: of their four legs, a quarter each, and of the
    experts' three products, one forward, one for the rows' gradients, one for the weights'."""
    from fairseq_tutel.plan.exchange import exposed  # imports fairseq, which is slow and talks

    leg, product = exchange / 4 / degree, experts / 3 / degree
    forward = exposed(leg, product, leg, degree)
    return forward + exposed(leg, product, leg, degree, meanwhile=degree * product)


def link_bytes() -> int:
    """Bytes that this node has sent on the link (on one machine: through loopback) so far."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise RuntimeError(f"no interface {interface} in /proc/self/net/dev")


def wire_variants(options) -> dict[str, Step]:
    """Layers without experts whose four legs travel in one format each."""
    return {
        wire: Step(
            options,
            ExchangeConfig(
                options.algorithm,
                options.ranks_per_node,
                wire=wire,
                wire_back=wire,
                wire_grad=wire,
            ),
            experts=False,
            sends=True,
        )
        for wire in options.wires
    }


def wire_rows(
    median: dict[str, float], sent: dict[str, float], first: str
) -> list[dict[str, float | str]]:
    """By format: seconds and bytes on the link of a step, both also as a share of the first's."""
    return [
        {
            "wire": wire,
            "seconds": seconds,
            "link_bytes": sent[wire],
            "bytes_share": sent[wire] / sent[first],
            "speedup": median[first] / seconds,
        }
        for wire, seconds in median.items()
    ]
