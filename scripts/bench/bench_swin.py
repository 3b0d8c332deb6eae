"""SwinV2-MoE with this package's layer against the same model with the dense S x E x C formulation.

    python scripts/bench/bench_swin.py --preset small --modes inference --images 8,16,32
    python scripts/bench/bench_swin.py --device cuda --preset small-32

For each number of images per rank: the whole model (scripts/examples/swin_moe) with random weights
on random images, forward (inference) or forward and backward (training). Three cases take turns:
the sparse layers as they are; the same weights in the dense formulation, which fairseq's layer
computes; the dense model, with one feed-forward network where the others have experts. Printed is
the median over the turns of the dense formulation's time over this layer's, with a 95 % interval
(below six turns the range), beside the ratio of their multiply-accumulates (swin_work.py). It grows
with the images: no ratio means anything without their number. Both formulations route in the order
of tokens, without noise and dropout and with GShard's loss; the dense one knows nothing else.
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import runner
import torch
from dense_reference import DenseMoE, memory_need
from measure import (
    MEMORY_METHOD,
    Case,
    fits,
    free_memory,
    median_interval,
    peak_memory,
    percentiles,
    time_cases,
)
from presets import DTYPES
from ranks import Ranks
from record import device_name, say, table
from runner import Report, add_clock, check_clock, command_line, expect_known, words
from swin_work import PASSES, example, expected_ratio, forward_macs, mask_macs, sparse_layers
from torch import nn

from fairseq_tutel.moe.memory import free_memory as available_memory

_INPUTS = 2  # sets of images that take turns
_AUX_WEIGHT = 0.01
# RMS error ratio of the two formulations in fp32: a token between two experts may go to the other
_AGREEMENT = 1e-3
OURS, MASKS, DENSE_MODEL = "ours", "dense formulation", "dense model"


@dataclass(frozen=True)
class SwinCase:
    """A model by its name in the example, and what it is measured with; see presets.Preset."""

    about: str
    model: str
    experts: int
    images: tuple[int, ...]
    dtype: str = "float32"


PRESETS = {
    "small": SwinCase("S, 8 experts, fp32: 2 CPU cores", "small", 8, (8, 16, 32)),
    "small-32": SwinCase(
        "S, 32 experts on one rank, bf16 autocast: a GPU",
        "small",
        32,
        (16, 32, 64, 128),
        "bfloat16",
    ),
    "base-32": SwinCase(
        "B, 32 experts on one rank, bf16 autocast: a GPU", "base", 32, (16, 32, 64, 128), "bfloat16"
    ),
}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, PRESETS)
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="default: small-32 on a GPU, small on a CPU")
    add("--images", help="per rank, in place of the preset's", **words(int))
    add("--modes", default=list(PASSES), help=f"of {', '.join(PASSES)} (default: all)", **words())
    add("--repetitions", type=int, default=0, help="default: 6 on a CPU, 20 on a GPU")
    add_clock(parser)
    add("--output", type=Path, help="JSON file (default: runs/bench/swin-PRESET-DEVICE.json)")
    return parser.parse_args(argv)


class Recording(nn.Module):
    """A layer whose aux loss is left in ``losses`` in training."""

    def __init__(self, layer: nn.Module, losses: list[torch.Tensor]):
        super().__init__()
        self.layer, self.losses = layer, losses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return self.layer(x)
        y, aux = self.layer(x, return_aux=True)
        self.losses.append(aux.loss)
        return y


class Models:
    """One model whose sparse blocks can be switched to the dense formulation, and a dense one.

    Attributes:
        config: of the sparse one.
    """

    def __init__(self, preset: SwinCase, device: torch.device, *, tiny: bool, seed: int):
        model = example("model")
        config = model.PRESETS["tiny" if tiny else preset.model]
        routing = {"gate_noise": 0.0, "batch_prioritized": False, "load_importance_loss": False}
        self.config = dataclasses.replace(
            config, num_experts=4 if tiny else preset.experts, drop_path=0.0, moe_dropout=0.0,
            moe={**config.moe, **routing},
        )  # fmt: skip
        torch.manual_seed(seed)
        self.device = device
        self.sparse = model.SwinMoE(self.config).to(device)
        self.dense = model.SwinMoE(model.dense(self.config)).to(device)
        self.losses: list[torch.Tensor] = []
        self._variants = []
        for stage, numbers in enumerate(self.config.moe_blocks):
            for number in numbers:
                block = self.sparse.layers[stage].blocks[number]
                masks = Recording(DenseMoE(block.mlp), self.losses)
                self._variants.append(
                    (block, {OURS: Recording(block.mlp, self.losses), MASKS: masks})
                )

    def choose(self, name: str) -> nn.Module:
        """The model of a case."""
        self.losses.clear()
        if name == DENSE_MODEL:
            return self.dense
        for block, variants in self._variants:
            block.mlp = variants[name]
        return self.sparse


def make_case(name: str, models: Models, images: int, mode: str, dtype: str, seed: int) -> Case:
    """One of OURS, MASKS and DENSE_MODEL on so many random images."""
    config, device = models.config, models.device
    draw = torch.Generator(device=device).manual_seed(seed)
    size = (_INPUTS, images, config.channels, config.image, config.image)
    x = torch.randn(size, device=device, generator=draw)
    labels = torch.randint(config.classes, (_INPUTS, images), device=device, generator=draw)
    one = torch.ones((), device=device)
    model = models.choose(name)

    def select():
        models.choose(name).train(mode == "training")

    def autocast():
        if dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(device.type, DTYPES[dtype])

    def train(number):
        with autocast():
            logits = model(x[number % _INPUTS])
        loss = nn.functional.cross_entropy(logits.float(), labels[number % _INPUTS])
        return (loss + _AUX_WEIGHT * sum(models.losses),), (one,)

    @torch.no_grad()
    def infer(number):
        with autocast():
            return (model(x[number % _INPUTS]),), ()

    return Case(name, train if mode == "training" else infer, lambda: model.parameters(), select)


def agreement(cases: Sequence[Case], models: Models, judged: bool) -> float:
    """Largest RMS error ratio of output and, in training, gradients between the first two cases.

    Raises:
        RuntimeError: they do not compute the same, and it is to be judged.
    """
    found = []
    for case in cases[:2]:
        case.begin()
        outputs, grads = case.forward(0)
        got = [outputs[0].detach().double()]
        if grads:
            torch.autograd.backward(outputs, grads)
            got += [p.grad.double() for p in models.sparse.patch_embed.parameters()]
        found.append(got)
        case.begin()
    ratios = [
        ((a - b).square().sum() / b.square().sum()).sqrt().item()
        for a, b in zip(*found, strict=True)
    ]
    if judged and not max(ratios) <= _AGREEMENT:  # NaN fails, too
        raise RuntimeError(
            f"the two formulations do not compute the same: RMS error ratio {max(ratios):.3g}, at "
            f"most {_AGREEMENT:g} expected"
        )
    return max(ratios)


def why_not(config, images: int, mode: str, dtype: str, device: torch.device) -> str | None:
    """Reason why the masks of so many images have no room, None where they have."""
    size = DTYPES[dtype].itemsize
    need = [
        memory_need(s.tokens, s.experts, s.capacity, size) for s in sparse_layers(config, images)
    ]
    needed, free = (sum(need) if mode == "training" else max(need)), available_memory(device)
    if needed > free:
        return f"masks need {needed / 1e9:.1f} GB (computed), {free / 1e9:.1f} GB are available"
    return None


def pair_ratio(times: dict[str, Any], above: str, below: str, phase: str) -> dict[str, Any] | None:
    """Median and interval of one case's time over another's in the same turn."""
    if above not in times or below not in times:
        return None
    pairs = zip(times[above][phase], times[below][phase], strict=True)
    low, middle, high = median_interval([a / b for a, b in pairs])
    return {"median": middle, "interval": [low, high]}


def point(models: Models, images: int, mode: str, times: dict[str, Any]) -> dict[str, Any]:
    """What the turns with so many images say."""
    phase = "both" if mode == "training" else "forward"
    config = models.config
    return {
        "mode": mode,
        "images": images,
        "faster_than_dense_formulation": pair_ratio(times, MASKS, OURS, phase),
        "expected": expected_ratio(config, images, mode),
        "of_dense_model_time": pair_ratio(times, OURS, DENSE_MODEL, phase),
        "macs": {"forward": forward_macs(config, images), "mask": mask_macs(config, images)},
        "ms": {name: percentiles(of[phase]) for name, of in times.items()},
        "raw_ms": {name: of[phase] for name, of in times.items()},
    }


def measure(
    models: Models,
    images: int,
    mode: str,
    dtype: str,
    options: argparse.Namespace,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """One point of a curve; ``keep`` gets it after each turn."""
    device, missing = models.device, {}
    names = [OURS, MASKS, DENSE_MODEL]
    if reason := why_not(models.config, images, mode, dtype, device):
        names.remove(MASKS)
        missing[MASKS] = reason
    cases = [make_case(name, models, images, mode, dtype, options.seed) for name in names]
    if device.type == "cuda":
        missing |= {c.name: "it ran out of memory" for c in cases if not fits(c, device)}
        cases = [case for case in cases if case.name not in missing]
    about: dict[str, Any] = {"not_run": missing}
    if {OURS, MASKS}.isdisjoint(missing):
        about["rms_error_ratio"] = agreement(cases, models, judged=dtype == "float32")
    about["peak_bytes"] = {case.name: peak_memory(case, device) for case in cases}

    def whole(times):
        return {**point(models, images, mode, times), **about}

    repetitions = 2 if options.tiny else options.repetitions or (20 if device.type == "cuda" else 6)
    # each case ran once already, for its memory
    how = {"warmup": 0, "processor_time": options.processor_time}
    times = time_cases(cases, device, repetitions, **how, progress=lambda t: keep(whole(t)))
    free_memory(device)
    return whole(times)


def show(result: dict[str, Any]) -> None:
    """A row for each point."""
    say(f"SwinV2-MoE {result['preset']}: {result['about']}; on {device_name(result)}, one rank")

    def ratio(name):
        def text(row):
            of = row[name]
            if of is None:
                return "-"
            low, high = of["interval"]
            return f"{of['median']:.2f} ({low:.2f}-{high:.2f})"

        return text

    def median(name):
        return lambda row: f"{row['ms'][name]['p50']:.0f}" if name in row["ms"] else "-"

    shown = {
        "mode": "{mode}",
        "images": "{images}",
        **{f"{name} ms": median(name) for name in (OURS, MASKS, DENSE_MODEL)},
        "dense formulation / ours": ratio("faster_than_dense_formulation"),
        "by MACs": "{expected:.2f}",
        "ours / dense model": ratio("of_dense_model_time"),
    }
    say(table(result["results"], shown))
    for row in result["results"]:
        for name, reason in row["not_run"].items():
            say(f"{row['mode']}, {row['images']} images: {name}: not run: {reason}")


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write."""
    expect_known("--modes", options.modes, list(PASSES))
    if ranks.world_size > 1:
        raise ValueError(f"bench_swin.py measures one rank, not {ranks.world_size}")
    check_clock(options, ranks)
    device = ranks.device
    name = options.preset or ("small-32" if device.type == "cuda" else "small")
    preset = PRESETS[name]
    numbers = options.images or ([2, 4] if options.tiny else list(preset.images))
    if min(numbers) < 1:
        raise ValueError(f"--images {','.join(map(str, numbers))}: at least 1")
    models = Models(preset, device, tiny=options.tiny, seed=options.seed)
    parameters = {
        "sparse": sum(p.numel() for p in models.sparse.parameters()),
        "dense model": sum(p.numel() for p in models.dense.parameters()),
    }
    report = Report(
        "swin", ranks, options.output or Path(f"runs/bench/swin-{name}-{device.type}.json"),
        preset=f"tiny-{name}" if options.tiny else name, about=preset.about, parameters=parameters,
        settings=dataclasses.asdict(models.config), dtype=preset.dtype,
        clock="processor" if options.processor_time else "wall",
        memory_method=MEMORY_METHOD[device.type],
    )  # fmt: skip
    done: list[dict[str, Any]] = []

    def keep(row):
        report.keep(lambda: {"results": [*done, row]})

    for mode in options.modes:
        for images in numbers:
            done.append(measure(models, images, mode, preset.dtype, options, keep))
    report.finish({"results": done}, show)


main = runner.program(parse_arguments, run)


if __name__ == "__main__":
    sys.exit(main())
