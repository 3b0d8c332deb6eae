"""Tools that take a model apart by its modules or names: torch's, and accelerate's offload."""

import pytest
import torch
from torch import nn

from fairseq_tutel.moe import MoELayer


@pytest.fixture
def model():
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Linear(16, 16), MoELayer(16, 4, 24, seed=1)).eval().requires_grad_(False)
    )


@pytest.fixture
def x():
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(1))


def test_a_functional_call_takes_parameters_and_refuses_a_state_dict(model, x):
    other = {name: value * 0.5 for name, value in model.named_parameters()}
    got = torch.func.functional_call(model, other, (x,))
    with pytest.raises(TypeError, match=r"experts\.0: parts of stacked.*named_parameters"):
        torch.func.functional_call(model, model.state_dict(), (x,))
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    torch.testing.assert_close(got, model(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_dynamic_quantization_leaves_experts_and_quantizes_the_rest(model, x):
    want = model(x)
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    assert not isinstance(quantized[0], nn.Linear) and not isinstance(
        quantized[1].gate.wg, nn.Linear
    )
    torch.testing.assert_close(quantized(x), want, rtol=0.1, atol=0.02)


@pytest.mark.extras
def test_offload_works_by_whole_layers(model, x):
    accelerate = pytest.importorskip("accelerate")
    want = model(x)
    whole = {"state_dict": dict(model.named_parameters()), "preload_module_classes": ["MoELayer"]}
    offloaded = accelerate.cpu_offload(model, torch.device("cpu"), **whole)
    assert offloaded[1].experts.fc1_weight.is_meta
    assert torch.equal(offloaded(x), want)


@pytest.mark.extras
@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "dispatch_model"])
def test_offload_by_modules_is_refused(model, x, how, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    where = {
        "cpu_offload": (torch.device("cpu"),),
        "disk_offload": (str(tmp_path), torch.device("cpu")),
        "dispatch_model": ({"0": "cpu", "1": "disk"}, None, None, str(tmp_path)),
    }
    offloaded = getattr(accelerate, how)(model, *where[how])
    with pytest.raises(ValueError, match=r"preload_module_classes=\['MoELayer'\]"):
        offloaded(x)


@pytest.mark.extras
def test_loading_by_single_names_is_refused(model, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    file = str(tmp_path / "model.bin")
    torch.save(model.state_dict(), file)
    accelerate.load_checkpoint_in_model(model, file)  # goes through load_state_dict
    with pytest.raises(AttributeError, match=r"experts\.0\.fc1: parts of.*load_state_dict"):
        accelerate.load_checkpoint_in_model(model, file, device_map={"": "cpu"})
