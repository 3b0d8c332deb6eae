"""What the roofline says of the layer's operators and of the layer, before a GPU is there.

    python scripts/bench/predict.py --preset meta-1.1t,fig14 --hardware a100-80g,h100,h200

For each operator: the fewest bytes that its task moves (every input and output once), those that
its kernels move, and the time of the latter at the share of the memory's bandwidth that the
profile (configs/hardware) assumes. The layer's time is the sum of its operators' and of the
experts' products at the rate that the profile assumes, forward and backward, without any exchange.
What a GPU then shows is a ratio to this: run_gpu.sh prints both.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import runner
from presets import DTYPES, PRESETS, LayerShape
from ranks import Ranks
from record import ROOT, say, table
from runner import Report, command_line, expect_known, words

from fairseq_tutel.plan.hardware import Hardware, load_hardware

# of backends/triton/_autotune.py, on a GPU
_GATING_PROGRAMS, _SLOT_BLOCK, _ACT_TILE_ROWS = 512, 128, 64
_INT = 4  # bytes of an index, a gate value, a count
_SIZES = ("tokens", "experts", "top_k", "model_dim", "hidden_dim")


class Moved(NamedTuple):
    """Bytes of an operator: of its inputs and outputs, and what its kernels move besides."""

    fewest: int
    more: int = 0


def bytes_moved(shape: LayerShape, full: float = 1.0) -> dict[str, Moved]:
    """By operator, as bench_kernels.py names them; a rank's rows before the exchange, and after it.

    Args:
        full: share of the rows that hold a token.
    """
    T, E, K, M, F = (getattr(shape, name) for name in _SIZES)
    size = DTYPES[shape.dtype].itemsize
    R, e = E * shape.capacity, shape.local_experts(1)
    pairs, rows, logits = _INT * T * K, _INT * R, _INT * T * E
    tokens, all_rows = size * T * M, size * R * M
    used = round(full * R) * M * size
    hidden, bias = size * shape.rows(1) * F, size * e * F
    programs = min(_GATING_PROGRAMS, -(-T // max(1, 2048 // E)))
    blocks = _INT * E * -(-T // _SLOT_BLOCK) * K
    tiles = 4 * F * -(-shape.rows(1) // _ACT_TILE_ROWS)
    return {
        "topk_gating": Moved(logits + 2 * pairs + _INT * (T + E + 1), 2 * 4 * programs * (E + 1)),
        "topk_gating bwd": Moved(2 * logits + 2 * pairs + _INT * (2 * T + E)),
        "assign_slots": Moved(2 * pairs + _INT * K * E, 3 * pairs + 4 * blocks),
        "assign_rows": Moved(5 * pairs + _INT * K * E + rows + _INT * E),
        "dispatch": Moved(tokens + rows + all_rows, pairs),
        "dispatch bwd": Moved(used + pairs + tokens),
        "combine": Moved(used + 2 * pairs + tokens),
        "combine bwd": Moved(tokens + used + rows + 2 * pairs + all_rows, pairs),
        "bias_act gelu": Moved(2 * hidden + bias),
        "bias_act gelu bwd": Moved(3 * hidden + 2 * bias, 2 * tiles),
    }


def predict(shape: LayerShape, hardware: Hardware) -> dict[str, Any]:
    """Milliseconds of each operator, of the experts' products and of the layer."""
    moved = bytes_moved(shape)
    ms = {name: 1e3 * sum(each) / hardware.stream for name, each in moved.items()}
    element = DTYPES[shape.dtype].itemsize
    per_pass = 2 * 2 * shape.rows(1) * shape.model_dim * shape.hidden_dim
    products = 1e3 * 3 * per_pass / hardware.product_rate(element)
    # fc2's bias and the gate: a pass over rows, and products with the tokens, each way
    rows_pass = 1e3 * 5 * element * shape.rows(1) * shape.model_dim / hardware.stream
    gate = 1e3 * 3 * 2 * shape.tokens * shape.experts * shape.model_dim
    # in halves twice as many numbers, on matrix units (backends/torch/gate_logits.py)
    gate *= (2 if element == 2 else 1) / hardware.product_rate(element)
    layer = sum(ms.values()) + products + rows_pass + gate
    return {"operators_ms": ms, "products_ms": products, "gate_ms": gate, "layer_ms": layer}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    three = ["meta-1.1t", "blog-8gpu", "fig14"]
    add("--preset", default=three, help=f"default: {','.join(three)}", **words())
    known = sorted(path.stem for path in (ROOT / "configs" / "hardware").glob("*.yaml"))
    given = ["a100-80g", "h100", "h200"]
    add("--hardware", default=given, help=f"of {', '.join(known)} (default: GPUs)", **words())
    add("--output", type=Path, help="JSON file (default: runs/bench/predicted.json)")
    return parser.parse_args(argv)


def show(result: dict[str, Any]) -> None:
    """A table for each preset, a column for each GPU."""
    for preset, found in result["results"].items():
        say(f"predicted, {preset}: {PRESETS[preset].about}")
        kinds = found["predicted"]
        rows = [
            {"name": name, "moved": sum(each) / 2**20, "over": sum(each) / each[0], **{
                kind: f"{of['operators_ms'][name]:.3f}" for kind, of in kinds.items()}}
            for name, each in found["bytes"].items()
        ]  # fmt: skip
        for name in ("products_ms", "gate_ms", "layer_ms"):
            times = {kind: f"{of[name]:.3f}" for kind, of in kinds.items()}
            rows.append({"name": name.removesuffix("_ms"), "moved": "", "over": "", **times})
        shown = {
            "operator": "{name}",
            "MiB": lambda row: row["moved"] and f"{row['moved']:.1f}",
            "of fewest": lambda row: row["over"] and f"{row['over']:.2f}",
            **{f"{kind} ms": f"{{{kind}}}" for kind in kinds},
        }
        say(table(rows, shown))


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Compute, print and write."""
    expect_known("--preset", options.preset, list(PRESETS))
    kinds = {name: load_hardware(ROOT / "configs", name) for name in options.hardware}
    results = {}
    for name in options.preset:
        shape = PRESETS[name].shape
        results[name] = {
            "shape": dataclasses.asdict(shape),
            "bytes": bytes_moved(shape),
            "predicted": {kind: predict(shape, each) for kind, each in kinds.items()},
        }
    report = Report("predict", ranks, options.output or Path("runs/bench/predicted.json"))
    report.finish({"results": results}, show)


main = runner.program(parse_arguments, run)


if __name__ == "__main__":
    sys.exit(main())
