"""Generation by a whole language model, beside other layers in its place, and a dense model.

    python scripts/bench/bench_generate.py --tutel DIR --meta DIR
    python scripts/bench/bench_generate.py --experts 32 --grid 1x1,8x5

A model of fairseq's with 8 layers (4 of them sparse), random weights, fairseq's SequenceGenerator.
All models take turns; printed is the median time of a step (one more token of every sentence and
beam) and the others' over this plugin's, by batch x beam. eval_cases.py has the formula of what to
expect of the products.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import runner
import torch
from eval_cases import ABOUT, layers_of
from fairseq import options as fairseq_options
from fairseq import tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.sequence_generator import SequenceGenerator
from measure import Case, median_interval, percentiles, time_cases
from presets import LayerShape
from ranks import Ranks
from record import device_name, say, table
from runner import Report, add_clock, add_defaults, check_clock, command_line, expect_known, words
from torch import nn

import fairseq_tutel

_TASK = "--task dummy_lm --tokens-per-sample 512 --cpu --batch-size 4"
_MOE = "--arch transformer_lm_gpt_moe --criterion moe_cross_entropy --moe-second-expert-policy all"
_DENSE = "--arch transformer_lm_gpt_moe --criterion moe_cross_entropy"
_COUNTED = ("layer", "bf16", "int8", "flop-matched")  # others' weights are no parameters of a model
CASES = tuple(name for name in ABOUT if name != "products")


class InPlaceOfLayer(nn.Module):
    """A layer of someone else's where a model has ours."""

    def __init__(self, layer, run):
        super().__init__()
        self.config, self.groups, self._run = layer.config, layer.groups, run

    def forward(self, x, **_):
        return self._run(x.reshape(-1, x.shape[-1])).view(x.shape)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--tutel", type=Path, metavar="DIR", help="repository of Tutel, built in place")
    add("--meta", type=Path, metavar="DIR", help="fairseq/modules/moe of fairseq's branch moe")
    add("--grid", default=["1x1", "1x5", "8x1", "8x5"], help="batch x beam", **words())
    add("--cases", help=f"of {', '.join(CASES)} (default: all)", **words())
    sizes = {
        "layers": (8, ""),
        "model-dim": (512, "M"),
        "hidden-dim": (2048, "F of an expert, and of dense layers"),
        "experts": (8, "E"),
        "vocabulary": (5000, "words"),
    }
    add_defaults(parser, sizes)
    add_defaults(parser, {"steps": (24, "tokens that are generated"), "seed": (1, "of weights")})
    add_defaults(parser, {"repetitions": (7, "of each case")})
    add_clock(parser)
    add("--output", type=Path, help="JSON file (default: runs/bench/generate-EXPERTS.json)")
    return parser.parse_args(argv)


def build(options: argparse.Namespace, *words: str):
    """(model in evaluation, its task)"""
    parser = fairseq_options.get_training_parser()
    sizes = f"""--decoder-layers {options.layers} --decoder-embed-dim {options.model_dim}
        --decoder-ffn-embed-dim {options.hidden_dim} --decoder-attention-heads 8
        --share-decoder-input-output-embed --dict-size {options.vocabulary - 4}"""
    args = fairseq_options.parse_args_and_arch(
        parser, input_args=[*_TASK.split(), *sizes.split(), *words]
    )
    config = convert_namespace_to_omegaconf(args)
    task = tasks.setup_task(config.task)
    utils.set_torch_seed(options.seed)
    return task.build_model(config.model).eval(), task


def models_of(options: argparse.Namespace, names: Sequence[str], tokens: int):
    """(task, models by case, name -> reason of the missing)"""
    moe = [*_MOE.split(), "--moe-expert-count", str(options.experts)]
    shape = LayerShape(tokens, options.model_dim, options.hidden_dim, options.experts)
    plain, task = build(options, *moe)
    models, missing = {"layer": plain}, {}
    if "flop-matched" in names:
        width = str(shape.top_k * options.hidden_dim)
        models["flop-matched"] = build(
            options, *_DENSE.split(), "--alternate-decoder-ffn-embed-dim", width
        )[0]
    for name in names:
        if name in models:
            continue
        model, _ = build(options, *moe)
        for block in model.decoder.layers:
            if not hasattr(block, "moe_layer"):
                continue
            stored = (name,) if name in ("bf16", "int8") else ()
            made, why = layers_of(
                shape, block.moe_layer, tutel=options.tutel, meta=options.meta, stored=stored
            )
            if name not in made:
                missing[name] = why[name]
                break
            block.moe_layer = InPlaceOfLayer(block.moe_layer, made[name])
        else:
            models[name] = model
    return task, models, missing


