"""Predicted times of the GPU benchmarks' cases: products, bytes of elementwise kernels, copies.

A product takes its operations over the measured throughput of one large product; a kernel takes its
fewest bytes over the bandwidth that kernels reach; both are in ``configs/hardware``. Launches are
not counted. The files are read without PyYAML, which a machine with a GPU may lack.
"""

from __future__ import annotations

import re

import torch
from layers import DTYPES, LayerShape

from fairseq_tutel.command_line import CONFIGS

# part of torch's name of a GPU -> profile, the first that matches
_NAMES = {
    "a100-sxm4-40gb": "a100-40g",
    "a100-pcie-40gb": "a100-40g",
    "a100": "a100-80g",
    "h200": "h200",
    "h100": "h100",
    "b200": "b200",
    "mi300x": "mi300x",
}
_INT = 4  # bytes of an index, a gate value, a count
CUMSUM = "torch.cumsum - 1"  # torch's own way of assign_slots


class Rates:
    """FLOPs per second of one large product on a GPU, bytes per second of elementwise kernels."""

    def __init__(self, profile: str):
        text = (CONFIGS / "hardware" / f"{profile}.yaml").read_text(encoding="utf-8")
        given = dict(re.findall(r"^(\w+):\n  value: (\S+)", text, re.MULTILINE))
        value = {name: float(number) for name, number in given.items()}
        self.half_flops = value["product_efficiency"] * value["half_flops"]
        self.fp32_flops = value["product_efficiency"] * value["fp32_flops"]
        self.stream = value["memory_bandwidth"] * value["memory_efficiency"]

    def products_ms(self, operations: float, dtype: str) -> float:
        """Return the milliseconds of matrix products of so many FLOPs."""
        halves = DTYPES[dtype].itemsize == 2
        return 1e3 * operations / (self.half_flops if halves else self.fp32_flops)

    def bytes_ms(self, size: float) -> float:
        """Return the milliseconds in which kernels read and write so many bytes."""
        return 1e3 * size / self.stream


def profile_of(device: torch.device) -> str | None:
    """Return the hardware profile of a GPU; None for a CPU and for a GPU without a profile."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    return next((profile for part, profile in _NAMES.items() if part in name), None)


def rates_of(device: torch.device) -> Rates | None:
    """Return the rates of a device; None without a profile."""
    profile = profile_of(device)
    return profile and Rates(profile)


def beside(measured: float, predicted: float | None) -> dict[str, float]:
    """Return the columns of a case; none without a prediction."""
    if not predicted:
        return {}
    return {"predicted ms": predicted, "measured/predicted": measured / predicted}


def fewest_bytes(shape: LayerShape, full: float = 1.0) -> dict[str, int]:
    """Return the bytes of inputs and outputs, once each, by operator.

    Args:
        full: share of the rows that hold a token; empty rows need not be read.
    """
    names = ("tokens", "experts", "top_k", "model_dim", "hidden_dim")
    T, E, K, M, F = (getattr(shape, name) for name in names)
    size, R = DTYPES[shape.dtype].itemsize, E * shape.capacity
    pairs, rows, logits = _INT * T * K, _INT * R, _INT * T * E
    tokens, all_rows, used = size * T * M, size * R * M, round(full * R) * M * size
    hidden, bias = size * shape.rows * F, size * shape.local_experts * F
    return {
        "topk_gating": logits + 2 * pairs + _INT * (T + E + 1),
        "topk_gating bwd": 2 * logits + 2 * pairs + _INT * (2 * T + E),
        "assign_slots": 2 * pairs + _INT * K * E,
        "assign_rows": 5 * pairs + _INT * K * E + rows + _INT * E,
        "dispatch": tokens + rows + all_rows,
        "dispatch bwd": used + pairs + tokens,
        "combine": used + 2 * pairs + tokens,
        "combine bwd": tokens + used + rows + 2 * pairs + all_rows,
        "bias_act gelu": 2 * hidden + bias,
        "bias_act gelu bwd": 3 * hidden + 2 * bias,
        CUMSUM: 4 * pairs * E,  # int64, read and written
    }


def layer_ms(shape: LayerShape, rates: Rates) -> dict[str, float]:
    """Return milliseconds of bench_layer.py's cases, forward and backward on one rank.

    The torch backend has no prediction: its host waits for the GPU.
    """
    T, E, M, F = shape.tokens, shape.experts, shape.model_dim, shape.hidden_dim
    size, rows = DTYPES[shape.dtype].itemsize, shape.rows
    products = rates.products_ms(6 * rows * 2 * M * F, shape.dtype)
    kernels = fewest_bytes(shape)
    activation = kernels["bias_act gelu"] + kernels["bias_act gelu bwd"]
    elementwise = sum(kernels.values()) - kernels[CUMSUM] - kernels["assign_slots"]
    # the gate reads tokens twice and writes their gradient; that of dispatch is added to it
    elementwise += (3 + 3) * size * T * M
    copies = 0
    if shape.simulated_ranks > 1:
        copies = 4 * 2 * size * rows * M  # both directions and their gradients
        copies += 3 * size * rows * M  # fc2's bias; with one rank combine adds it
        if shape.local_experts > 1:
            copies *= 2  # rows by rank become rows by expert, and back
    gate = rates.products_ms(6 * T * M * E, shape.dtype)
    # forward two products of all masks with the tokens, backward three
    masks = rates.products_ms(5 * 2 * T * E * shape.capacity * M, shape.dtype)
    return {
        "triton": products + gate + rates.bytes_ms(elementwise + copies),
        "dense": products + gate + masks + rates.bytes_ms(activation + copies),
        "experts": products + rates.bytes_ms(activation),
        "products": products,
    }
