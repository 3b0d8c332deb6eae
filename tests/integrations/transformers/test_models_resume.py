"""Two sparse models from two ranks to one: groups with a correction bias, a gated shared expert."""

import pytest
import tiny_models
import torch
from helpers.distributed import run_ranks
from test_models import adamw, difference, train

from fairseq_tutel import training
from fairseq_tutel.distributed import process_world
from fairseq_tutel.integrations.transformers import original_state_dict, replace_moe, restore_moe
from fairseq_tutel.moe.model import moe_layers

pytestmark = pytest.mark.extras

BOTH = ["deepseek_v3", "qwen2_moe"]


def begin_on_ranks(name, file):
    """Three steps with each rank's share of the experts, and a checkpoint."""
    rank, world_size = process_world()
    model = tiny_models.make(name)
    replace_moe(model)
    for layer in moe_layers(model).values():
        assert layer.groups.num_local_experts == 8 // world_size
    optimizer, ids = adamw(model, 3e-3), tiny_models.tokens().chunk(world_size)[rank]
    losses = train(training.wrap_data_parallel(model), optimizer, ids, 3)
    training.save_checkpoint(file, model, optimizer)
    return losses


@pytest.mark.parametrize("name", BOTH)
def test_two_ranks_save_and_one_goes_on_and_generates(name, tmp_path):
    file, ids = str(tmp_path / "run.pt"), tiny_models.tokens()
    original = tiny_models.make(name)
    want = train(original, adamw(original, 3e-3), ids, 5)

    ranks = run_ranks(begin_on_ranks, 2, name, file, timeout=100)
    means = [sum(step) / 2 for step in zip(*ranks, strict=True)]
    assert means == pytest.approx(want[:3], rel=1e-4)

    model = tiny_models.make(name, seed=1)  # other weights, which the checkpoint replaces
    blocks = replace_moe(model)
    optimizer = adamw(model, 3e-3)
    training.load_checkpoint(file, model, optimizer)
    assert train(model, optimizer, ids, 2) == pytest.approx(want[3:], rel=1e-4)

    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": True}
    found = model.generate(ids[:, :4], **options)
    restore_moe(model, blocks)
    assert torch.equal(model.generate(ids[:, :4], **options), found)
    assert found[:, 4:].unique().numel() > 2
    with torch.no_grad():
        assert difference(model(ids)[0], original(ids)[0]) < 1e-3


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
