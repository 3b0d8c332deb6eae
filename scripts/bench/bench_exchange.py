"""What overlap and wire formats of a layer's exchanges are worth between nodes.

    sudo python scripts/bench/two_nodes.py --ranks 2 -- \\
        python scripts/bench/bench_exchange.py overlap wire

``overlap``: a layer whose exchanges travel in 1, 2, 4 or 8 chunks while its experts compute. Beside
the layer, at each degree, the same layer is timed with experts that return their input (its
exchanges alone, in as many chunks: several in flight fill a link better than one, which is not
overlap's merit), with copies in place of exchanges (its experts alone), and with both (what is
neither)::

    hidden share = (exchanges + experts - layer) / the smaller of exchanges and experts

where "what is neither" is taken off all three. The way of the first chunk and of the last is
nobody's to hide: what the schedule would hide with these parts is stated beside what was measured,
by the planner's formula. And what these cores can hide at all: a pass of the exchanges on a thread
of its own beside a pass of the experts, where neither waits for the other ("together"): what is
missing to 100 % there is what copies and the kernel's work on packets take from the products.
``wire``: bytes that the network interface counted, and time, of a layer
without experts whose rows travel in one format in all four directions.

All variants take turns; a time is that of the slowest rank, of a forward and backward pass.
"""

import argparse
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import runner
import torch
from bench_alltoall import about_ranks, interleaved, link_name
from measure import percentiles
from ranks import Ranks
from record import quiet_logs, say, table
from runner import Report, add_defaults, command_line, words
from torch import nn

from fairseq_tutel.config import WIRES, ExchangeConfig
from fairseq_tutel.distributed import StepAgreement, sync_step
from fairseq_tutel.moe import MoELayer

