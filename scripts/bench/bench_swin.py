"""SwinV2-MoE with this layer against the same model with the dense S x E x C formulation.

    python scripts/bench/bench_swin.py --preset small --modes inference --images 8,16,32
    python scripts/bench/bench_swin.py --device cuda --preset small-32

For each number of images per rank: the whole model (scripts/examples/swin_moe) with random weights
on random images, forward (inference) or forward and backward (training). Three cases take turns:
this layer; the same weights in the dense formulation, as fairseq's layer computes; the dense model
with one feed-forward network where the others have experts. Routing is in the order of tokens,
without noise and dropout and with GShard's loss: the dense formulation knows nothing else.

Good: the ratio is near that of the operations of matrix products, which falls as the images grow.
No ratio means anything without their number.
"""

import copy
import dataclasses
import sys
from typing import NamedTuple

import torch
from dense_reference import DenseMoE
from harness import Case, Point, agreement, sweep
from layers import DTYPES, LayerShape, masks_have_no_room
from program import CLOCK, numbers, program
from record import ROOT
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fairseq_tutel.moe.model import moe_layers
from fairseq_tutel.training import collect_aux

sys.path.append(str(ROOT / "scripts" / "examples" / "swin_moe"))
import model as swin  # noqa: E402

_INPUTS = 2  # sets of images that take turns
_AUX_WEIGHT = 0.01
PASSES = {"inference": 1, "training": 3}  # of every product: a backward pass has two
# RMS error ratio of the two formulations in fp32: a token between two experts may go to the other
_AGREEMENT = 1e-3
OURS, MASKS, DENSE_MODEL = "ours", "dense formulation", "dense model"


class Preset(NamedTuple):
    """A model by its name in the example."""

    about: str
    model: str
    experts: int
    images: tuple[int, ...]
    dtype: str = "float32"


_GPU = (32, (16, 32, 64, 128), "bfloat16")
PRESETS = {
    "small": Preset("S, 8 experts, fp32: 2 CPU cores", "small", 8, (8, 16, 32)),
    "small-32": Preset("S, 32 experts on one rank, bf16 autocast: a GPU", "small", *_GPU),
    "base-32": Preset("B, 32 experts on one rank, bf16 autocast: a GPU", "base", *_GPU),
}
OPTIONS = {
    "preset": (str, "default: small-32 on a GPU, small on a CPU", PRESETS),
    "images": (numbers, "per rank, in place of the preset's"),
    "modes": (list(PASSES), "what to measure", PASSES),
    **CLOCK,
}


