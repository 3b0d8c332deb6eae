"""The cases of bench_layer.py: this layer, the dense formulation, experts and products alone."""

import itertools
import math
from collections.abc import Callable

import torch
from dense_reference import DenseMoE, gating, masks_have_no_room
from harness import Case
from shapes import DTYPES, LayerShape
from torch import Tensor, nn

from fairseq_tutel import ops
from fairseq_tutel.distributed import ExpertParallelGroups
from fairseq_tutel.moe import MoELayer

BACKENDS = ("triton", "torch")
FLOORS = ("experts", "products")
ABOUT = {
    "triton": "this layer, Triton backend",
    "torch": "this layer, torch backend",
    "dense": "dense S x E x C formulation (GShard)",
    "experts": "experts alone: two F.linear and an activation for each",
    "products": "experts' products alone (the floor)",
}
META_FRACTION = 0.25  # rows of an expert over tokens: Meta's default for evaluation
_INPUTS = 3  # input sets that take turns; each rank draws its own
_LOSS_GRAD = 0.01
# largest RMS error ratio between the formulations: summation order, and rounding to the dtype
AGREEMENT = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}


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


class LayerInputs:
    """One layer and the random tensors that all cases of a benchmark share."""

    def __init__(
        self, shape: LayerShape, groups: ExpertParallelGroups, device: torch.device, seed: int
    ):
        torch.manual_seed(seed)
        dtype = DTYPES[shape.dtype]
        self.shape, self.device = shape, device
        self.layer = make_layer(shape, device, seed, groups=groups).to(dtype).train()
        generator = torch.Generator(device=device).manual_seed(seed + 1 + groups.rank)

        def draw(*size: int) -> list[Tensor]:
            options = {"device": device, "dtype": dtype, "generator": generator}
            return [torch.randn(size, **options) for _ in range(_INPUTS)]

        tokens = (shape.tokens, shape.model_dim)
        self.x = [x.requires_grad_() for x in draw(*tokens)]
        self.dy = draw(*tokens)
        rows = (groups.num_local_experts, groups.ep_size * shape.capacity, shape.model_dim)
        self.rows = [x.requires_grad_() for x in draw(*rows)]
        self.d_rows = draw(*rows)
        self.loss_grad = torch.tensor(_LOSS_GRAD, device=device)

    def leaves(self) -> list[Tensor]:
        """Everything that gets a gradient."""
        return [*self.layer.parameters(), *self.x, *self.rows]


def make_layer(shape: LayerShape, device: torch.device, seed: int = 1, **options) -> MoELayer:
    """Build this layer, drawing its weights on the device."""
    sizes = (shape.model_dim, shape.experts, shape.hidden_dim)
    how = {"top_k": shape.top_k, "capacity_factor": shape.capacity_factor, "seed": seed}
    with device:
        return MoELayer(*sizes, **how, **options).to(device)


def make_case(name: str, inputs: LayerInputs, backend: str) -> Case:
    """Build one of ABOUT; ``backend`` is that of the operators outside the layer's own cases."""
    layer = inputs.layer

    def on_tokens(module):
        def forward(number):
            y, aux = module(inputs.x[number % _INPUTS], return_aux=True)
            loss_grad = inputs.loss_grad.to(aux.loss.dtype)
            return (y, aux.loss), (inputs.dy[number % _INPUTS], loss_grad)

        return forward

    def products(number):
        hidden = _Product.apply(inputs.rows[number % _INPUTS], layer.experts.fc1_weight)
        out = _Product.apply(hidden, layer.experts.fc2_weight)
        return (out,), (inputs.d_rows[number % _INPUTS],)

    if name == "experts":
        return experts_alone(inputs)
    if name in BACKENDS:
        forward, backend = on_tokens(layer), name
    else:
        forward = on_tokens(DenseMoE(layer)) if name == "dense" else products
    return Case(name, forward, inputs.leaves, lambda: ops.set_backend(backend))


def experts_alone(inputs: LayerInputs) -> Case:
    """Loop over the experts with the layer's own weights and padded rows.

    Rows and weights of every expert are leaves of their own: no gradient is copied into a stack.
    """
    experts = inputs.layer.experts

    def own_leaves(stacked):
        return [part.detach().requires_grad_() for part in stacked]

    stacks = (experts.fc1_weight, experts.fc1_bias, experts.fc2_weight, experts.fc2_bias)
    weights = list(zip(*map(own_leaves, stacks), strict=True))
    rows = [own_leaves(rows) for rows in inputs.rows]
    activation = getattr(nn.functional, experts.activation)

    def one_expert(part, fc1_weight, fc1_bias, fc2_weight, fc2_bias):
        hidden = activation(nn.functional.linear(part, fc1_weight, fc1_bias))
        return nn.functional.linear(hidden, fc2_weight, fc2_bias)

    def forward(number):
        parts = zip(rows[number % _INPUTS], weights, strict=True)
        outputs = [one_expert(part, *weight) for part, weight in parts]
        return outputs, list(inputs.d_rows[number % _INPUTS])

    return Case("experts", forward, lambda: itertools.chain(inputs.leaves(), *rows, *weights))


def why_not_run(name: str, shape: LayerShape, device: torch.device) -> str | None:
    """Return the reason why a case cannot run here, None if it can."""
    if name == "triton" and device.type != "cuda":
        return "Triton kernels need a GPU; the interpreter's speed says nothing"
    if name == "dense" and not shape.capacity_factor:
        return "the dense formulation needs a capacity"
    return masks_have_no_room([shape], device) if name == "dense" else None


# Layers in evaluation: [T, M] -> [T, M].
EVALUATED = {
    "layer": "this layer: nothing is dropped, no row is padded",
    "int8": "this layer, experts in int8",
    "dense": "dense S x E x C formulation (GShard), 0.25 T rows per expert",
    "meta": "Meta's layer at its default evaluation capacity, 0.25 T",
    "tutel": "Tutel's layer, capacity 0: as many rows as the fullest expert needs",
    "flop-matched": "a dense network of as many operations per token",
}


def dense_at_fraction(layer: MoELayer, fraction: float) -> Callable[[Tensor], Tensor]:
    """The dense formulation with a fixed share of the tokens for every expert."""
    dense = DenseMoE(layer)

    def run(x_TM):
        capacity = math.ceil(fraction * len(x_TM))
        combine_TEC, _, _ = gating(layer.gate.logits(x_TM), layer.config.top_k, capacity)
        return dense.products(x_TM, combine_TEC.to(x_TM.dtype), combine_TEC.bool())

    return run
