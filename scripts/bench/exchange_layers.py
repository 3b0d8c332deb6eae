"""Layers whose exchanges are compressed, for bench_exchange.py."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.moe import MoELayer


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
