"""All models of transformers with routed experts: their logits, training on ranks, and files."""

import models_page
import pytest
import tiny_models
import torch
from helpers.distributed import run_ranks
from torch.nn import functional

from fairseq_tutel import training
from fairseq_tutel.distributed import process_world
from fairseq_tutel.integrations.transformers import original_state_dict, replace_moe, restore_moe

pytestmark = pytest.mark.extras


def loss_of(model, ids):
    out = model(ids)[0].float()
    return functional.cross_entropy(out.flatten(0, 1), ids.flatten() % out.shape[-1])


def train(net, ids):
    trained = [param for param in net.parameters() if param.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, 1e-3), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = loss_of(net, ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_ranks(names, folder):
    return {name: one_model(name, folder) for name in names}


def one_model(name, folder):
    """(difference of logits after replacement, losses, differences of logits after restoration,
    and after saving and loading)"""
    rank, world_size = process_world()
    model = tiny_models.make(name)
    ids = tiny_models.tokens().chunk(world_size)[rank]
    with torch.no_grad():
        before = model(ids)[0]
        blocks = replace_moe(model)
        replaced = difference(model(ids)[0], before)
    # some models have parameters without a gradient: indexers of sparse attention
    net = training.wrap_data_parallel(model, find_unused_parameters=True)
    losses = train(net, ids)
    state = original_state_dict(model, blocks)
    if rank == 0:
        model.save_pretrained(f"{folder}/{name}", state_dict=state)
    with torch.no_grad():
        trained = model(ids)[0]
        restore_moe(model, blocks)
        restored, loaded = difference(model(ids)[0], trained), 0.0
        if rank == 0:
            again = type(model).from_pretrained(f"{folder}/{name}").eval()
            loaded = difference(again(ids)[0], trained)
    return replaced, losses, restored, loaded


def difference(got, want):
    """Largest difference in units of 1 + the values."""
    return ((got - want).abs() / (1 + want.abs())).max().item()


SAME = [name for name in tiny_models.folders() if tiny_models.refused(name) is None]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_ranks(on_ranks, 2, SAME, str(tmp_path_factory.mktemp("models")), timeout=240)


@pytest.mark.parametrize("name", SAME)
def test_two_ranks_train_as_the_original_in_one_process(name, results):
    replaced, losses, restored, loaded = zip(*(rank[name] for rank in results), strict=True)
    assert max(*replaced, *restored, *loaded) < models_page.LOGITS
    model = tiny_models.make(name)
    alone = train(model, tiny_models.tokens())
    means = [sum(step) / 2 for step in zip(*losses, strict=True)]
    assert means == pytest.approx(alone, rel=2e-4)
    assert alone[-1] < alone[0]


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
    assert "DIFFERENT" not in found and "not refused" not in found
    assert len(models_page.folders_on_page("block") + models_page.folders_on_page("experts")) >= 55
