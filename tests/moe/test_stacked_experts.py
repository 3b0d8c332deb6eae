"""Stacked experts: state dicts, and work on their outputs. Numbers: test_product.py."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from fairseq_tutel.moe import MoELayer
from fairseq_tutel.training import add_lora


def make(seed=0):
    torch.manual_seed(seed)
    layer = MoELayer(8, 4, 16, top_k=2, capacity_factor=0, seed=seed)
    return nn.Sequential(nn.Linear(8, 8), layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_assigning_to_a_model_on_the_meta_device(dtype):
    reference = make().to(dtype)
    reference[1].experts.fc2_bias.requires_grad_(False)
    with torch.device("meta"):
        model = make(1)
    model[1].experts.fc2_bias.requires_grad_(False)
    model.load_state_dict(reference.state_dict(), assign=True)
    assert {param.dtype for param in model.parameters()} == {dtype}
    flags = [param.requires_grad for param in model.parameters()]
    assert flags == [param.requires_grad for param in reference.parameters()]
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.testing.assert_close(model(x), reference(x))
    assert model[1].experts.fc1_weight.expert == reference[1].experts.fc1_weight.expert
    with torch.device("meta"), pytest.warns(UserWarning, match="assign=True"):
        make(1)[1].load_state_dict(reference[1].state_dict())


def test_weights_that_are_computed_from_others_are_refused():
    layer, x = make()[1], torch.ones(3, 8)
    prune.l1_unstructured(layer.experts, "fc1_weight", 0.5)
    other = make()[1]
    parametrize.register_parametrization(other.experts, "fc1_weight", nn.Tanh())
    calls = lambda: layer(x), lambda: other(x), lambda: layer.load_state_dict({})  # noqa: E731
    adapted = make()[1]
    add_lora(adapted, 2)
    prune.l1_unstructured(adapted.experts, "fc2_lora_A", 0.5)
    for use in (layer.state_dict, *calls, lambda: adapted(x)):
        with pytest.raises(ValueError, match="(1_weight|2_lora_A) is no parameter any more"):
            use()


def test_work_in_place_on_the_output_of_experts():
    layer, x = make()[1], torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    once = layer(x)
    layer.experts.register_forward_hook(lambda module, args, y: y.mul_(2))
    torch.testing.assert_close(layer(x), 2 * once)
    layer(x).sum().backward()
