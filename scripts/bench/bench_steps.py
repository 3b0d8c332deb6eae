"""Steps of one MoE layer on several CPU ranks: beside Meta's layer, by exchange, by load, by r.

    sudo python scripts/bench/two_nodes.py --ranks 8 -- \\
        python scripts/bench/bench_steps.py --mode meta --meta DIR
    sudo python scripts/bench/two_nodes.py --ranks 8 -- \\
        python scripts/bench/bench_steps.py --mode share
    python -m fairseq_tutel.launch --nproc-per-node 2 -- \\
        python scripts/bench/bench_steps.py --mode load --utilisation 72,89
    sudo python scripts/bench/two_nodes.py --ranks 4 --message-bytes 50000 -- \\
        python scripts/bench/bench_steps.py --mode tuner

A step is a forward and a backward pass. A time is that of the slowest rank; cases take turns.

meta: this layer with every exchange and overlap degree, beside Meta's own layer (--meta, its folder
fairseq/modules/moe) with its masks and its all-to-all. Shape: figure 14 of arXiv 2206.03382, each
size divided by 8. Good: faster than Meta's by as much as the planner predicts.
share: the share of communication in a step, with the linear exchange of fp32 rows, and with 2DH,
fp16 and compact rows. Communication is what a step takes beyond the linear one with copies in place
of exchanges: links, casts and packing. Good: a smaller share.
load: a step without a capacity at forced utilisations: all ranks but one get fewer rows than the
busiest. Good: as many times faster as the busiest rank has fewer rows.
r: adaptive parallelism, with the shape of the paper's figure 12, each size divided by 16, at its
capacity factors, beside the time that the planner predicts. Good: the best r is the predicted one.
tuner: all choices of exchange, overlap and r at each capacity factor; then the tuner, while the
factors change as in the paper's section 2.3, in turns with the best choice in hindsight. Good: the
tuner takes at most 1.10 times as long as that, trials included.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator

import claims_layer as plan
from claims_predictions import times_of_r
from harness import Case, Goal, Point, sweep
from layers import SIZES, Inputs, LayerShape, make_layer, with_loss, with_sizes
from peers import FOLDERS, meta_layer
from program import Ranks, numbers, program
from record import ROOT, median_ratio

from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import build_groups, possible_r
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.plan.hardware import load_hardware
from fairseq_tutel.training import collect_aux
from fairseq_tutel.tuning import ExchangeTuner
from fairseq_tutel.tuning.candidates import TUNABLE, build_choices

_OVER_BEST = "over the best, so far"
_SMALLEST = {
    "linear, fp32": ExchangeConfig(),
    "2dh, fp16, compact": ExchangeConfig("2dh", wire="fp16", wire_compact=True),
}


class Steps:
    """Layers of one shape, and the tokens and gradients of this rank."""

    def __init__(self, shape: LayerShape, ranks: Ranks, options):
        self.shape, self.ranks, self.options = shape, ranks, options
        placement = "sliced" if options.mode in ("r", "tuner") else "replicated"
        self.groups = build_groups(shape.experts, placement=placement)
        self.inputs = Inputs(shape, ranks.device, options.seed, ranks.rank)

    def layer(self, **how) -> MoELayer:
        """Build this layer."""
        how = {"groups": self.groups, **how}
        return make_layer(self.shape, self.ranks.device, self.options.seed, **how).train()

    def case(self, name: str, layer: MoELayer, **how) -> Case:
        """Return a step of a layer, with arguments for its call."""
        return self.inputs.case(name, with_loss(layer, **how), layer.parameters())


def meta_points(steps: Steps) -> Iterator[Point]:
    """Yield this layer by exchange and overlap degree, and Meta's."""
    if steps.options.meta is None:
        raise ValueError("--mode meta needs --meta DIR, the folder of Meta's layer")
    layer, cases = steps.layer(), []
    for algorithm, degree in itertools.product(("linear", "2dh"), (1, 4)):
        exchange = ExchangeConfig(algorithm, overlap_degree=degree)
        layer.prepare_exchanges([exchange])
        cases.append(steps.case(f"{algorithm} x{degree}", layer, exchange=exchange))
    cases.append(steps.case("copies", steps.layer(skip_exchange=True)))
    peer = meta_layer(steps.options.meta, steps.shape, None)
    cases.append(steps.inputs.case("meta", peer.run, peer.module.parameters()))

    def derive(found):
        faster = {name: median_ratio(found, "meta", name) for name in found["ms"]}
        columns = {name: {"times faster than Meta's": value} for name, value in faster.items()}
        # what the exchanges take over the rest of a step, by which links can be compared
        exchange = median_ratio(found, "linear x1", "copies") - 1
        columns["copies"] = {"linear exchange over the rest": exchange}
        best = max(value for name, value in faster.items() if name not in ("copies", "meta"))
        columns["meta"] = {"over this layer's fastest": best}
        return columns

    yield Point(str(steps.shape), cases, derive=derive)


