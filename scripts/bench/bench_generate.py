"""Time of a step of generation by a whole language model, beside other layers and a dense model.

    python scripts/bench/bench_generate.py --tutel DIR --meta DIR
    python scripts/bench/bench_generate.py --experts 32 --grid 1x1,8x5

A fairseq model of 8 layers (4 with experts) with random weights, in fairseq's SequenceGenerator;
other layers take the place of ours. All models take turns. A step is one more token of every
sentence and beam; ratios are this plugin's time over the others', by batch x beam.

Good: at most the time of other MoE layers; the FLOP-matched dense model shows what routing costs.
"""

import dataclasses
import re
import sys

import torch
from fairseq.sequence_generator import SequenceGenerator
from harness import Case, Point, call, sweep
from models import PARTS, TrainPreset, build_model, config_of, layer_shape, load_config
from peers import EVALUATED, FOLDERS, evaluated_layers
from program import CLOCK, program, words
from torch import nn

OPTIONS = {
    **FOLDERS,
    "grid": (["1x1", "1x5", "8x1", "8x5"], "batch x beam"),
    "cases": (words, "default: all", EVALUATED),
    "experts": (8, "E"),
    "steps": (24, "tokens that are generated"),
    **CLOCK,
}


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of weights, also of those in int8."""
    held = sum(each.num_bytes() for each in model.modules() if hasattr(each, "num_bytes"))
    return held + sum(param.nbytes for param in model.parameters())


def replace_layers(model: nn.Module, name: str, shape, options) -> str | None:
    """Put other layers in the place of ours; return the reason if they cannot be built."""
    for block in model.decoder.layers if name not in ("layer", "flop-matched") else ():
        if hasattr(block, "moe_layer"):
            ours = block.moe_layer.eval()
            made, missing = evaluated_layers(shape, ours, [name], options)
            if missing:
                return missing[name]
            if name == "int8":
                block.moe_layer = made[name]
            else:
                run = made[name]
                ours.forward = lambda x, run=run, **_: run(x.flatten(0, -2)).view(x.shape)
    return None


def point_of(cell, names, options, ranks) -> Point:
    """Return all models on one batch x beam."""
    batch, beam = (int(word) for word in cell.split("x"))
    changes = PARTS["tiny"].split() if options.tiny else []
    changes += [f"common.seed={options.seed}", f"model.moe_expert_count={options.experts}"]
    config = load_config(TrainPreset("", "fp32 generate"), changes, ranks)
    shape = dataclasses.replace(layer_shape(config), tokens=batch * beam)
    generator = torch.Generator().manual_seed(options.seed)
    prompt = torch.randint(4, config.task.dict_size + 4, (batch, 4), generator=generator)
    sample = {"net_input": {"src_tokens": prompt, "src_lengths": torch.tensor([4] * batch)}}
    length = {"min_len": options.steps, "max_len_a": 0, "max_len_b": options.steps}
    how = {"prefix_tokens": prompt, "bos_token": 2}
    point, sizes = Point(cell, [], {"batch": batch, "beam": beam}), {}

    def case(name, model, dictionary):
        search = SequenceGenerator([model], dictionary, beam_size=beam, **length)
        return Case(name, call(lambda _: search.generate([model], sample, **how)))

    for name in names:
        task, model = build_model(config_of(name, config))
        if reason := replace_layers(model, name, shape, options):
            point.not_run[name] = reason
            continue
        if name in ("layer", "int8", "flop-matched"):  # others' weights are none of the model's
            sizes[name] = {"weights MiB": bytes_of(model) / 2**20}
        point.cases.append(case(name, model.eval(), task.target_dictionary))

    def derive(found):
        return {
            name: {"ms per step": of["forward"]["p50"] / (options.steps + 1), **sizes.get(name, {})}
            for name, of in found["ms"].items()
        }

    point.derive = derive
    return point


@program(__doc__, OPTIONS)
def main(options, ranks):
    ranks.expect(several=False)
    names = list(dict.fromkeys(["layer", *(options.cases or EVALUATED)]))
    for cell in options.grid:
        if not re.fullmatch(r"\d+x\d+", cell):
            raise ValueError(f"--grid {cell}: give batch x beam, as in 8x5")
    settings = {key: value for key, value in vars(options).items() if isinstance(value, int)}
    about = {"settings": settings, "clock": options.clock}
    how = {"file": f"generate-{options.experts}", "about": about, "repetitions": 7, "warmup": 1}
    points = (point_of(cell, names, options, ranks) for cell in options.grid)
    sweep("generate", options, ranks, points, **how)


if __name__ == "__main__":
    sys.exit(main())