def measure(options: argparse.Namespace, names: Sequence[str], batch: int, beam: int) -> dict:
    """One cell of the grid."""
    task, models, missing = models_of(options, names, batch * beam)
    generator = torch.Generator().manual_seed(options.seed)
    prompt = torch.randint(4, options.vocabulary, (batch, 4), generator=generator)
    sample = {"net_input": {"src_tokens": prompt, "src_lengths": torch.tensor([4] * batch)}}
    length = {"min_len": options.steps, "max_len_a": 0, "max_len_b": options.steps}

    def case(model):
        search = SequenceGenerator([model], task.target_dictionary, beam_size=beam, **length)

        def forward(number):
            search.generate([model], sample, prefix_tokens=prompt, bos_token=2)
            return (), ()

        return forward

    cases = [Case(name, case(model)) for name, model in models.items()]
    how = {"warmup": 1, "processor_time": options.processor_time}
    times = time_cases(cases, torch.device("cpu"), options.repetitions, **how)
    per_step = {
        name: [ms / (options.steps + 1) for ms in of["forward"]] for name, of in times.items()
    }
    ours = per_step["layer"]
    return {
        "batch": batch,
        "beam": beam,
        "ms_per_step": {name: percentiles(values) for name, values in per_step.items()},
        "tokens_per_second": {
            name: 1e3 * batch / percentiles(values)["p50"] for name, values in per_step.items()
        },
        "over_layer": {
            name: dict(
                zip(
                    ("low", "median", "high"),
                    median_interval([a / b for a, b in zip(values, ours, strict=True)]),
                    strict=True,
                )
            )
            for name, values in per_step.items()
        },
        "parameter_bytes": {
            name: _bytes(model) for name, model in models.items() if name in _COUNTED
        },
        "not_run": missing,
        "raw_ms_per_step": per_step,
    }


def _bytes(model) -> int:
    held = sum(each.num_bytes() for each in model.modules() if hasattr(each, "num_bytes"))
    return held + sum(param.nbytes for param in model.parameters())


def show(result: dict[str, Any]) -> None:
    """Times of a step, and of the others over it."""
    say(f"generation, ms per step, on {device_name(result)}")

    def cell(name):
        def text(row):
            if name not in row["ms_per_step"]:
                return "-"
            if name == "layer":
                return f"{row['ms_per_step'][name]['p50']:.1f}"
            of = row["over_layer"][name]
            return f"{of['median']:.2f} ({of['low']:.2f}-{of['high']:.2f})"

        return text

    columns = {name if name != "layer" else "this plugin, ms": cell(name) for name in CASES}
    rows = list(result["results"].values())
    say(table(rows, {"batch x beam": "{batch} x {beam}"} | columns))


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write."""
    check_clock(options, ranks)
    fairseq_tutel.register()
    names = list(options.cases or CASES[1:])
    expect_known("--cases", names, CASES)
    path = options.output or Path(f"runs/bench/generate-{options.experts}.json")
    clock = "processor" if options.processor_time else "wall"
    settings = {key: value for key, value in vars(options).items() if isinstance(value, int)}
    report = Report("generate", ranks, path, about=ABOUT, settings=settings, clock=clock)
    results: dict[str, Any] = {}
    for cell in options.grid:
        batch, _, beam = cell.partition("x")
        if not (batch.isdigit() and beam.isdigit()):
            raise ValueError(f"--grid {cell}: give batch x beam, as in 8x5")
        results[cell] = measure(options, ["layer", *names], int(batch), int(beam))
        report.keep(lambda: {"results": results})
    report.finish({"results": results}, show)


main = runner.program(parse_arguments, run)


if __name__ == "__main__":
    sys.exit(main())