def share_points(steps: Steps) -> Iterator[Point]:
    """Yield both exchanges, each beside the same step with copies."""
    cases = []
    for name, exchange in _SMALLEST.items():
        cases.append(steps.case(name, steps.layer(exchange=exchange)))
        alone = steps.layer(exchange=exchange, skip_exchange=True)
        cases.append(steps.case(f"{name}, copies", alone))

    def percent(found, rest, name):
        return 100 * (1 - median_ratio(found, rest, name))

    def derive(found):
        return {
            name: {
                "communication %": percent(found, "linear, fp32, copies", name),
                "links alone %": percent(found, f"{name}, copies", name),
            }
            for name in _SMALLEST
        }

    yield Point(str(steps.shape), cases, derive=derive)


def shares(percent: float, experts: int, ranks: int) -> str:
    """Return a load whose mean rank has ``percent`` of the rows of the busiest, rank 0."""
    others = (ranks * percent / 100 - 1) / (ranks - 1)
    if not 0 <= others <= 1:
        raise ValueError(f"--utilisation {percent}: {ranks} ranks have {100 // ranks} to 100 %")
    local = experts // ranks
    return ",".join(["1"] * local + [f"{others:.6f}"] * (experts - local))


def load_points(steps: Steps) -> Iterator[Point]:
    """Yield the same step at each utilisation, the lowest first."""
    cases, measured = [], {}
    for percent in sorted(steps.options.utilisation or [72, 89]):
        load = shares(percent, steps.shape.experts, steps.ranks.world_size)
        layer = steps.layer(benchmark=True, force_load=load)
        with collect_aux(layer) as aux:
            layer(steps.inputs.x[0])
        measured[f"{percent} %"] = aux.utilisation()["moe_util_rank"]
        cases.append(steps.case(f"{percent} %", layer))
    lowest = cases[0].name

    def derive(found):
        return {
            name: {
                "utilisation %": measured[name],
                "times faster": median_ratio(found, lowest, name),
            }
            for name in found["ms"]
        }

    yield Point(str(steps.shape), cases, derive=derive)


def factor_points(steps, layer, factors, choices, derive, **how) -> Iterator[Point]:
    """Yield all choices at each capacity factor, which ``derive`` gets first."""
    layer.prepare_exchanges(choices.values())
    for factor in factors:
        cases = [
            steps.case(name, layer, exchange=choice, capacity_factor=float(factor))
            for name, choice in choices.items()
        ]
        yield Point(f"f={factor}", cases, derive=functools.partial(derive, factor), **how)


def r_points(steps: Steps) -> Iterator[Point]:
    """Yield every r at each capacity factor, beside the predicted time."""
    hardware, ranks = load_hardware(ROOT / "configs", "two-nodes"), steps.ranks.world_size
    sizes = dataclasses.astuple(steps.shape)[:4]

    def derive(factor, found):
        shape = plan.LayerShape(*sizes, ranks, steps.shape.top_k, factor)
        planned = times_of_r(shape, hardware)
        return {
            f"r={r}": {
                "times faster than r=1": median_ratio(found, "r=1", f"r={r}"),
                "predicted": planned[1] / planned[r],
            }
            for r in planned
        }

    layer = steps.layer(exchange=ExchangeConfig(r=1))
    choices = {f"r={r}": ExchangeConfig(r=r) for r in possible_r(steps.groups)}
    yield from factor_points(steps, layer, steps.options.factors or [1, 2, 4, 8], choices, derive)


