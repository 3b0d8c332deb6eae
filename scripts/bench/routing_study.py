"""Which balancing keeps experts busy, and what it costs: a tiny language model, methods x capacity.

    python scripts/bench/routing_study.py --output scripts/bench/results/routing-cpu.json

Two decoder blocks, the second with an MoE layer (E = 16, K = 2), 2048 tokens of Python's library
per update, 300 updates, on one process; two runs at a time. For every method and seed: the
utilisation of the experts over the last 100 updates, beside that of even but independent choices
(fairseq_tutel/models/README.md has the formulas), and the cross-entropy of held-out text, evaluated
without dropping. ``util_rank`` is that of 4 ranks with 4 experts each. One process has one batch,
so that a balance over all ranks is not among the methods: it is the same as that of the rank. Last,
the time of a dropless layer on 2 ranks is measured against util_rank (routing_step_time.py). The
output file is written after every run, and a call that was interrupted goes on from it.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import functools
import json
import multiprocessing
import random
import re
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import figures
import routing_step_time
import torch
from record import describe_run, quiet_logs, say
from torch import nn
from torch.nn import functional as F

from fairseq_tutel import hosts
from fairseq_tutel.moe import MoEConfig, MoELayer, independent_utilisation

DIM, HEADS, LENGTH, SENTENCES, VOCABULARY = 64, 4, 128, 16, 1024
EXPERTS, TOP_K, HIDDEN, RANKS = 16, 2, 64, 4
TOKENS = LENGTH * SENTENCES
LATE = 100  # last updates, over which utilisation is averaged
LR, WARMUP = 3e-3, 30
BOTH, PADDED = (1.0, 0.0), (1.0,)  # capacity factors; without a capacity nothing overflows
# name -> (weight of the balance loss, options of the layer, capacity factors)
METHODS: dict[str, tuple[float, dict[str, Any], tuple[float, ...]]] = {
    "nothing": (0.0, {}, BOTH),
    "balance loss (Meta's)": (0.01, {}, BOTH),
    "balance loss, all choices": (0.01, {"balance_choices": "all"}, PADDED),
    "sign bias": (0.0, {"load_bias": "sign", "load_bias_rate": 0.01}, BOTH),
    "quantile bias": (0.0, {"load_bias": "quantile"}, BOTH),
    "quantile bias x entropy": (
        0.0,
        {"load_bias": "quantile", "load_bias_entropy": True},
        PADDED,
    ),
    "balance loss + re-routing": (0.01, {"overflow_rerouting": 4}, PADDED),
    "quantile bias + re-routing": (0.0, {"load_bias": "quantile", "overflow_rerouting": 4}, PADDED),
}
COLUMNS = ("slot", "load", "rank", "drop", "drop_at_1", "dead", "nats", "ms")


@functools.cache
def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens to train on and held-out ones: words of sources in a shuffled order of files."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(0).shuffle(files)
    words: list[str] = []
    for file in files:
        text = file.read_text(encoding="utf-8", errors="ignore")
        words += re.findall(r"\w+|\n +|\n|[^\w\s]| +", text) + ["<end>"]
    common = collections.Counter(words).most_common(VOCABULARY - 1)
    number = {word: i for i, (word, _) in enumerate(common, start=1)}
    tokens = torch.tensor([number.get(word, 0) for word in words])
    held_out = len(tokens) // 20
    return tokens[:-held_out], tokens[-held_out:]


class Block(nn.Module):
    """Attention and a feed-forward network, each on the normalised residual."""

    def __init__(self, ffn: nn.Module):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.ffn = ffn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, M] -> [B, S, M]."""
        batch, length, _ = x.shape
        q, k, v = (
            self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, DIM))
        return x + self.ffn(self.norms[1](x))


