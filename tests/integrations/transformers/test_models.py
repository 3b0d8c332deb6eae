"""All models of transformers with routed experts: their logits, training on ranks, and files."""

import models_page
import pytest
import tiny_models
import torch
from helpers.distributed import run_ranks
from torch.nn import functional

from fairseq_tutel import training
from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import build_groups, process_world
from fairseq_tutel.integrations.transformers import (
    interface,
    original_state_dict,
    replace_moe,
    restore_moe,
)

pytestmark = pytest.mark.extras


def train(net, ids):
    trained = [param for param in net.parameters() if param.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, 1e-3), []
    for _ in range(5):
        optimizer.zero_grad()
        out = net(ids)[0].float()
        loss = functional.cross_entropy(out.flatten(0, 1), ids.flatten() % out.shape[-1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def difference(got, want):
    """Largest difference in units of 1 + the values."""
    return ((got - want).abs() / (1 + want.abs())).max().item()


def one_model(name, folder, r=None, **options):
    """Losses, and differences of logits after replacement, restoration, and saving and loading.

    ``r``: of experts in slices.
    """
    rank, world_size = process_world()
    model = tiny_models.make(name, **options)
    ids = tiny_models.tokens().chunk(world_size)[rank]
    sliced = {} if r is None else {
        "groups": build_groups(2, placement="sliced"), "exchange": ExchangeConfig(r=r)
    }  # fmt: skip
    with torch.no_grad():
        before = model(ids)[0]
        blocks = replace_moe(model, **sliced)
        found = [difference(model(ids)[0], before)]
    # some models have parameters without a gradient: indexers of sparse attention
    net = training.wrap_data_parallel(model, find_unused_parameters=True)
    losses = train(net, ids)
    state = original_state_dict(model, blocks)
    if rank == 0:
        model.save_pretrained(f"{folder}/{name}", state_dict=state)
    with torch.no_grad():
        trained = model(ids)[0]
        restore_moe(model, blocks)
        found.append(difference(model(ids)[0], trained))
        if rank == 0:
            again = type(model).from_pretrained(f"{folder}/{name}").eval()
            found.append(difference(again(ids)[0], trained))
    return losses, found


def on_ranks(names, folder):
    return {name: one_model(name, folder) for name in names}


def check(results, model):
    losses, differences = zip(*results, strict=True)
    assert max(map(max, differences)) < models_page.LOGITS
    alone = train(model, tiny_models.tokens())
    means = [sum(step) / len(step) for step in zip(*losses, strict=True)]
    assert means == pytest.approx(alone, rel=2e-4) and alone[-1] < alone[0]


SAME = [name for name in tiny_models.folders() if tiny_models.refused(name) is None]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_ranks(on_ranks, 2, SAME, str(tmp_path_factory.mktemp("models")), timeout=240)


@pytest.mark.parametrize("name", SAME)
def test_two_ranks_train_as_the_original_in_one_process(name, results):
    check([rank[name] for rank in results], tiny_models.make(name))


def on_slices(folder):
    return one_model("olmoe", folder, 0, num_experts=2, tie_word_embeddings=True)


def test_four_ranks_with_slices_of_two_experts_do_so_too(tmp_path):
    results = run_ranks(on_slices, 4, str(tmp_path), timeout=150)
    check(results, tiny_models.make("olmoe", num_experts=2, tie_word_embeddings=True))


def test_a_correction_bias_goes_on_by_sign_and_back_to_the_model():
    frozen, model = (tiny_models.make("deepseek_v3").train() for _ in range(2))
    replace_moe(frozen)
    with pytest.raises(ValueError, match="load_bias='frozen' does not move"):
        frozen.model.layers[1].mlp.gate.update_load_bias(torch.ones(8))
    router = model.model.layers[1].mlp.gate
    before = router.e_score_correction_bias.clone()
    blocks = replace_moe(model, load_bias="sign", load_bias_rate=0.5)
    layer = model.model.layers[1].mlp
    with training.collect_aux(model) as aux:
        model(tiny_models.tokens())
    assert torch.equal(layer.gate.load_bias, before)
    training.update_load_bias(model, [aux])
    load = aux.by_name["model.layers.1.mlp"].load_E.double()
    want = before + 0.5 * (load.mean() - load).sign()
    want = (want - want.mean()).float()
    with torch.no_grad():
        trained = model(tiny_models.tokens())[0]
        state = original_state_dict(model, blocks)
        restore_moe(model, blocks)
        for found in (
            router.e_score_correction_bias,
            state["model.layers.1.mlp.gate.e_score_correction_bias"],
        ):
            torch.testing.assert_close(found, want)
        assert difference(model(tiny_models.tokens())[0], trained) < 1e-5


def test_the_page_lists_all_folders_with_their_verdicts():
    found = models_page.table()
    assert found == models_page.on_page()
    assert "DIFFERENT" not in found
    assert len(models_page.folders_on_page("block") + models_page.folders_on_page("experts")) >= 55


# this package behind transformers' experts interface
WITH_INTERFACE = list(filter(models_page.has_interface, tiny_models.folders()))
WITH_INTERFACE.remove("ernie4_5_vl_moe")  # a block of images and text calls its experts


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


def check_interface(model, calls, adapted=None):
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


@pytest.mark.parametrize("folder", WITH_INTERFACE)
def test_logits_and_gradients_are_those_of_the_loop_over_experts(folder, calls):
    check_interface(tiny_models.make(folder), calls)


@pytest.mark.parametrize("names", [["down_proj"], ["gate_up_proj", "down_proj"]])
@pytest.mark.parametrize("folder", ["mixtral", "gpt_oss"])
def test_adapters_of_peft_on_the_experts(folder, names, calls):
    peft = pytest.importorskip("peft")
    model = tiny_models.make(folder)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], init_lora_weights=False,
        target_parameters=[f"experts.{name}" for name in names],
    )  # fmt: skip
    grads = check_interface(model, calls, peft.get_peft_model(model, config))
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
