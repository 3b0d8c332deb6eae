"""Shapes of one MoE layer, and its cases: the layer, the dense formulation, parts of its work.

shapes.json has the shapes with a name, and their goals.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from dense_reference import LIVE_MASKS, DenseMoE
from harness import Case
from program import Options, Ranks
from torch import Tensor, nn

from fairseq_tutel import ops
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.moe.memory import free_memory as available_memory

# largest RMS error ratio between the formulations: summation order, and rounding to the dtype
AGREEMENT = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
DTYPES = {name: getattr(torch, name) for name in AGREEMENT}
_INPUTS = 3  # input sets that take turns; each rank draws its own
_LOSS_GRAD = 0.01


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """One MoE layer as one rank sees it: T, M, F, E over all ranks, K.

    Attributes:
        capacity_factor: f; K * int(f * ceil(T / E)) slots per expert and rank. 0: dropless.
        simulated_ranks: > 1: this process plays one rank of so many, each all-to-all is a copy.
    """

    tokens: int
    model_dim: int
    hidden_dim: int
    experts: int
    top_k: int = 2
    capacity_factor: float = 1.0
    dtype: str = "float32"
    simulated_ranks: int = 0

    @property
    def capacity(self) -> int:
        """C, slots per expert and rank; without a capacity the rows of an even spread."""
        slots = int((self.capacity_factor or 1.0) * math.ceil(self.tokens / self.experts))
        return max(1, self.top_k * slots)

    @property
    def mask_bytes(self) -> int:
        """Bytes of the dense formulation's masks in the backward pass: it needs at least these."""
        numbers = LIVE_MASKS * self.tokens * self.experts * self.capacity
        return numbers * DTYPES[self.dtype].itemsize

    @property
    def local_experts(self) -> int:
        """e, experts of this process."""
        return max(1, self.experts // max(1, self.simulated_ranks))

    @property
    def rows(self) -> int:
        """Rows that the experts of this process receive."""
        ranks = min(self.experts, max(1, self.simulated_ranks))
        return self.local_experts * ranks * self.capacity

    def tiny(self) -> LayerShape:
        """Sizes of milliseconds on a CPU, to rehearse a benchmark; 4 ranks if simulated."""
        local, ranks = min(2, self.local_experts), min(4, self.simulated_ranks)
        sizes = {"tokens": 64, "model_dim": 16, "hidden_dim": 32, "experts": local * (ranks or 4)}
        return dataclasses.replace(self, **sizes, simulated_ranks=ranks)

    def __str__(self) -> str:
        sizes = f"{self.tokens} tokens, {self.model_dim}/{self.hidden_dim}, {self.experts} experts"
        factor = f"f = {self.capacity_factor:g}" if self.capacity_factor else "dropless"
        simulated = f", SIMULATED rank of {self.simulated_ranks}" if self.simulated_ranks else ""
        return f"{sizes}, top-{self.top_k}, {factor}, {self.dtype}{simulated}"


class Preset(NamedTuple):
    """A named shape; ``at_most`` are its goals: case -> this layer's time over the case's."""

    about: str
    shape: LayerShape
    at_most: dict[str, float]


_NAMED = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
PRESETS = {
    name: Preset(given["about"], LayerShape(*given["shape"]), given.get("at_most", {}))
    for name, given in _NAMED["layer"].items()
}
PEER_SHAPES = {name: LayerShape(*sizes) for name, sizes in _NAMED["peers"].items()}
PRESET: Options = {"preset": (str, "default: meta-1.1t on a GPU, cpu on a CPU", PRESETS)}
# sizes in place of the preset's
SIZES: Options = {
    "tokens": (int, "T, tokens of one rank"),
    "model-dim": (int, "M"),
    "hidden-dim": (int, "F, hidden dimension of an expert"),
    "experts": (int, "E over all ranks"),
    "top-k": (int, "experts per token"),
    "capacity-factor": (float, "0: dropless"),
    "dtype": (str, "of weights and tokens", DTYPES),
    "simulated-ranks": (int, "play one rank of so many: each all-to-all becomes a copy"),
}


def with_sizes(shape: LayerShape, options) -> LayerShape:
    """Return the shape with the sizes of a command line; ValueError for those that cannot be."""
    names = [field.name for field in dataclasses.fields(shape)]
    given = {name: getattr(options, name, None) for name in names}
    shape = dataclasses.replace(shape, **{k: v for k, v in given.items() if v is not None})
    for key, value in dataclasses.asdict(shape).items():
        zero = key in ("capacity_factor", "simulated_ranks")
        if key != "dtype" and (value < 0 or (value == 0 and not zero)):
            raise ValueError(f"--{key.replace('_', '-')} {value} must be positive")
    return shape


def choose_shape(options, preset: str | None, ranks: Ranks) -> tuple[str, LayerShape]:
    """Return name and shape of a preset, or of a command line with SIZES.

    On several ranks a preset of one simulated rank becomes the same local work on each.
    """
    name = preset or ("meta-1.1t" if ranks.device.type == "cuda" else "cpu")
    shape = PRESETS[name].shape
    if ranks.world_size > 1:
        count = shape.local_experts * ranks.world_size
        shape = dataclasses.replace(shape, experts=count, simulated_ranks=0)
    if options.tiny:
        name, shape = f"tiny-{name}", shape.tiny()
    given = with_sizes(shape, options)
    if given.simulated_ranks > 1 and ranks.world_size > 1:
        raise ValueError(f"--simulated-ranks {given.simulated_ranks} needs one rank")
    return name if given == shape else "custom", given


def make_layer(shape: LayerShape, device: torch.device, seed: int = 1, **options) -> MoELayer:
    """Build this layer, drawing its weights on the device."""
    sizes = (shape.model_dim, shape.experts, shape.hidden_dim)
    how = {"top_k": shape.top_k, "capacity_factor": shape.capacity_factor, "seed": seed}
    with device:
        return MoELayer(*sizes, **{**how, **options}).to(device, DTYPES[shape.dtype])


def with_loss(module: nn.Module, **call) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return a layer as a function: tokens [T, M] -> (output, balance loss)."""

    def run(x):
        y, aux = module(x, return_aux=True, **call)
        return y, aux.loss

    return run


class Inputs:
    """Tokens of this rank and gradients of the output, which all cases of a benchmark share.

    Attributes:
        x, dy: [T, M], several sets that take turns.
        leaves: everything that gets a gradient in any case.
    """

    def __init__(self, shape: LayerShape, device: torch.device, seed: int, rank: int = 0):
        self._draw = torch.Generator(device=device).manual_seed(seed + 1 + rank)
        self._like = {"device": device, "dtype": DTYPES[shape.dtype]}
        self.x = [x.requires_grad_() for x in self.draw(shape.tokens, shape.model_dim)]
        self.dy = self.draw(shape.tokens, shape.model_dim)
        self.leaves = set(self.x)

    def draw(self, *size: int) -> list[Tensor]:
        """Draw further tensors, one for each set."""
        return [torch.randn(size, generator=self._draw, **self._like) for _ in range(_INPUTS)]

    def case(self, name: str, run, parameters: Iterable[Tensor], select=lambda: None) -> Case:
        """Return both passes of a function: tokens [T, M] -> output, or (output, balance loss)."""
        self.leaves.update(parameters)

        def forward(number):
            outputs = run(self.x[number % _INPUTS])
            y, *losses = outputs if isinstance(outputs, tuple) else (outputs,)
            loss_grads = [torch.full_like(loss, _LOSS_GRAD) for loss in losses]
            return (y, *losses), (self.dy[number % _INPUTS], *loss_grads)

        return Case(name, forward, lambda: self.leaves, select)


# the cases of bench_layer.py; results/README.md says what they compute
BACKENDS, FLOORS = ("triton", "torch"), ("experts", "products")
CASES = (*BACKENDS, "dense", *FLOORS)


def make_cases(names, layer: MoELayer, shape: LayerShape, inputs: Inputs) -> list[Case]:
    """Build some of CASES; operators outside the layer's own cases are of its first backend."""
    groups = layer.groups
    size = (groups.num_local_experts, groups.ep_size * shape.capacity, shape.model_dim)
    rows, d_rows = [x.requires_grad_() for x in inputs.draw(*size)], inputs.draw(*size)
    inputs.leaves.update(rows, layer.parameters())
    backend = next((name for name in names if name in BACKENDS), "torch")

    def products(number):
        hidden = _Product.apply(rows[number % _INPUTS], layer.experts.fc1_weight)
        out = _Product.apply(hidden, layer.experts.fc2_weight)
        return (out,), (d_rows[number % _INPUTS],)

    def make(name):
        own = name if name in BACKENDS else backend
        select = lambda: ops.set_backend(own)  # noqa: E731
        if name == "experts":
            return experts_alone(layer, rows, d_rows, inputs)
        if name == "products":
            return Case(name, products, lambda: inputs.leaves, select)
        module = DenseMoE(layer) if name == "dense" else layer
        return inputs.case(name, with_loss(module), layer.parameters(), select)

    return [make(name) for name in names]


class _Product(torch.autograd.Function):
    """``rows @ weight.T`` whose weight gradient has the weight's layout, as the layer's has.

    Autograd's own would come transposed, and each weight would be copied as it is added up.
    """

    @staticmethod
    def forward(ctx, rows, weight):
        ctx.save_for_backward(rows, weight)
        return torch.bmm(rows, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx, d_out):
        rows, weight = ctx.saved_tensors
        return torch.bmm(d_out, weight), torch.bmm(d_out.transpose(1, 2), rows)


def experts_alone(layer: MoELayer, rows, d_rows, inputs: Inputs) -> Case:
    """Loop over the experts with the layer's own weights, on sets of padded rows [e, R, M].

    Rows and weights of every expert are leaves of their own: no gradient is copied into a stack.
    """
    experts = layer.experts
    linear, activation = nn.functional.linear, getattr(nn.functional, experts.activation)
    stacks = (experts.fc1_weight, experts.fc1_bias, experts.fc2_weight, experts.fc2_bias, *rows)
    leaves = [[part.detach().requires_grad_() for part in stack] for stack in stacks]
    inputs.leaves.update(itertools.chain(*leaves))

    def forward(number):
        outputs = []
        parts = zip(*leaves[:4], leaves[4 + number % _INPUTS], strict=True)
        for fc1_weight, fc1_bias, fc2_weight, fc2_bias, part in parts:
            hidden = activation(linear(part, fc1_weight, fc1_bias))
            outputs.append(linear(hidden, fc2_weight, fc2_bias))
        return outputs, list(d_rows[number % _INPUTS])

    return Case("experts", forward, lambda: inputs.leaves)


def why_not_run(name: str, shape: LayerShape, device: torch.device) -> str | None:
    """Return the reason why one of CASES cannot run here, None if it can."""
    if name == "triton" and device.type != "cuda":
        return "Triton kernels need a GPU; the interpreter's speed says nothing"
    if name == "dense" and not shape.capacity_factor:
        return "the dense formulation needs a capacity"
    return masks_have_no_room([shape], device) if name == "dense" else None


def masks_have_no_room(shapes: Sequence[LayerShape], device: torch.device) -> str | None:
    """Return the reason why the masks of layers cannot live at once, None if they can."""
    need, free = sum(shape.mask_bytes for shape in shapes), available_memory(device)
    if need <= free:
        return None
    return f"masks alone need {need / 1e9:.1f} GB (computed), {free / 1e9:.1f} GB are available"
