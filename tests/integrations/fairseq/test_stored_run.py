"""A run of commit 204ed4b is read, evaluated and resumed: config, checkpoints, log, exchanges.

``data_204ed4b`` holds what two ranks of ``fairseq-hydra-train`` left with ``run.yaml``.
``expected.json`` is what :func:`_resumed` and :func:`_evaluated` returned at that commit.
"""

import json
import tarfile
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils, tasks
from helpers.distributed import run_ranks
from helpers.training import make_batch, make_trainer, own_batches, record_updates

from fairseq_tutel.checkpoint import load_for_rank, reshard, save_set
from fairseq_tutel.checkpoint.state import with_options
from fairseq_tutel.plan.compose import load_config
from fairseq_tutel.plan.parameters import count_parameters
from fairseq_tutel.plan.settings import read_settings
from fairseq_tutel.plan.stored import operations_per_token
from fairseq_tutel.plan.work import count_traffic, count_work

DATA = Path(__file__).parent / "data_204ed4b"


@pytest.fixture
def checkpoint(tmp_path):
    with tarfile.open(DATA / "set.tar.xz") as files:
        files.extractall(tmp_path, filter="data")
    return str(tmp_path / "checkpoint_last.pt")


def _resumed(path):
    """The layer's options; the loss sums of three more updates."""
    choices = f"+model.moe_tune_file={DATA / 'exchange.json'}"
    trainer = make_trainer(load_config(DATA, "run", [choices]))
    trainer.load_checkpoint(path)
    updates = record_updates(trainer)
    for number in range(3):
        trainer.train_step(own_batches(number, 2))
    (layer,) = trainer.get_model().moe_layers.values()
    about = [layer.config.router, layer.config.load_bias, layer.exchange_config.algorithm]
    about += [layer.exchange_config.wire, type(layer.experts).__name__, layer.experts.hidden_dim]
    return about, trainer.get_num_updates(), [update.sums["inner_loss"] for update in updates]


def _evaluated(path):
    task = tasks.setup_task(load_config(DATA, "run", []).task)
    (model,), _ = checkpoint_utils.load_model_ensemble([path], task=task)
    batch = make_batch(1)
    with torch.no_grad():
        logits = model.eval()(batch["net_input"]["src_tokens"])[0]
    return logits.log_softmax(-1).gather(-1, batch["target"][..., None]).mean().item()


def _expected():
    return json.loads((DATA / "expected.json").read_text())


def test_a_set_and_its_config_resume_with_the_same_options(checkpoint):
    about, update, losses = run_ranks(_resumed, 2, checkpoint)[0]
    assert about == ["cosine", "quantile", "2dh", "fp16", "SwiGLUExperts", 6] and update == 43
    assert losses == pytest.approx(_expected()["losses"], rel=1e-4)


def test_a_set_is_evaluated_with_its_own_options(checkpoint, tmp_path):
    """Also one that has options which are gone."""
    gone = {"moe_update_in_backward": True, "moe_activation_memory": "lean"}
    gone |= {"moe_activation_storage": "bf16"}
    state = load_for_rank(checkpoint, rank=0, world_size=1)
    later = str(tmp_path / "later.pt")
    save_set(later, with_options(state, gone), num_rank_files=1)
    for path in (checkpoint, later):
        assert _evaluated(path) == pytest.approx(_expected()["evaluated"], rel=1e-4)


def test_operations_are_counted_from_a_checkpoint(checkpoint, tmp_path):
    """For experts as from the command; for fairseq's own dense model by hand, times 3."""
    settings = read_settings(load_config(DATA, "run", []), "run")
    parameters = count_parameters(settings)
    work = count_work(settings, parameters, count_traffic(settings, parameters))
    assert operations_per_token(checkpoint) == work.model_flops
    resharded = reshard(checkpoint, str(tmp_path / "indexed.pt"), 1)
    assert operations_per_token(resharded) == work.model_flops
    state = load_for_rank(checkpoint, rank=0, world_size=1)
    options = {key: value for key, value in state["cfg"]["model"].items() if "moe" not in key}
    state["cfg"]["model"] = {**options, "_name": "transformer_lm_gpt"}
    torch.save(state, tmp_path / "dense.pt")
    attention, ffn, output = 8 * 8**2 + 4 * 8 * 8, 4 * 8 * 12, 2 * 8 * 32
    forward = 2 * (attention + ffn) + output
    assert operations_per_token(tmp_path / "dense.pt") == 3 * forward
    for name, said in (("none.pt", "no such checkpoint"), ("dense.pt", "cannot count lstm")):
        state["cfg"]["model"]["_name"] = "lstm"
        torch.save(state, tmp_path / "dense.pt")
        with pytest.raises(ValueError, match=said):
            operations_per_token(tmp_path / name)