class Model(nn.Module):
    """A language model whose output weights are its embedding."""

    def __init__(self, layer: MoELayer):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.02)
        dense = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        self.blocks = nn.Sequential(Block(dense), Block(layer))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats of the tokens after the first; [B, S + 1] int64."""
        x = self.blocks(self.embed(tokens_BS[:, :-1]) + self.place.weight)
        logits = self.norm(x) @ self.embed.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), tokens_BS[:, 1:].flatten())


def run(method: str, factor: float, seed: int, updates: int) -> dict[str, Any]:
    """Train one model; its utilisation, drops, loss and time per update."""
    torch.set_num_threads(1)
    quiet_logs()
    torch.manual_seed(seed)
    train, held_out = corpus()
    weight, options, _ = METHODS[method]
    layer = MoELayer(
        DIM, EXPERTS, HIDDEN, top_k=TOP_K, capacity_factor=factor, seed=seed, **options
    )
    model = Model(layer)
    optimizer = torch.optim.AdamW(model.parameters(), LR, betas=(0.9, 0.98), weight_decay=0.01)
    draw = torch.Generator().manual_seed(100 + seed)
    rows, times = [], []
    for update in range(updates):
        starts = torch.randint(len(train) - LENGTH - 1, (SENTENCES,), generator=draw).tolist()
        batch = torch.stack([train[i : i + LENGTH + 1] for i in starts])
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, (update + 1) / WARMUP) * (1 - 0.9 * update / updates)
        with hosts.collect_aux(model) as aux:
            loss = model(batch)
        (loss + weight * aux.loss).backward()
        hosts.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if layer.config.load_bias != "none":
            hosts.update_load_bias(model, [aux])
        times.append(1e3 * (time.perf_counter() - begin))
        if update >= updates - LATE:
            rows.append(_use(aux.layers[0][1]))
    late = {name: statistics.mean(row[name] for row in rows) for name in rows[0]}
    settings = {"method": method, "capacity_factor": factor, "seed": seed}
    return {**settings, **late, "nats": _evaluate(model, held_out), "ms": statistics.median(times)}


def _use(aux) -> dict[str, float]:
    load, kept = aux.load_E.double(), aux.num_kept_per_expert_E.double()
    received = kept.view(RANKS, -1).sum(1)
    over = (load - MoEConfig(EXPERTS, top_k=TOP_K).capacity(TOKENS, True)).clamp(min=0)
    return {
        "slot": 100 * (kept.sum() / aux.num_slots).item() if aux.num_slots else 0.0,
        "load": 100 * (load.mean() / load.max()).item(),
        "rank": 100 * (received.mean() / received.max()).item(),
        "drop": 100 * (1 - kept.sum() / load.sum()).item(),
        "drop_at_1": 100 * (over.sum() / load.sum()).item(),
        "dead": (load == 0).sum().item(),
    }


@torch.no_grad()
def _evaluate(model: Model, tokens: torch.Tensor) -> float:
    model.eval()
    whole = tokens[: (len(tokens) - 1) // LENGTH * LENGTH + 1]
    blocks = whole[:-1].view(-1, LENGTH)
    blocks = torch.cat([blocks, whole[LENGTH::LENGTH][:, None]], 1)[: 24 * SENTENCES]
    return statistics.mean(model(part).item() for part in blocks.split(SENTENCES))


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean over the seeds of every column, and the spread (half the range) of the loss."""
    cases = dict.fromkeys((run["method"], run["capacity_factor"]) for run in runs)
    table = []
    for method, factor in cases:
        mine = [r for r in runs if (r["method"], r["capacity_factor"]) == (method, factor)]
        means = {name: round(statistics.mean(r[name] for r in mine), 4) for name in COLUMNS}
        nats = [r["nats"] for r in mine]
        spread = round((max(nats) - min(nats)) / 2, 4)
        case = {"method": method, "capacity_factor": factor, "runs": len(mine)}
        table.append({**case, **means, "nats_spread": spread})
    return table


def even_choices() -> dict[str, float]:
    """The same columns for even but independent choices at capacity factor 1."""
    capacity = MoEConfig(EXPERTS, top_k=TOP_K).capacity(TOKENS, True)
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "capacity": capacity}
    used = independent_utilisation(TOKENS, **sizes)
    pairs = TOKENS * TOP_K // RANKS  # util_rank: four ranks share the choices of one batch
    ranks = independent_utilisation(pairs * RANKS, num_experts=RANKS, top_k=1)
    found = {name: getattr(used, name).item() for name in ("slot", "load", "drop", "dead")}
    return {**found, "rank": ranks.load.item()}