_DEFAULTS = {
    "algorithm": ("linear", "of the exchange"),
    "tokens": (2048, "of a rank"),
    "model-dim": (256, ""),
    "hidden-dim": (384, ""),
    "experts-per-rank": (1, ""),
    "ranks-per-node": (0, "0: as the machines have it"),
    "repetitions": (15, "of every variant"),
}
_SETTINGS = (*(name.replace("-", "_") for name in _DEFAULTS), "degrees", "wires")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("parts", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    add("--degrees", default=[1, 2, 4, 8], help="of overlap (default: 1,2,4,8)", **words(int))
    add("--wires", default=list(WIRES), help=f"formats (default: {','.join(WIRES)})", **words())
    add_defaults(parser, _DEFAULTS)
    folder = {"type": Path, "default": Path("runs/bench"), "metavar": "FOLDER"}
    add("--output", help="of exchange-PART-RANKS-LINK.json (default: runs/bench)", **folder)
    parser.set_defaults(device="cpu", backend="gloo")
    return parser.parse_args(argv)


class Pass:
    """A forward and backward pass of a layer of its own."""

    def __init__(self, options, ranks: Ranks, *, experts: bool, sends: bool, **exchange):
        torch.manual_seed(1)
        own = None if experts else [nn.Identity() for _ in range(options.experts_per_rank)]
        self.layer = MoELayer(
            options.model_dim,
            options.experts_per_rank * ranks.world_size,
            options.hidden_dim if experts else None,
            top_k=2,
            capacity_factor=1.0,
            experts=own,
            exchange=ExchangeConfig(options.algorithm, options.ranks_per_node, **exchange),
            skip_exchange=not sends,
            seed=1,
        )
        self.x = torch.randn(options.tokens, options.model_dim, requires_grad=True)

    def agree(self) -> StepAgreement:
        """What a call would agree on by itself. Collective."""
        layer = self.layer
        return sync_step(len(self.x), layer.step_settings(self.x.dtype), layer.groups)

    def __call__(self, step: StepAgreement | None = None) -> torch.Tensor:
        """The output; gradients are in the parameters."""
        self.layer.zero_grad(set_to_none=True)
        self.x.grad = None
        y = self.layer(self.x, step=step)
        y.backward(torch.ones_like(y))
        return y


class Together:
    """The exchanges of a pass beside the experts of another."""

    def __init__(self, options, ranks: Ranks, **how):
        self._exchanges = Pass(options, ranks, experts=False, **how)
        self._experts = Pass(options, ranks, experts=True, sends=False)

    def __call__(self) -> None:
        """Ends when both have ended."""
        # agreed on before: collectives of two threads have no order
        steps = self._exchanges.agree(), self._experts.agree()
        beside = threading.Thread(target=self._exchanges, args=steps[:1])
        beside.start()
        self._experts(steps[1])
        beside.join()


def measure_overlap(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """One row per degree; the layers of all degrees return the same numbers."""
    variants = {
        "experts": Pass(options, ranks, experts=True, sends=False),
        "rest": Pass(options, ranks, experts=False, sends=False),
    }
    for degree in options.degrees:
        how = {"sends": True, "overlap_degree": degree}
        variants[f"layer {degree}"] = Pass(options, ranks, experts=True, **how)
        variants[f"exchange {degree}"] = Pass(options, ranks, experts=False, **how)
        variants[f"together {degree}"] = Together(options, ranks, **how)
    outputs = [variants[f"layer {degree}"]() for degree in options.degrees]
    for degree, output in zip(options.degrees, outputs, strict=True):
        if not torch.allclose(output, outputs[0], rtol=1e-4, atol=1e-5):
            raise RuntimeError(f"degree {degree} returns other numbers than {options.degrees[0]}")
    seconds, median = _timed(variants, options, ranks)
    rows = [_overlap_row(median, degree, options.degrees[0]) for degree in options.degrees]
    quiet_logs()  # the planner's formula has imported fairseq, which turns everything on
    return {"results": rows, **seconds}


def _overlap_row(median: dict[str, float], degree: int, first: int) -> dict[str, float]:
    """Seconds, the speed-up over the first degree, and the hidden share."""
    rest = median["rest"]
    layer, exchange = median[f"layer {degree}"], median[f"exchange {degree}"] - rest
    experts = median["experts"] - rest
    smaller = min(exchange, experts)
    together = median[f"together {degree}"] - 2 * rest
    return {
        "degree": degree,
        "layer": layer,
        "exchange_alone": exchange,
        "experts_alone": experts,
        "speedup": median[f"layer {first}"] / layer,
        "hidden_share": (exchange + experts - (layer - rest)) / smaller,
        "hidden_by_schedule": (exchange - _exposed(exchange, experts, degree)) / smaller,
        "hidden_together": (exchange + experts - together) / smaller,
    }


def _exposed(exchange: float, experts: float, degree: int) -> float:
    """Seconds of exchanges that the schedule leaves: of their four directions, a quarter each, and
    of the experts' three products: forward, and for the rows' and the weights' gradients."""
    from fairseq_tutel.plan.speed import exposed  # imports fairseq, which is slow and talks

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


def measure_wire(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """One row per format: time, and bytes that the interface counted."""
    sent, variants = {}, {}
    for wire in options.wires:
        formats = {"wire": wire, "wire_back": wire, "wire_grad": wire}
        step = variants[wire] = Pass(options, ranks, experts=False, sends=True, **formats)
        step()  # connects
        ranks.barrier()
        before = link_bytes()
        for _ in range(options.repetitions):
            step()
        ranks.barrier()
        sent[wire] = (link_bytes() - before) / options.repetitions
    seconds, median = _timed(variants, options, ranks)
    first = options.wires[0]
    rows = [
        {
            "wire": wire,
            "seconds": median[wire],
            "link_bytes": sent[wire],
            "bytes_share": sent[wire] / sent[first],
            "speedup": median[first] / median[wire],
        }
        for wire in options.wires
    ]
    return {"results": rows, **seconds}


def _timed(variants, options, ranks: Ranks) -> tuple[dict[str, Any], dict[str, float]]:
    """For the result; medians in seconds."""
    seconds = interleaved(variants, ranks, options.repetitions)
    spreads = {name: percentiles(times) for name, times in seconds.items()}
    medians = {name: spread["p50"] for name, spread in spreads.items()}
    return {"seconds": spreads, "raw_seconds": seconds}, medians


PARTS = {
    "overlap": (
        measure_overlap,
        {
            "degree": "{degree}",
            "layer s": "{layer:.4f}",
            "exchange alone s": "{exchange_alone:.4f}",
            "experts alone s": "{experts_alone:.4f}",
            "times": "{speedup:.2f}",
            "hidden": "{hidden_share:.0%}",
            "by schedule": "{hidden_by_schedule:.0%}",
            "together": "{hidden_together:.0%}",
        },
    ),
    "wire": (
        measure_wire,
        {
            "wire": "{wire}",
            "step s": "{seconds:.4f}",
            "bytes on the link": "{link_bytes:,.0f}",
            "share": "{bytes_share:.3f}",
            "times": "{speedup:.2f}",
        },
    ),
}


def show(result: dict[str, Any]) -> None:
    """The table."""
    say(about_ranks(result))
    say(table(result["results"], PARTS[result["part"]][1]))


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write one part after the other."""
    ranks.expect_several()
    link = link_name("loopback")
    settings = {key: getattr(options, key) for key in _SETTINGS}
    for name in options.parts:
        measure, _ = PARTS[name]
        path = options.output / f"exchange-{name}-{ranks.world_size}-{link}.json"
        about = {"part": name, "backend": ranks.backend, "link": link, "settings": settings}
        report = Report("exchange", ranks, path, **about)
        report.finish(measure(options, ranks), show)


main = runner.program(parse_arguments, run)


if __name__ == "__main__":
    sys.exit(main())
