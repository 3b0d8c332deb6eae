"""What the exchange algorithms of the layer are worth between nodes.

    sudo python scripts/bench/two_nodes.py --message-bytes 50000 -- \\
        python scripts/bench/bench_exchange.py sizes
    python -m fairseq_tutel.launch --nproc-per-node 8 -- \\
        python scripts/bench/bench_exchange.py sizes --ranks-per-node 4

``sizes``: linear, 2dh and auto by the bytes that one rank hands over. ``overlap``: a layer whose
exchanges travel in 1, 2, 4 or 8 chunks while its experts compute (see exchange_layers.py).
``wire``: bytes that the network interface counted, and time, of a layer without experts whose four
legs travel in one format.

All variants of a part take turns in one process, a repetition begins with a barrier, its time is
that of the slowest rank, and medians are compared. On two nodes made by two_nodes.py the figures
are those of its link; without it everything goes through loopback, where no gain is to be expected.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import exchange_layers
import figures
import torch
from bench_alltoall import check, message, parse_size
from measure import percentiles
from ranks import Ranks, connected
from record import OtherLoad, describe_run, device_name, quiet_logs, say, table, write_json

from fairseq_tutel.config import EXCHANGES, WIRES, ExchangeConfig
from fairseq_tutel.distributed import build_exchange, build_groups

_LAYER = ("algorithm", "tokens", "model_dim", "hidden_dim", "experts_per_rank")
_SIZES = "4K,16K,64K,256K,1M,4M"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="\n".join(f"{name}: {part.about}" for name, part in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("parts", nargs="+", choices=list(PARTS), metavar="PART", help="what to measure")
    add("--ranks-per-node", type=int, default=0, help="default: as the machines have it")
    add("--repetitions", type=int, default=15, help="of every variant (default: 15)")
    add(
        "--sizes",
        type=lambda text: [parse_size(word) for word in text.split(",")],
        default=_SIZES,
        metavar="LIST",
        help=f"bytes per rank (default: {_SIZES})",
    )
    add(
        "--algorithms",
        type=lambda text: text.split(","),
        default=["linear", "2dh", "auto"],
        metavar="LIST",
        help="default: linear,2dh,auto",
    )
    add(
        "--degrees",
        type=lambda text: [int(word) for word in text.split(",")],
        default=list(exchange_layers.DEGREES),
        metavar="LIST",
        help="of overlap (default: 1,2,4,8)",
    )
    add(
        "--wires",
        type=lambda text: text.split(","),
        default=list(WIRES),
        metavar="LIST",
        help=f"formats (default: {','.join(WIRES)})",
    )
    layer = parser.add_argument_group("layer of overlap and wire")
    layer.add_argument("--algorithm", default="linear", help="default: linear")
    layer.add_argument("--tokens", type=int, default=2048, help="of a rank (default: 2048)")
    layer.add_argument("--model-dim", type=int, default=256, help="default: 256")
    layer.add_argument("--hidden-dim", type=int, default=384, help="default: 384")
    layer.add_argument("--experts-per-rank", type=int, default=1, help="default: 1")
    add(
        "--output",
        type=Path,
        default=Path("runs/bench"),
        metavar="FOLDER",
        help="for exchange-PART-RANKS-LINK.json and .png (default: runs/bench)",
    )
    return parser.parse_args(argv)


def interleaved(
    variants: Mapping[str, Callable[[], Any]], ranks: Ranks, repetitions: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of every repetition of each variant, on the slowest rank; variants take turns.

    In random order, the same on all ranks: what an exchange leaves in the link's queue hits
    whichever comes next.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(-warmup, repetitions):
        for name in random.Random(number).sample(names, len(names)):
            ranks.barrier()
            begin = time.perf_counter()
            variants[name]()
            if number >= 0:
                seconds[name].append(time.perf_counter() - begin)
    return {name: ranks.slowest(times) for name, times in seconds.items()}


def measure_sizes(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """One row per size and algorithm, and what auto chose."""
    groups = build_groups(ranks.world_size)
    built = {
        name: build_exchange(ExchangeConfig(name, options.ranks_per_node), groups)
        for name in options.algorithms
    }
    rows = []
    for given in options.sizes:
        step = ranks.world_size * 4  # equal parts of fp32 numbers
        size = max(step, given // step * step)
        variants, used = {}, {}
        for name, exchange in built.items():
            chosen = exchange.for_message(size)
            data = message(size, ranks, chosen.send_order)
            check(chosen.forth(data), ranks, name)
            used[name] = chosen.name
            variants[name] = lambda chosen=chosen, data=data: chosen.forth(data)
        for name, seconds in interleaved(variants, ranks, options.repetitions).items():
            rows.append(
                {
                    "algorithm": name,
                    "exchange": used[name],
                    "bytes": size,
                    "seconds": percentiles(seconds),
                    "raw_seconds": seconds,
                }
            )
    return {"results": rows, "ratios": size_ratios(rows)}


def size_ratios(rows: Sequence[dict]) -> dict[str, dict[str, float]]:
    """By size: linear over 2dh, and what auto chose over the better of the two.

    Of medians of all repetitions of an algorithm, also of those in which auto had chosen it: it
    then is the same object, so that its own repetitions say how much the others are to be trusted.
    """
    found: dict[str, dict[str, float]] = {}
    for size in sorted({row["bytes"] for row in rows}):
        times: dict[str, list[float]] = {}
        for row in rows:
            if row["bytes"] == size:
                times.setdefault(row["exchange"], []).extend(row["raw_seconds"])
        median = {name: statistics.median(values) for name, values in times.items()}
        ratios = found.setdefault(str(size), {})
        if not {"linear", "2dh"} <= set(median):
            continue
        ratios["linear/2dh"] = median["linear"] / median["2dh"]
        for row in rows:
            if (row["algorithm"], row["bytes"]) == ("auto", size):
                better = min(median["linear"], median["2dh"])
                ratios["auto/better"] = median[row["exchange"]] / better
    return found


def print_sizes(result: dict[str, Any]) -> None:
    """The table."""
    lines = []
    for row in result["results"]:
        spread = row["seconds"]
        ratios = result["ratios"][str(row["bytes"])]
        last = {"2dh": "linear/2dh", "auto": "auto/better"}.get(row["algorithm"])
        lines.append(
            [
                row["algorithm"],
                row["exchange"],
                f"{row['bytes']:,}",
                *(f"{1e3 * spread[key]:.2f}" for key in ("p20", "p50", "p80")),
                f"{last} {ratios[last]:.2f}" if last in ratios else "",
            ]
        )
    say(table(["algorithm", "uses", "bytes", "p20 ms", "p50 ms", "p80 ms", "ratio"], lines))


def measure_overlap(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """One row per degree; the layers of all degrees return the same numbers."""
    options.world_size = ranks.world_size
    variants = exchange_layers.overlap_variants(options)
    outputs = [variants[f"layer {degree}"]() for degree in options.degrees]
    for degree, output in zip(options.degrees, outputs, strict=True):
        if not torch.allclose(output, outputs[0], rtol=1e-4, atol=1e-5):
            raise RuntimeError(f"degree {degree} returns other numbers than {options.degrees[0]}")
    seconds = interleaved(variants, ranks, options.repetitions)
    median = {name: percentiles(times)["p50"] for name, times in seconds.items()}
    rows = exchange_layers.overlap_rows(median, options.degrees)
    quiet_logs()  # the planner's formula has imported fairseq, which turns everything on
    return {
        "results": rows,
        "seconds": {name: percentiles(times) for name, times in seconds.items()},
        "raw_seconds": seconds,
    }


def print_overlap(result: dict[str, Any]) -> None:
    """The table."""
    lines = [
        [
            str(row["degree"]),
            *(f"{1e3 * row[key]:.1f}" for key in ("layer", "exchange_alone", "experts_alone")),
            f"{row['speedup']:.2f}",
            f"{row['hidden_share']:.0%}",
            f"{row['hidden_by_schedule']:.0%}",
        ]
        for row in result["results"]
    ]
    alone = ["exchange alone ms", "experts alone ms"]
    say(table(["degree", "layer ms", *alone, "times", "hidden", "by schedule"], lines))


def measure_wire(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """One row per format: time, and bytes that the interface counted."""
    options.world_size = ranks.world_size
    variants = exchange_layers.wire_variants(options)
    sent = {}
    for wire, step in variants.items():
        step()  # connects
        ranks.barrier()
        before = exchange_layers.link_bytes()
        for _ in range(options.repetitions):
            step()
        ranks.barrier()
        sent[wire] = (exchange_layers.link_bytes() - before) / options.repetitions
    seconds = interleaved(variants, ranks, options.repetitions)
    median = {wire: percentiles(times)["p50"] for wire, times in seconds.items()}
    return {
        "results": exchange_layers.wire_rows(median, sent, options.wires[0]),
        "seconds": {wire: percentiles(times) for wire, times in seconds.items()},
        "raw_seconds": seconds,
    }


def print_wire(result: dict[str, Any]) -> None:
    """The table."""
    lines = [
        [
            row["wire"],
            f"{1e3 * row['seconds']:.1f}",
            f"{row['link_bytes']:,.0f}",
            f"{row['bytes_share']:.3f}",
            f"{row['speedup']:.2f}",
        ]
        for row in result["results"]
    ]
    say(table(["wire", "step ms", "bytes on the link", "share", "times"], lines))


class Part:
    """One measurement: what it is, how it is made and printed."""

    def __init__(self, about: str, measure: Callable, show: Callable, *settings: str):
        self.about, self.measure, self.show = about, measure, show
        self.settings = ("ranks_per_node", "repetitions", *settings)


PARTS = {
    "sizes": Part(
        "linear, 2dh and auto by message size", measure_sizes, print_sizes, "sizes", "algorithms"
    ),
    "overlap": Part(
        "a layer by overlap degree", measure_overlap, print_overlap, "degrees", *_LAYER
    ),
    "wire": Part("bytes on the link by wire format", measure_wire, print_wire, "wires", *_LAYER),
}


def link_name() -> str:
    """The bed that two_nodes.py made, in a word for a file name."""
    bed = os.environ.get("TWO_NODES", "")
    if not bed:
        return "loopback"
    return "messages" if "--message-bytes" in bed else "bandwidth"


def run(options: argparse.Namespace, ranks: Ranks, name: str) -> dict[str, Any]:
    """Measure, print and write.

    Raises:
        ValueError: a single rank, or unknown algorithms.
    """
    if ranks.world_size < 2:
        raise ValueError("an exchange needs at least 2 ranks: see two_nodes.py --help")
    unknown = [name for name in options.algorithms if name not in EXCHANGES]
    if unknown:
        raise ValueError(f"--algorithms {','.join(unknown)}: choose from {', '.join(EXCHANGES)}")
    others, part, before = OtherLoad(), PARTS[name], time.process_time()
    measured = part.measure(options, ranks)
    siblings = ranks.cpu_seconds_of_others(time.process_time() - before)
    result = {
        **describe_run("exchange", ranks.device, ranks.world_size),
        "part": name,
        "backend": ranks.backend,
        "link": link_name(),
        "settings": {key: getattr(options, key) for key in part.settings},
        "cpu_share_of_others": others.share(siblings),
        **measured,
    }
    if bed := os.environ.get("TWO_NODES"):
        result["command"] = f"{bed} -- {result['command']}"
    if ranks.first:
        say(f"{name}: {ranks.world_size} ranks, {result['link']}, {device_name(result)}")
        part.show(result)
        path = options.output / f"exchange-{name}-{ranks.world_size}-{result['link']}.json"
        write_json(result, path)
        say(f"written: {path}")
        picture = path.with_suffix(".png")
        if figures.draw(result, picture):
            say(f"drawn: {picture}")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 for a wrong command line."""
    options = parse_arguments(argv)
    if isinstance(options.sizes, str):
        options.sizes = [parse_size(word) for word in options.sizes.split(",")]
    quiet_logs()
    try:
        with connected(torch.device("cpu"), "gloo") as ranks:
            for name in options.parts:
                run(options, ranks, name)
    except ValueError as error:
        sys.stderr.write(f"bench_exchange.py: error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
