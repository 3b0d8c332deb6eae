"""This package behind transformers' experts interface: the numbers of all models that have it."""

import models_page
import pytest
import tiny_models
import torch

from fairseq_tutel.integrations.transformers import interface

pytestmark = pytest.mark.extras

# whose experts are called by a block of images and text, or not at all in a text model
WITHOUT_TEXT = {"ernie4_5_vl_moe"}
FOLDERS = [
    name
    for name in tiny_models.folders()
    if models_page.has_interface(name) and name not in WITHOUT_TEXT
]


def outcome(model):
    model.zero_grad()
    out = tiny_models.logits(model)
    # not a norm of the output, which a final norm would make constant
    target = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * target).sum().backward()
    return out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def calls(monkeypatch):
    found = []

    def counted(experts, *args):
        found.append(experts)
        return interface.experts_forward(experts, *args)

    monkeypatch.setitem(interface.ALL_EXPERTS_FUNCTIONS._global_mapping, interface.NAME, counted)
    return found


def check(model, calls, adapted=None):
    """Assert that logits and gradients of the (adapted) model are those of the loop."""
    model.set_experts_implementation("eager")
    want, want_grads = outcome(adapted or model)
    model.set_experts_implementation(interface.NAME)
    got, grads = outcome(adapted or model)
    assert len(calls) > 0
    logits = models_page.LOGITS
    torch.testing.assert_close(got, want, rtol=logits, atol=logits)
    assert grads.keys() == want_grads.keys()
    for name, grad in want_grads.items():
        scale = float(grad.abs().max())
        rtol = 1e-3 if grad.numel() > 1 else 1e-2  # terms of the gradient of one number cancel
        torch.testing.assert_close(grads[name], grad, rtol=rtol, atol=1e-4 * scale + 1e-7, msg=name)
    return grads


@pytest.mark.parametrize("folder", FOLDERS)
def test_logits_and_gradients_are_those_of_the_loop_over_experts(folder, calls):
    check(tiny_models.make(folder), calls)


@pytest.mark.parametrize("names", [["gate_up_proj"], ["down_proj"], ["gate_up_proj", "down_proj"]])
@pytest.mark.parametrize("folder", ["mixtral", "gpt_oss"])
def test_adapters_of_peft_on_the_experts(folder, names, calls):
    peft = pytest.importorskip("peft")
    model = tiny_models.make(folder)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], init_lora_weights=False,
        target_parameters=[f"experts.{name}" for name in names],
    )  # fmt: skip
    grads = check(model, calls, peft.get_peft_model(model, config))
    # two factors of each matrix, and of q_proj, in each layer
    assert len(grads) == 2 * (1 + len(names)) * len(model.model.layers)


def test_one_argument_of_from_pretrained(tmp_path, calls):
    model = tiny_models.make("qwen3_moe")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, experts_implementation=interface.NAME).eval()
    with torch.no_grad():
        torch.testing.assert_close(tiny_models.logits(loaded), tiny_models.logits(model))
    assert len(calls) == 3


def test_numbers_beyond_the_experts_are_no_expert():
    experts = tiny_models.make("qwen3_moe").model.layers[0].mlp.experts
    x, index = torch.randn(3, 32), torch.tensor([[1, 8], [8, 8], [2, 3]])
    weights = torch.rand(3, 2)
    want = experts(x, index.clamp(max=7), weights.masked_fill(index > 7, 0))
    got = interface.experts_forward(experts, x, index, weights)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
