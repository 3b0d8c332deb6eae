"""The cases of the layer benchmark: dense formulation, this layer, experts and products alone."""

import itertools
from collections.abc import Sequence

import torch
from dense_reference import DenseMoE, memory_need
from measure import Case
from presets import DTYPES, LAYER_BACKENDS, LayerShape
from torch import Tensor, nn

from fairseq_tutel import ops
from fairseq_tutel.distributed import ExpertParallelGroups
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.moe.memory import free_memory as available_memory

FLOORS = ("experts", "products")
CASES = ("dense", *LAYER_BACKENDS, *FLOORS)
ABOUT = {
    "dense": "dense S x E x C formulation (GShard)",
    "triton": "this layer, Triton backend",
    "torch": "this layer, torch backend",
    "experts": "experts alone: two F.linear and an activation for each",
    "products": "experts' products alone (the floor)",
}
# Input sets that take turns; each rank draws its own.
_INPUTS = 3
_LOSS_GRAD = 0.01
# Largest RMS error ratio between the formulations: summation order, and rounding to the dtype.
_AGREEMENT = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}


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
    """One layer and the tensors that all cases of a benchmark share.

    All of them are random numbers, not zeros, which some units multiply faster.
    """

    def __init__(
        self, shape: LayerShape, groups: ExpertParallelGroups, device: torch.device, seed: int
    ):
        torch.manual_seed(seed)
        dtype = DTYPES[shape.dtype]
        self.shape, self.device = shape, device
        sizes = (shape.model_dim, shape.experts, shape.hidden_dim)
        how = {"top_k": shape.top_k, "capacity_factor": shape.capacity_factor}
        with device:  # also the weights of a simulated rank are drawn there
            layer = MoELayer(*sizes, groups=groups, seed=seed, **how)
        self.layer = layer.to(device, dtype).train()
        generator = torch.Generator(device=device).manual_seed(seed + 1 + groups.rank)

        def draw(*size: int) -> list[Tensor]:
            options = {"device": device, "dtype": dtype, "generator": generator}
            return [torch.randn(size, **options) for _ in range(_INPUTS)]

        tokens = (shape.tokens, shape.model_dim)
        self.x = [x.requires_grad_() for x in draw(*tokens)]
        self.dy = draw(*tokens)
        local = groups.num_local_experts
        rows = (local, groups.ep_size * shape.capacity, shape.model_dim)
        self.rows = [x.requires_grad_() for x in draw(*rows)]
        self.d_rows = draw(*rows)
        self.loss_grad = torch.tensor(_LOSS_GRAD, device=device)

    def leaves(self) -> list[Tensor]:
        """Everything that gets a gradient."""
        return [*self.layer.parameters(), *self.x, *self.rows]


def make_case(name: str, inputs: LayerInputs, backend: str) -> Case:
    """One of CASES.

    Args:
        backend: of the operators outside the layer's own cases (``triton`` or ``torch``).
    """
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

    if name in LAYER_BACKENDS:
        forward, backend = on_tokens(layer), name
    elif name == "dense":
        forward = on_tokens(DenseMoE(layer))
    elif name == "experts":
        return experts_alone(inputs)
    else:
        forward = products
    return Case(name, forward, inputs.leaves, lambda: ops.set_backend(backend))


def experts_alone(inputs: LayerInputs) -> Case:
    """The baseline: a loop over the experts, with the layer's own weights and padded rows.

    Rows and weights of every expert are leaves of their own: no gradient is copied into a stack.
    """
    experts = inputs.layer.experts
    parameters = (experts.fc1_weight, experts.fc1_bias, experts.fc2_weight, experts.fc2_bias)
    weights = list(zip(*(_own_leaves(param) for param in parameters), strict=True))
    rows = [_own_leaves(rows) for rows in inputs.rows]
    activation = getattr(nn.functional, experts.activation)

    def forward(number):
        parts = zip(rows[number % _INPUTS], weights, strict=True)
        outputs = [one_expert(part, *weight) for part, weight in parts]
        return outputs, list(inputs.d_rows[number % _INPUTS])

    def one_expert(part, fc1_weight, fc1_bias, fc2_weight, fc2_bias):
        hidden = activation(nn.functional.linear(part, fc1_weight, fc1_bias))
        return nn.functional.linear(hidden, fc2_weight, fc2_bias)

    def leaves():
        return itertools.chain(inputs.leaves(), *rows, *weights)

    return Case("experts", forward, leaves)


def _own_leaves(stacked: Tensor) -> list[Tensor]:
    return [part.detach().requires_grad_() for part in stacked]


def why_not_run(name: str, shape: LayerShape, device: torch.device) -> str | None:
    """Reason why a case cannot run here, None where it can."""
    if name == "triton" and device.type != "cuda":
        return "Triton kernels need a GPU; the interpreter's speed says nothing"
    if name == "dense":
        size = torch.empty(0, dtype=DTYPES[shape.dtype]).element_size()
        need = memory_need(shape.tokens, shape.experts, shape.capacity, size)
        free = available_memory(device)
        if need > free:
            needs = f"its masks alone need {need / 1e9:.1f} GB (computed)"
            return f"{needs}, {free / 1e9:.1f} GB are available"
    return None


def check_agreement(cases: Sequence[Case], inputs: LayerInputs) -> dict[str, float]:
    """Compare output and input gradient of all cases that compute the layer with the first one's.

    Returns:
        case -> larger RMS error ratio of the two.

    Raises:
        RuntimeError: they do not compute the same.
    """
    reference, ratios = None, {}
    for case in cases:
        if case.name in FLOORS:
            continue
        case.begin()
        outputs, grads = case.forward(0)
        torch.autograd.backward(outputs, grads)
        got = (outputs[0].detach().double(), inputs.x[0].grad.double())
        case.begin()
        if reference is None:
            reference = got
            continue
        ratios[case.name] = max(
            ((a - b).square().mean() / b.square().mean()).sqrt().item()
            for a, b in zip(got, reference, strict=True)
        )
        limit = _AGREEMENT[inputs.shape.dtype]
        if not ratios[case.name] <= limit:  # NaN fails, too
            raise RuntimeError(
                f"{case.name} does not compute what {cases[0].name} does: RMS error ratio "
                f"{ratios[case.name]:.3g}, at most {limit:g} expected"
            )
    return ratios
