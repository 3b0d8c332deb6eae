"""``--moe-lora-rank``: only updates of experts train, the merged set. Ranks: test_equivalence."""

import copy

import pytest
import torch
from helpers.training import make_batch, make_config, make_trainer, record_updates, save

from fairseq_tutel.checkpoint import CheckpointError
from fairseq_tutel.checkpoint.__main__ import main
from fairseq_tutel.checkpoint.lora import merge_lora
from fairseq_tutel.export.errors import ExportError
from fairseq_tutel.export.source import ModelSource

LORA = ("--moe-lora-rank", "2", "--moe-lora-alpha", "4")
ALL = ("--moe-expert-count", "4", "--clip-norm", "0.02")


def start(path, *options):
    """Return a trainer whose experts start from a set without LoRA."""
    trainer = make_trainer(make_config(*ALL, *LORA, *options))
    trainer.load_checkpoint(path, reset_optimizer=True, reset_lr_scheduler=True)
    return trainer


def parameters(trainer):
    return {n: p.detach().clone() for n, p in trainer.get_model().named_parameters()}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    trainer = make_trainer(make_config(*ALL[:2]))
    for update in range(2):
        trainer.train_step([make_batch(update)])
    path = str(tmp_path_factory.mktemp("base") / "base.pt")
    save(trainer, path, 2)
    return path


@torch.no_grad()
def logits(trainer):
    return trainer.get_model().eval()(make_batch(7)["net_input"]["src_tokens"])[0]


def test_merged_set(base, tmp_path, capsys):
    trainer = start(base, "--moe-expert-network", "ffn")
    plain = make_trainer(make_config(*ALL))
    plain.load_checkpoint(base, reset_optimizer=True)
    torch.testing.assert_close(logits(trainer), logits(plain))
    frozen = parameters(trainer)
    for update in range(3):
        trainer.train_step([make_batch(update)])
    for key, value in parameters(trainer).items():
        assert ("lora" in key) != torch.equal(value, frozen[key]), key
    path, merged = f"{tmp_path}/x.pt", f"{tmp_path}/merged.pt"
    save(trainer, path)
    assert main(["merge-lora", path, merged]) == 0 and capsys.readouterr().out.strip() == merged
    assert not torch.allclose(logits(trainer), logits(plain))
    with pytest.raises(ValueError, match="--moe-lora-rank 2"):
        plain.load_checkpoint(path, reset_optimizer=True)
    other = make_trainer(make_config(*ALL, *LORA, "--moe-lora-alpha", "8"))
    with pytest.raises(ValueError, match="alpha 8.0 would scale .* made with --moe-lora-alpha 4.0"):
        other.load_checkpoint(path)
    plain.load_checkpoint(merged, reset_optimizer=True)
    torch.testing.assert_close(logits(trainer), logits(plain), rtol=1e-4, atol=1e-5)
    with pytest.raises(CheckpointError, match="has no LoRA"):
        merge_lora(merged, f"{tmp_path}/y.pt")
    with pytest.raises(ExportError, match="merge-lora"):
        ModelSource(path)


@pytest.mark.parametrize("options", [
    "--fp16 --fp16-init-scale 8", "--bf16", "--memory-efficient-fp16", "--zero-sharding os",
    "--moe-expert-dtype int8", "--moe-expert-dtype bf16 --checkpoint-activations",
])  # fmt: skip
def test_precisions_and_storages(options, base):
    trainer = start(base, *options.split())
    records = record_updates(trainer)
    for _ in range(4):
        trainer.train_step([copy.deepcopy(make_batch(0))])
    assert records[-1].sums["loss"] < records[0].sums["loss"]
    assert all(record.grad_norm > 0 for record in records)
