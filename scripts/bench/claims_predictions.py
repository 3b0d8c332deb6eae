"""Figures of published claims as the planner predicts them, with the constants of configs/hardware.

:data:`PREDICTIONS` has functions by row; they return the values in the order of the published ones.
"""

import dataclasses
import functools
from collections.abc import Callable

from claims_dense import make_dense_plan
from claims_layer import LayerShape, best_layer_time, layer_time

from fairseq_tutel.command_line import CONFIGS
from fairseq_tutel.config import EXCHANGES
from fairseq_tutel.distributed import possible_r
from fairseq_tutel.plan.compose import load_config
from fairseq_tutel.plan.hardware import Hardware, load_hardware
from fairseq_tutel.plan.parameters import Parameters, count_parameters
from fairseq_tutel.plan.planner import Plan, make_plan
from fairseq_tutel.plan.settings import Settings, read_settings

MIB = 2**20
A100 = load_hardware(CONFIGS, "a100-80g")  # the published machines: nodes of 8, of 80 GB


def figure_14(gpus: int) -> LayerShape:
    """Return the layer of figure 14 of arXiv 2206.03382: two experts per GPU, half precision."""
    return LayerShape(16384, 2048, 2048, 2 * gpus, gpus)


@functools.cache
def layer_times(gpus: int) -> tuple[float, float, float]:
    """Predict seconds of figure 14's layer: dense; linear, no overlap; best exchange, overlap."""
    layer = figure_14(gpus), A100
    return layer_time(*layer, dense=True), layer_time(*layer), best_layer_time(*layer)


@functools.cache
def end_to_end_plans(gpus: int) -> tuple[Plan, Plan]:
    """Plan the 1.1T model with one expert per GPU: the dense formulation, and this package."""
    config = load_config(CONFIGS, "meta_1.1t", [f"model.moe_expert_count={gpus}"])
    settings = read_settings(config, "meta_1.1t", gpus=gpus)
    return make_dense_plan(settings, A100), make_plan(settings, A100)


def end_to_end_speedup(gpus: int) -> float:
    """Predict dense over this package for an update of the 1.1T model, one expert per GPU."""
    dense, this = end_to_end_plans(gpus)
    return dense.time.total / this.time.total


def linear_over_2dh(size: int, gpus: int) -> float:
    """Predict the linear all-to-all's time over that of 2DH for ``size`` bytes of each GPU."""
    linear, two = (EXCHANGES.get(n).predict(size, gpus, A100) for n in ("linear", "2dh"))
    return linear / two


def adaptive_parallelism() -> float:
    """Predict r = 1 over the best r, largest over the capacity factors of figure 12.

    64 A100, 16 experts, D = 2048, H = 32768, 1024 tokens per GPU, capacity factors 1 to 8; top-2,
    fp32 products at the 71 TFLOP/s of table 2, gradients of gathered weights scattered by rings.
    """
    hardware = dataclasses.replace(A100, fp32_flops=71e12, matmul_efficiency=1.0)
    shape = LayerShape(1024, 2048, 32768, 16, 64)
    gains = []
    for factor in (1, 2, 4, 8):
        times = times_of_r(dataclasses.replace(shape, capacity_factor=factor), hardware)
        gains.append(times[1] / min(times.values()))
    return max(gains)


def times_of_r(shape: LayerShape, hardware: Hardware) -> dict[int, float]:
    """Predict seconds of one layer's exchanges, gathers and products by r, in fp32.

    Its experts are in slices: the plan is that of the second layer of a model of two.
    """
    settings, parameters = _run_of_two_layers(dataclasses.replace(shape, capacity_factor=1.0))
    routing = dataclasses.replace(settings.routing, capacity_factor=shape.capacity_factor)
    products = 12 * shape.rows * shape.model_dim * shape.hidden_dim / hardware.product_rate(4)
    times = {}
    for r in possible_r(parameters.groups):
        run = settings.with_placement(r=r).replace(routing=routing)
        time = make_plan(run, hardware, parameters).time
        times[r] = time.all_to_all + time.weights + products
    return times


@functools.cache
def _run_of_two_layers(shape: LayerShape) -> tuple[Settings, Parameters]:
    words = (
        "model.decoder_layers=2 model.decoder_attention_heads=16 dataset.batch_size=1 "
        f"model.decoder_embed_dim={shape.model_dim} model.decoder_ffn_embed_dim={shape.hidden_dim} "
        f"model.moe_expert_count={shape.experts} task.tokens_per_sample={shape.tokens} "
        "model.checkpoint_activations=false common.fp16=false common.memory_efficient_fp16=false"
    ).split()
    settings = read_settings(load_config(CONFIGS, "meta_1.1t", words), "", gpus=shape.gpus)
    settings = settings.with_placement("sliced")
    return settings, count_parameters(settings)


def _layer_speedup(gpus: int, case: int) -> float:
    times = layer_times(gpus)
    return times[0] / times[case]


PREDICTIONS: dict[int, Callable[[], list[float]]] = {
    1: lambda: [_layer_speedup(gpus, 1) for gpus in (8, 512)],
    2: lambda: [end_to_end_speedup(gpus) for gpus in (8, 512)],
    11: lambda: [89 / 72],  # a step takes as long as the busiest rank, mean over utilisation
    15: lambda: [end_to_end_speedup(512)],
    19: lambda: [adaptive_parallelism()],
    21: lambda: [linear_over_2dh(MIB, 2048)],
    22: lambda: [_layer_speedup(gpus, 2) for gpus in (16, 2048)],
}
