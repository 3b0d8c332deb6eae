"""The layer at the sizes of real models on a GPU, tuned tiles included; rehearsed small on a CPU.

The reference is torch in fp64; tokens whose choices rounding would decide are not used.
"""

import copy

import pytest
import torch
from test_backends import run_twin

from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import MoELayer

# T, M, F, E, ranks that are simulated
LARGE = {"padded": (5000, 4096, 16384, 512, 512), "dropless": (5000, 4096, 16384, 4, 0)}
SMALL = {"padded": (50, 32, 64, 8, 8), "dropless": (20, 16, 32, 4, 0)}
FACTOR = {"padded": 1.25, "dropless": 0.0}
ON = [
    pytest.param("cpu", "triton", SMALL, marks=pytest.mark.interpreted),
    pytest.param("cuda", "triton", LARGE, marks=pytest.mark.gpu),
]


def clear_tokens(layer, count, dtype, device):
    """[count, M] tokens whose three largest logits are well apart."""
    x = torch.randn(2 * count, layer.model_dim, device=device).to(dtype)
    logits = x.double() @ layer.gate.wg.weight.detach().double().t()
    best = logits.topk(3, dim=1).values
    chosen = x[(best[:, :-1] - best[:, 1:]).amin(dim=1) > 1e-4]
    assert len(chosen) >= count
    return chosen[:count]


def rms_ratio(got, want):
    """Of the error, computed where the tensors are: there are billions of elements."""
    return ((got.detach().double() - want.detach()).norm() / want.detach().norm()).item()


@pytest.mark.parametrize(("device", "name", "sizes"), ON)
@pytest.mark.parametrize("layout", LARGE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_layer_equals_fp64(dtype, layout, device, name, sizes, backend):
    tokens, model_dim, hidden_dim, experts, ranks = sizes[layout]
    torch.manual_seed(1)
    groups = build_groups(experts, simulate_world_size=ranks)
    with torch.device(device):
        layer = MoELayer(model_dim, experts, hidden_dim, capacity_factor=FACTOR[layout], seed=1,
                         groups=groups)  # fmt: skip
    layer = layer.to(dtype)
    exact = copy.deepcopy(layer).double()
    x = clear_tokens(layer, tokens, dtype, device)
    target = torch.randn_like(x)
    backend(name)
    y, aux, grads = run_twin(layer, x, target)
    backend("torch")
    want, want_aux, want_grads = run_twin(exact, x.double(), target)
    assert torch.equal(aux.load_E, want_aux.load_E) and aux.load_E.sum() == 2 * tokens
    unit = torch.finfo(dtype).eps
    assert y.dtype == dtype and rms_ratio(y, want) < 2 * unit
    for key, grad in grads.items():
        assert grad.dtype == dtype and rms_ratio(grad, want_grads[key]) < 4 * unit, key