def print_table(table: list[dict[str, Any]], even: dict[str, float]) -> None:
    """For reading and for the results page."""
    heads = (
        "method | f | runs | util_slot | util_load | util_rank | moe_drop | at f = 1 | dead | "
        "nats | ms"
    )
    say(f"| {heads} |")
    say("|" + "---|" * 11)
    for row in table:
        slot = f"{row['slot']:.1f}" if row["slot"] else ""
        spread = f" ± {row['nats_spread']:.3f}" if row["runs"] > 1 else ""
        percent = " | ".join(f"{row[name]:.1f}" for name in ("load", "rank", "drop", "drop_at_1"))
        say(
            f"| {row['method']} | {row['capacity_factor']:g} | {row['runs']} | {slot} | "
            f"{percent} | {row['dead']:.1f} | {row['nats']:.3f}{spread} | "
            f"{row['ms']:.0f} |"
        )
    say(
        f"| even but independent choices | | | {even['slot']:.1f} | {even['load']:.1f} | "
        f"{even['rank']:.1f} | {even['drop']:.1f} | {even['drop']:.1f} | {even['dead']:.1f} | | |"
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Utilisation at capacity factor 1 and without, one bar per method."""
    if not figures.has_matplotlib():
        return
    pyplot = figures.load_pyplot()
    panels = (
        (1.0, "slot", "rows in use (util_slot), capacity factor 1"),
        (0.0, "rank", "mean / largest of 4 ranks (util_rank), dropless"),
    )
    figure, grid = pyplot.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for axes, (factor, name, title) in zip(grid, panels, strict=True):
        rows = [row for row in result["table"] if row["capacity_factor"] == factor]
        bars = axes.barh(
            [row["method"] for row in rows], [row[name] for row in rows], color="#1d4ed8"
        )
        axes.bar_label(bars, fmt="%.0f", padding=3)
        even = result["even_choices"][name]
        axes.axvline(even, color="#c2410c", linestyle="--", label="even but independent choices")
        axes.invert_yaxis()
        axes.set(title=title, xlabel="%", xlim=(0, 108))
        axes.legend(loc="upper right", fontsize=8)
    figure.suptitle(figures.caption(result), fontsize=8, x=0.01, ha="left")
    figures.save(pyplot, figure, path)


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each case")
    text = f"of a run; the last {LATE} are looked at"
    parser.add_argument("--updates", type=int, default=300, help=text)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--output", type=Path, help="JSON file; the figure goes beside it")
    parser.add_argument(
        "--step-time",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also measure a dropless layer on 2 ranks at several util_rank",
    )
    parser.add_argument(
        "--draw-only", action="store_true", help="table and figure of the runs in --output"
    )
    args = parser.parse_args(argv)
    if args.draw_only:
        result = json.loads(args.output.read_text(encoding="utf-8"))
        result["table"] = summarise(result["runs"])
        return _show(result, args.output)
    runs, step_time = _known(args)
    known = {(one["method"], one["capacity_factor"], one["seed"]) for one in runs}
    cases = [
        (method, factor, seed, args.updates)
        for seed in range(args.seeds)
        for factor in BOTH
        for method in args.methods
        if factor in METHODS[method][2] and (method, factor, seed) not in known
    ]
    if args.step_time and not step_time:
        step_time = routing_step_time.measure()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.processes, mp_context=spawn) as pool:
        waiting = [pool.submit(run, *case) for case in cases]
        try:
            for done in concurrent.futures.as_completed(waiting):
                runs.append(done.result())
                result = _result(args, runs, step_time, complete=False)
                if args.output:
                    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        except BaseException:
            pool.shutdown(cancel_futures=True)  # or Ctrl-C would wait for all that is left
            raise
    result = _result(args, runs, step_time, complete=True)
    return _show(result, args.output)


def _known(args) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """Of an earlier call with the same updates that left something out: its output file."""
    if not args.output or not args.output.exists():
        return [], []
    before = json.loads(args.output.read_text(encoding="utf-8"))
    to_do = not before["complete"] or args.step_time and not before["step_time"]
    if not to_do or before["settings"]["updates"] != args.updates:
        return [], []
    return before["runs"], before["step_time"]


def _result(args, runs, step_time, complete: bool) -> dict[str, Any]:
    result = describe_run("routing", torch.device("cpu"))
    result["complete"] = complete
    result["settings"] = {
        **{"experts": EXPERTS, "top_k": TOP_K, "tokens": TOKENS, "dim": DIM, "hidden": HIDDEN},
        **{"updates": args.updates, "seeds": args.seeds, "late_updates": LATE, "ranks": RANKS},
    }
    order = {method: number for number, method in enumerate(METHODS)}
    runs = sorted(runs, key=lambda r: (-r["capacity_factor"], order[r["method"]], r["seed"]))
    result |= {"table": summarise(runs), "even_choices": even_choices(), "runs": runs}
    result["step_time"] = step_time
    if step_time:
        result["share_that_scales"] = routing_step_time.share_that_scales(step_time)
    return result


def _show(result: dict[str, Any], output: Path | None) -> int:
    print_table(result["table"], result["even_choices"])
    for row in result["step_time"]:
        say(f"2 ranks, dropless: util_rank {row['util_rank']:.0f}%: {row['ms']:.0f} ms")
    if result["step_time"]:
        say(f"share of the time that scales with the rows: {result['share_that_scales']:.2f}")
    if output:
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        draw(result, output.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
