"""Tools that change, hook or take apart a model by its modules or names."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from fairseq_tutel.moe import MoELayer

M, TOKENS = 16, 24
# linear layer -> the layer's router; a module that holds it
LINEAR = {
    "shared_expert.fc1": "linear", "shared_expert.fc2": "linear", "shared_expert.gate": "linear",
    "gate.wg": "linear", "gate.proj": "cosine",
}  # fmt: skip


def make(router="linear", **options):
    """Return a layer whose output is continuous in its logits: all experts are chosen."""
    options = {"shared_expert_dim": 12, "shared_expert_gate": True, "router": router, **options}
    if router == "cosine":
        options["router_options"] = {"bias": True}
    torch.manual_seed(0)
    return MoELayer(M, 2, 24, top_k=2, capacity_factor=0.0, seed=1, **options)


def put(layer, path, module):
    parent, _, leaf = path.rpartition(".")
    setattr(layer.get_submodule(parent), leaf, module)


class Adapted(nn.Module):
    """What an adapter library puts in the place of a linear layer; without a weight of its own."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, 4, bias=False)
        self.b = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


# Each tool changes a linear layer. It returns the module in its place, the weight that is then in
# effect, and the factor of the bias.


def adapter(linear):
    adapted = Adapted(linear)
    return adapted, linear.weight + adapted.b.weight @ adapted.a.weight, 1


def changed(change, weight=1, bias=1):
    def tool(linear):
        change(linear)
        return linear, weight * linear.weight, bias

    return tool


TOOLS = {
    "adapter": adapter,
    "forward hook": changed(
        lambda linear: linear.register_forward_hook(lambda module, given, y: 2 * y), 2, 2
    ),
    "forward pre-hook": changed(
        lambda linear: linear.register_forward_pre_hook(lambda module, x: (2 * x[0],)), 2
    ),
    "parametrization": changed(
        lambda linear: parametrize.register_parametrization(linear, "weight", Double())
    ),
    "pruning": changed(lambda linear: prune.l1_unstructured(linear, "weight", 0.5)),
    "compiled": lambda linear: (torch.compile(linear, backend="eager"), linear.weight, 1),
}


def apply(tool, layer, path):
    changed, *found = tool(layer.get_submodule(path))
    put(layer, path, changed)
    return found


def outcome(layer, x):
    """Return the output and the tokens' gradient."""
    x = x.detach().requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("path", LINEAR)
@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_a_changed_linear_layer_is_as_one_with_its_weights(tool, path):
    layer, x = make(LINEAR[path]), torch.randn(TOKENS, M)
    plain = copy.deepcopy(layer)
    weight, factor = apply(tool, layer, path)
    with torch.no_grad():
        linear = plain.get_submodule(path)
        linear.weight.copy_(weight)
        if linear.bias is not None:
            linear.bias.mul_(factor)
    torch.testing.assert_close(outcome(layer, x), outcome(plain, x), rtol=1e-4, atol=1e-5)
    for name, param in layer.named_parameters():
        assert param.grad is not None and param.grad.any(), name


