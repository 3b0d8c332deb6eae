"""Time of a step of generation by a whole language model, beside other layers and a dense model.

    python scripts/bench/bench_generate.py --tutel DIR --meta DIR
    python scripts/bench/bench_generate.py --experts 32 --grid 1x1,8x5

A fairseq model of 8 layers (4 with experts) with random weights, in fairseq's SequenceGenerator;
other layers take the place of ours. All models take turns. A step is one more token of every
sentence and beam; ratios are this plugin's time over the others', by batch x beam.

Good: at most the time of other MoE layers; the FLOP-matched dense model shows what routing costs.
"""

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from fairseq.sequence_generator import SequenceGenerator
from harness import Case, Point, call, sweep
from layers import EVALUATED
from models import PARTS, TrainPreset, build_model, config_of, layer_shape, load_config
from peers import FOLDERS, evaluated_layers
from program import CLOCK, Ranks, program, words
from torch import nn

_COUNTED = ("layer", "int8", "flop-matched")  # others' weights are no parameters of a model
OPTIONS = {
    **FOLDERS,
    "grid": (["1x1", "1x5", "8x1", "8x5"], "batch x beam"),
    "cases": (words, "default: all", EVALUATED),
    "experts": (8, "E"),
    "steps": (24, "tokens that are generated"),
    **CLOCK,
}


class InPlaceOfLayer(nn.Module):
    """A layer of another library in the place of ours."""

    def __init__(self, layer, run):
        super().__init__()
        self.config, self.groups, self._run = layer.config, layer.groups, run

    def forward(self, x, **_):
        return self._run(x.reshape(-1, x.shape[-1])).view(x.shape)


def models_of(
    options: argparse.Namespace, names: Sequence[str], tokens: int, ranks: Ranks
) -> tuple[Any, dict[str, nn.Module], dict[str, str]]:
    """Return (task, models by case, name -> reason of the missing)."""
    changes = PARTS["tiny"].split() if options.tiny else []
    changes += [f"common.seed={options.seed}", f"model.moe_expert_count={options.experts}"]
    config = load_config(TrainPreset("", "fp32 generate"), changes, ranks)
    shape = dataclasses.replace(layer_shape(config), tokens=tokens)
    models, missing = {}, {}
    for name in names:
        task, model = build_model(config_of(name, config))
        blocks = [each for each in model.decoder.layers if hasattr(each, "moe_layer")]
        for block in blocks if name not in ("layer", "flop-matched") else ():
            made, why = evaluated_layers(shape, block.moe_layer.eval(), [name], options)
            missing |= why
            if name in made:
                block.moe_layer = InPlaceOfLayer(block.moe_layer, made[name])
        if name not in missing:
            models[name] = model.eval()
    return task, models, missing


def point_of(cell: str, names: Sequence[str], options: argparse.Namespace, ranks: Ranks) -> Point:
    """Return all models on one batch x beam."""
    batch, beam = (int(word) for word in cell.split("x"))
    task, models, missing = models_of(options, names, batch * beam, ranks)
    generator = torch.Generator().manual_seed(options.seed)
    prompt = torch.randint(4, len(task.source_dictionary), (batch, 4), generator=generator)
    sample = {"net_input": {"src_tokens": prompt, "src_lengths": torch.tensor([4] * batch)}}
    length = {"min_len": options.steps, "max_len_a": 0, "max_len_b": options.steps}

    def case(name, model):
        search = SequenceGenerator([model], task.target_dictionary, beam_size=beam, **length)
        how = {"prefix_tokens": prompt, "bos_token": 2}
        return Case(name, call(lambda: search.generate([model], sample, **how)))

    sizes = {name: _bytes(model) for name, model in models.items() if name in _COUNTED}

    def derive(found):
        derived = {}
        for name, of in found["ms"].items():
            step = of["forward"]["p50"] / (options.steps + 1)
            size = {"weights MiB": sizes[name] / 2**20} if name in sizes else {}
            derived[name] = {"ms per step": step, **size}
        return derived

    cases = [case(name, model) for name, model in models.items()]
    return Point(cell, cases, {"batch": batch, "beam": beam}, missing, derive)


def _bytes(model: nn.Module) -> int:
    held = sum(each.num_bytes() for each in model.modules() if hasattr(each, "num_bytes"))
    return held + sum(param.nbytes for param in model.parameters())


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Measure, print and write."""
    ranks.expect_one()
    names = list(dict.fromkeys(["layer", *(options.cases or EVALUATED)]))
    for cell in options.grid:
        if not re.fullmatch(r"\d+x\d+", cell):
            raise ValueError(f"--grid {cell}: give batch x beam, as in 8x5")
    settings = {key: value for key, value in vars(options).items() if isinstance(value, int)}
    about = {"about": EVALUATED, "settings": settings, "clock": options.clock}
    how = {"file": f"generate-{options.experts}", "about": about, "repetitions": 7, "warmup": 1}
    points = (point_of(cell, names, options, ranks) for cell in options.grid)
    sweep("generate", options, ranks, points, **how)


main = program(__doc__, OPTIONS, run)


if __name__ == "__main__":
    sys.exit(main())
