"""``--moe-update-in-backward``: the weights, norms and checkpoints of usual updates."""

import pytest
import torch
from helpers.distributed import run_ranks
from helpers.training import (
    make_batch,
    make_config,
    make_trainer,
    own_batches,
    record_updates,
    save,
)

from fairseq_tutel.distributed import is_expert, process_world

FLAG = "--moe-update-in-backward"
CASES = {
    "all": "--moe-expert-count 4 --moe-normalize-expert-grad sqrt_world_size",
    "replicas": "--moe-expert-count 1 --moe-top-k 1 --checkpoint-activations "
    "--ddp-backend pytorch_ddp",
    "bf16": "--moe-expert-count 4 --memory-efficient-bf16",
}


def _batches(update):
    """Of the last update the second rank has none."""
    rank, world_size = process_world()
    return [{}] if update == 7 and rank else own_batches(update, world_size)


def _train(cfg, updates=8):
    trainer = make_trainer(cfg)
    records = record_updates(trainer)
    for update in range(updates):
        trainer.train_step(_batches(update))
    model = trainer.get_model()
    freed = [p.grad is None for p in model.parameters() if is_expert(p)]
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return weights, [record.grad_norm for record in records], freed


def _both(cfgs):
    return {name: (_train(usual), _train(early)) for name, (usual, early) in cfgs.items()}


def test_weights_and_norms_are_those_of_usual_updates():
    cfgs = {
        name: [make_config("--clip-norm", "0", *words.split(), *more) for more in ((), (FLAG,))]
        for name, words in CASES.items()
    }
    for found in run_ranks(_both, 2, cfgs, timeout=120):
        for name, ((weights, norms, kept), (early, early_norms, freed)) in found.items():
            assert all(freed) and not any(kept)
            near = 2e-2 if name == "bf16" else 1e-5
            assert early_norms == pytest.approx(norms, rel=near), name
            for key, weight in weights.items():
                if not key.endswith("k_proj.bias"):  # rounding is all there is in its gradient
                    tolerance = 2e-2 if name == "bf16" else 1e-6
                    torch.testing.assert_close(
                        early[key], weight, rtol=tolerance, atol=tolerance, msg=f"{name} {key}"
                    )


def test_a_run_resumes_with_and_without_it(tmp_path):
    words = ["--moe-expert-count", "4", "--clip-norm", "0"]
    want = _train(make_config(*words), 4)[0]
    for first, second in (((FLAG,), ()), ((), (FLAG,))):
        cfgs = [make_config(*words, *more) for more in (first, second)]
        for cfg in cfgs:
            cfg.checkpoint.no_save, cfg.checkpoint.save_dir = False, str(tmp_path)
        trainer = make_trainer(cfgs[0])
        for update in range(2):
            trainer.train_step([make_batch(100 * update)])
        save(trainer, tmp_path / "x.pt")
        trainer = make_trainer(cfgs[1])
        trainer.load_checkpoint(str(tmp_path / "x.pt"))
        for update in range(2, 4):
            trainer.train_step([make_batch(100 * update)])
        for name, param in trainer.get_model().named_parameters():
            if not name.endswith("k_proj.bias"):
                torch.testing.assert_close(param, want[name], rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--clip-norm 1.0", "--clip-norm 1.0 needs all: give --clip-norm 0"),
        ("--clip-norm 0 --update-freq 2", "--update-freq 2 adds those of several passes"),
        ("--clip-norm 0 --fp16", "the loss scale of --fp16 may overflow"),
        ("--clip-norm 0 --memory-efficient-fp16", "the loss scale of --fp16 may overflow"),
        ("--clip-norm 0 --bf16", "--bf16 keeps fp32 copies of all"),
        ("--clip-norm 0 --zero-sharding os", "--zero-sharding os steps all together"),
    ],
)
def test_what_needs_all_gradients_is_refused(words, message):
    cfg = make_config("--moe-expert-count", "2", FLAG, *words.split())
    with pytest.raises(ValueError, match=f"--moe-update-in-backward uses .*, and {message}"):
        make_trainer(cfg)


def test_a_gradient_that_is_not_finite_ends_the_run_as_ever(tmp_path):
    cfg = make_config("--moe-expert-count", "2", "--clip-norm", "0", FLAG)
    cfg.checkpoint.save_dir = str(tmp_path)
    trainer = make_trainer(cfg)
    param = trainer.get_model().moe_layers[1].experts.fc1_bias
    param.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(FloatingPointError, match="Nan/Inf"):
        trainer.train_step([make_batch(0)])