@pytest.mark.parametrize("path", LINEAR)
@pytest.mark.parametrize("mode", ["autocast", "half layer", "half tokens"])
def test_an_adapter_of_another_dtype(mode, path):
    layer, x = make(LINEAR[path]), torch.randn(TOKENS, M)
    apply(adapter, layer, path)
    want, d_x = outcome(layer, x)
    layer = layer.bfloat16() if mode == "half layer" else layer
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        y, d = outcome(layer, x if mode == "autocast" else x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), want, rtol=0.05, atol=0.05)
    torch.testing.assert_close(d.float(), d_x, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("path", ["gate.wg", "gate.proj"])
def test_logits_stay_exact_if_a_hook_looks_on(path):
    layer = make(LINEAR[path]).bfloat16()
    x, seen = torch.randn(TOKENS, M).bfloat16(), []
    want = layer.gate.logits(x)
    layer.get_submodule(path).register_forward_hook(lambda *call: seen.append(call[2]))
    torch.testing.assert_close(layer.gate.logits(x), want, rtol=1e-5, atol=1e-6)
    assert want.dtype == seen[0].dtype == torch.float32


@pytest.mark.parametrize("path", LINEAR)
def test_backward_hooks_get_the_gradient_of_the_output(path):
    layer, inputs, gradients = make(LINEAR[path]), [], []
    linear = layer.get_submodule(path)
    linear.register_forward_pre_hook(lambda module, given: inputs.append(given[0].detach()))
    linear.register_full_backward_hook(lambda module, d_in, d_out: gradients.append(d_out[0]))
    outcome(layer, torch.randn(TOKENS, M))
    torch.testing.assert_close(gradients[0].t() @ inputs[0], linear.weight.grad)


@pytest.mark.parametrize("router", ["linear", "cosine"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_dynamic_quantization_leaves_experts_and_quantizes_the_rest(router):
    layer, x = make(router).eval().requires_grad_(False), torch.randn(TOKENS, M)
    quantized = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear})
    assert not any(isinstance(module, nn.Linear) for module in quantized.modules())
    torch.testing.assert_close(quantized.experts.state_dict(), layer.experts.state_dict())
    torch.testing.assert_close(quantized(x), layer(x), rtol=0.1, atol=0.02)


@pytest.mark.parametrize("memory", ["fast", "lean", "minimal"])
@pytest.mark.parametrize("path", ["", "experts", "shared_expert"])
def test_whole_parts_call_their_hooks(path, memory):
    layer, x, seen = make(activation_memory=memory), torch.randn(TOKENS, M), []
    want = outcome(layer, x)
    part = layer.get_submodule(path)
    part.register_forward_pre_hook(lambda *call: seen.append("pre"))
    part.register_forward_hook(lambda *call: seen.append("forward"))
    part.register_full_backward_hook(lambda *call: seen.append("backward"))
    torch.testing.assert_close(outcome(layer, x), want)
    assert seen == ["pre", "forward", "backward"]


@pytest.mark.parametrize("path", ["experts", "gate", "shared_expert"])
def test_whole_parts_can_be_compiled(path):
    layer, x = make(), torch.randn(TOKENS, M)
    want = outcome(layer, x)
    put(layer, path, torch.compile(layer.get_submodule(path), backend="eager"))
    torch.testing.assert_close(outcome(layer, x), want)


@pytest.mark.extras
@pytest.mark.parametrize("router", ["linear", "cosine"])
def test_peft_trains_each_linear_layer_and_merges(router):
    peft = pytest.importorskip("peft")
    config = {"target_modules": "all-linear", "init_lora_weights": False}
    model, x = nn.Sequential(nn.Linear(M, M), make(router)), torch.randn(TOKENS, M)
    names = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    adapted = peft.get_peft_model(model, peft.LoraConfig(**config))
    want = outcome(adapted, x)
    trained = {name: param for name, param in adapted.named_parameters() if param.requires_grad}
    assert len(trained) == 2 * len(names) and all(p.grad.any() for p in trained.values())
    merged = adapted.merge_and_unload().requires_grad_()
    torch.testing.assert_close(outcome(merged, x), want, rtol=1e-4, atol=1e-5)


def model_and_tokens():
    model = nn.Sequential(nn.Linear(M, M), make()).eval().requires_grad_(False)
    return model, torch.randn(TOKENS, M)


def test_a_functional_call_takes_parameters_and_refuses_a_state_dict():
    model, x = model_and_tokens()
    other = {name: value * 0.5 for name, value in model.named_parameters()}
    got = torch.func.functional_call(model, other, (x,))
    with pytest.raises(TypeError, match=r"experts\.0: parts of stacked.*named_parameters"):
        torch.func.functional_call(model, model.state_dict(), (x,))
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    torch.testing.assert_close(got, model(x))


@pytest.mark.extras
@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "dispatch_model"])
def test_offload_works_by_whole_layers_alone(how, tmp_path):
    accelerate, (model, x) = pytest.importorskip("accelerate"), model_and_tokens()
    where = {
        "cpu_offload": (torch.device("cpu"),),
        "disk_offload": (str(tmp_path), torch.device("cpu")),
        "dispatch_model": ({"0": "cpu", "1": "disk"}, None, None, str(tmp_path)),
    }
    whole = {"state_dict": dict(model.named_parameters()), "preload_module_classes": ["MoELayer"]}
    if how == "cpu_offload":
        other = accelerate.cpu_offload(copy.deepcopy(model), *where[how], **whole)
        assert other[1].experts.fc1_weight.is_meta and torch.equal(other(x), model(x))
    offloaded = getattr(accelerate, how)(model, *where[how])
    with pytest.raises(ValueError, match=r"preload_module_classes=\['MoELayer'\]"):
        offloaded(x)


@pytest.mark.extras
def test_loading_by_single_names_is_refused(tmp_path):
    accelerate, (model, _) = pytest.importorskip("accelerate"), model_and_tokens()
    file = str(tmp_path / "model.bin")
    torch.save(model.state_dict(), file)
    accelerate.load_checkpoint_in_model(model, file)  # goes through load_state_dict
    with pytest.raises(AttributeError, match=r"experts\.0\.fc1: parts of.*load_state_dict"):
        accelerate.load_checkpoint_in_model(model, file, device_map={"": "cpu"})