def sparse_layers(config: swin.SwinConfig, images: int, dtype: str = "float32") -> list[LayerShape]:
    """Return the layers with experts on one rank."""
    found = []
    how = {"top_k": config.moe["top_k"], "capacity_factor": config.moe["capacity_factor"]}
    for stage, blocks in enumerate(config.moe_blocks):
        tokens = images * (config.image // config.patch >> stage) ** 2
        dim = config.dim << stage
        shape = LayerShape(tokens, dim, 4 * dim, config.num_experts, dtype=dtype, **how)
        found += [shape for _ in blocks]
    return found


def counted_ratio(ours: Case, masks: Case, layers: list[LayerShape], mode: str) -> float:
    """Return operations of this layer's model over those of the dense formulation's.

    torch counts all products but the experts' with padded rows, which both have.
    """
    experts = sum(4 * shape.rows * shape.model_dim * shape.hidden_dim for shape in layers)
    found = []
    for case in (ours, masks):
        case.begin()
        with FlopCounterMode(display=False) as counter:
            case.run()
        found.append(counter.get_total_flops() + PASSES[mode] * experts)
    return found[0] / found[1]


def build_models(preset: Preset, device: torch.device, *, tiny: bool, seed: int):
    """Return the sparse model's config, and the models by case; two of them share weights."""
    config = swin.PRESETS["tiny" if tiny else preset.model]
    routing = {"gate_noise": 0.0, "batch_prioritized": False, "load_importance_loss": False}
    sizes = {"num_experts": 4 if tiny else preset.experts, "moe": {**config.moe, **routing}}
    config = dataclasses.replace(config, **sizes, drop_path=0.0, moe_dropout=0.0)
    torch.manual_seed(seed)
    sparse = swin.SwinMoE(config).to(device)
    # a copy of the modules whose tensors are the same
    same = {id(tensor): tensor for tensor in (*sparse.parameters(), *sparse.buffers())}
    masks = copy.deepcopy(sparse, same)
    for layer in moe_layers(masks).values():
        layer._compute = DenseMoE(layer).forward  # and not forward, which serves collect_aux
    dense = swin.SwinMoE(swin.dense(config)).to(device)
    return config, {OURS: sparse, MASKS: masks, DENSE_MODEL: dense}


def make_case(name, model: nn.Module, config, images: int, mode: str, dtype: str) -> Case:
    """Build a case of one of the models on so many random images."""
    device = next(model.parameters()).device
    draw = torch.Generator(device=device).manual_seed(1)
    size = (_INPUTS, images, config.channels, config.image, config.image)
    x = torch.randn(size, device=device, generator=draw)
    labels = torch.randint(config.classes, (_INPUTS, images), device=device, generator=draw)
    one = torch.ones((), device=device)

    def logits_of(number):
        with torch.autocast(device.type, DTYPES[dtype], enabled=dtype != "float32"):
            return model(x[number % _INPUTS])

    def train(number):
        with collect_aux(model) as aux:
            logits = logits_of(number)
        loss = nn.functional.cross_entropy(logits.float(), labels[number % _INPUTS])
        return (loss + _AUX_WEIGHT * aux.loss,), (one,)

    @torch.no_grad()
    def infer(number):
        return (logits_of(number),), ()

    training = mode == "training"
    select = lambda: model.train(training)  # noqa: E731
    return Case(name, train if training else infer, model.parameters, select)


def point_of(models, config, images: int, mode: str, dtype: str) -> Point:
    """Return the cases on so many images, and the ratio of their operations."""
    parameters = list(models[OURS].patch_embed.parameters())
    layers = sparse_layers(config, images, dtype)
    # one at a time in inference
    largest = layers if mode == "training" else [max(layers, key=lambda shape: shape.mask_bytes)]
    reason = masks_have_no_room(largest, parameters[0].device)
    cases = [
        make_case(name, model, config, images, mode, dtype)
        for name, model in models.items()
        if not (reason and name == MASKS)
    ]
    missing = {MASKS: reason} if reason else {}
    about = {"mode": mode, "images": images}

    def check(cases):
        pair = [case for case in cases if case.name in (OURS, MASKS)]
        if len(pair) == 2:
            about["this_over_masks_by_operations"] = counted_ratio(*pair, layers, mode)
            limit = _AGREEMENT if dtype == "float32" else float("inf")
            about["rms_error_ratio"] = agreement(pair, parameters, limit)[MASKS]
        return about

    def derive(found):
        columns = {"by operations": about.get("this_over_masks_by_operations")}
        return {MASKS: columns} if MASKS in found["ms"] else {}

    return Point(f"{mode}, {images} images", cases, about, missing, derive, check=check)


@program(__doc__, OPTIONS)
def main(options, ranks):
    ranks.expect(several=False)
    on_gpu = ranks.device.type == "cuda"
    name = options.preset or ("small-32" if on_gpu else "small")
    preset = PRESETS[name]
    images = options.images or ([2, 4] if options.tiny else list(preset.images))
    if min(images) < 1:
        raise ValueError(f"--images {','.join(map(str, images))}: at least 1")
    config, models = build_models(preset, ranks.device, tiny=options.tiny, seed=options.seed)
    both = {"sparse": models[OURS], "dense model": models[DENSE_MODEL]}
    about = {
        "preset": f"tiny-{name}" if options.tiny else name,
        "about": preset.about,
        "parameters": {key: sum(p.numel() for p in of.parameters()) for key, of in both.items()},
        "settings": dataclasses.asdict(config),
        "dtype": preset.dtype,
        "clock": options.clock,
    }
    points = (
        point_of(models, config, number, mode, preset.dtype)
        for mode in options.modes
        for number in images
    )
    how = {"warmup": 1, "repetitions": 20 if on_gpu else 6}
    file = f"swin-{name}-{ranks.device.type}"
    sweep("swin", options, ranks, points, file=file, about=about, **how)


if __name__ == "__main__":
    sys.exit(main())