def tunable_choices(layer: MoELayer) -> dict[str, ExchangeConfig]:
    """Return everything that the tuner can choose, by name."""
    values = build_choices([layer], TUNABLE)
    choices = [dataclasses.replace(layer.exchange_config, **each) for each in values]
    return {name_of(choice): choice for choice in choices}


def name_of(choice: ExchangeConfig) -> str:
    """Name a choice, as in "2dh x4 r=2"."""
    return f"{choice.algorithm} x{choice.overlap_degree} r={choice.r}"


def tuner_points(steps: Steps) -> Iterator[Point]:
    """Yield all fixed choices at each factor; then, phase by phase, the tuner and the best one."""
    phases, best = steps.options.factors or [1, 2, 4, 2, 1], {}
    fixed, tuned = steps.layer(), steps.layer()
    choices = tunable_choices(fixed)

    def find_best(factor, found):
        best[factor] = min(choices, key=lambda name: found["ms"][name]["both"]["p50"])
        return {best[factor]: {"fastest": "yes"}}

    yield from factor_points(steps, fixed, sorted(set(phases)), choices, find_best, phase="")
    tuner = ExchangeTuner([tuned], TUNABLE, max_loss=0.1)
    seconds = {"tuner": 0.0, "best": 0.0}
    for number, factor in enumerate(phases, start=1):
        last = {"best": best[factor]}

        def tuned_step(x, factor=float(factor), last=last):
            step = tuner.agree(len(x), x.dtype, capacity_factor=factor)
            last["tuner"] = name_of(step.exchange)
            return with_loss(tuned, capacity_factor=factor, step=step)(x)

        def derive(found, last=last):
            for name in seconds:
                seconds[name] += 1e-3 * sum(found["raw_ms"][name]["both"])
            columns = {name: {"choice": choice} for name, choice in last.items()}
            columns["tuner"][_OVER_BEST] = seconds["tuner"] / seconds["best"]
            return columns

        one = {"exchange": choices[best[factor]], "capacity_factor": float(factor)}
        cases = [
            steps.inputs.case("tuner", tuned_step, tuned.parameters()),
            steps.case("best", fixed, **one),
        ]
        goals = [Goal("tuner", _OVER_BEST, 1.10, at_most=True)] if number == len(phases) else []
        how = {"derive": derive, "goals": goals, "repetitions": steps.options.steps}
        yield Point(f"phase {number}, f={factor}", cases, **how)


# mode -> points; sizes of each rank, but experts of all ranks
MODES = {
    "meta": (meta_points, lambda ranks: LayerShape(2048, 256, 256, 2 * ranks)),
    "share": (share_points, lambda ranks: LayerShape(1024, 256, 1024, 16 * ranks)),
    "load": (load_points, lambda ranks: LayerShape(2048, 256, 1024, 4 * ranks, 2, 0.0)),
    "r": (r_points, lambda ranks: LayerShape(64, 128, 2048, max(2, ranks // 4))),
    "tuner": (tuner_points, lambda ranks: LayerShape(64, 256, 384, 2)),
}
OPTIONS = {
    "mode": ("meta", "what to measure", MODES),
    "utilisation": (numbers, "load: percents of mean over busiest rank (default: 72,89)"),
    "factors": (numbers, "capacity factors (default: r 1,2,4,8, tuner 1,2,4,2,1 in order)"),
    "steps": (120, "tuner: steps of a factor"),
    "meta": FOLDERS["meta"],
    **{name: given for name, given in SIZES.items() if name not in ("dtype", "simulated-ranks")},
}


@program(__doc__, OPTIONS)
def main(options, ranks):
    ranks.expect(several=True)
    points_of, shape_of = MODES[options.mode]
    shape = shape_of(ranks.world_size)
    if options.tiny:
        shape = dataclasses.replace(shape, tokens=128, model_dim=16, hidden_dim=32)
        options.steps = min(options.steps, 5)
    shape = with_sizes(shape, options)
    points = points_of(Steps(shape, ranks, options))
    how = {"repetitions": 10, "warmup": 2}
    if options.mode == "tuner":
        how = {"repetitions": 5, "warmup": 0}  # trials count
    how["about"] = {"mode": options.mode, "settings": dataclasses.asdict(shape)}
    file = f"steps-{options.mode}-{ranks.world_size}"
    sweep("steps", options, ranks, points, file=file, **how)


if __name__ == "__main__":
    sys.exit(main())
