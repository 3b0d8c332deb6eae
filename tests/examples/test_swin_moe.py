"""The example SwinV2-MoE: sizes, attention, training on ranks, and what is resumed."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers.distributed import run_ranks
from helpers.examples import SWIN_MOE as FOLDER
from helpers.examples import example

from fairseq_tutel.distributed import process_world


@pytest.mark.parametrize("preset, experts, millions", [
    ("small", 0, 65.8), ("small", 8, 173.3), ("base", 0, 109.3), ("base", 32, 955.5),
])  # fmt: skip
def test_numbers_of_parameters_are_the_published_ones(preset, experts, millions):
    model = example("model")
    with torch.device("meta"):
        built = model.SwinMoE(replace(model.PRESETS[preset], num_experts=experts))
    count = sum(param.numel() for param in built.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.05)


@torch.no_grad()
def test_attention_in_a_window_of_four_patches_a_side():
    """In windows of two, as those of Microsoft's files, all steps are 1."""
    attn = example("model").WindowAttention(8, 2, 4, 0, 4)
    x, place = torch.randn(16, 8), torch.cartesian_prod(torch.arange(4), torch.arange(4))
    step = place[:, None] - place
    bias = attn.cpb_mlp(step.sign() * torch.log2(1 + 8 / 3 * step.abs()) / 3).permute(2, 0, 1)
    q, k, v = attn.qkv(x).unflatten(-1, (3, 2, 4)).permute(1, 2, 0, 3)
    rows = (q @ k.mT / 2 + bias).softmax(-1) @ v
    want = attn.proj(rows.transpose(0, 1).flatten(1)).view(1, 4, 4, 8)
    torch.testing.assert_close(attn(x.view(1, 4, 4, 8)), want, rtol=1e-4, atol=1e-5)


def updates(options, first, last, folder=None):
    """Losses of updates of a run without noise, over all ranks; saved at the end in ``folder``."""
    train, model = example("train"), example("model")
    model.PRESETS["tiny"] = replace(model.PRESETS["tiny"], drop_path=0.0)
    rank, world_size = process_world()
    words = ["--no-augment", "--clip-norm", "0.5", "--epochs", "1", *options]
    run = train.Run(train.parse(words), rank, world_size, torch.device("cpu"))
    if first:
        train.training.load_checkpoint(f"{folder}/checkpoint_last.pt", run.model, run.optimizer)
    losses = []
    for number in range(first, last):
        loss = torch.tensor(run.step(number, torch.arange(8) + 8 * number))
        if world_size > 1:
            torch.distributed.all_reduce(loss)
        losses.append(loss.item() / world_size)
    if folder:
        train.training.save_checkpoint(f"{folder}/checkpoint_last.pt", run.model, run.optimizer)
    return losses


def test_ranks_train_as_one_and_go_on_from_each_other(tmp_path):
    plain = ["gate_noise=0.0", "load_importance_loss=False", "capacity_factor=0.0",
             "batch_prioritized=False", "balance_scope=global"]  # fmt: skip
    options = [word for each in plain for word in ("--option", each)]
    alone = updates(options, 0, 6)
    on_two = run_ranks(updates, 2, options, 0, 3, str(tmp_path))[0]
    shutil.copytree(tmp_path, tmp_path / "of_two")
    on_one = updates(options, 3, 4, str(tmp_path / "of_two"))
    on_four = run_ranks(updates, 4, options, 3, 5, str(tmp_path))[0]
    again = updates(options, 5, 6, str(tmp_path))
    assert [*on_two, *on_four, *again] == pytest.approx(alone, rel=1e-5)
    assert on_one == pytest.approx(alone[3:4], rel=1e-5)
    assert alone[-1] < alone[0]


@pytest.mark.long
def test_a_folder_of_images_trains_and_is_resumed(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for split in ("train", "val"):
        for label, shade in (("dark", 40), ("light", 200)):
            folder = tmp_path / "images" / split / label
            folder.mkdir(parents=True)
            for number in range(4):
                image.new("RGB", (40, 30), (shade + number,) * 3).save(folder / f"{number}.png")

    def train(data, *words):
        command = [sys.executable, str(FOLDER / "train.py"), "--data", str(data), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=200)

    words = ("--batch-size", "4", "--save-dir", str(tmp_path / "run"), "--epochs")
    first, more = (train(tmp_path / "images", *words, epochs) for epochs in "23")
    assert first.returncode == 0 and "8 images of 2 classes, 8 held out" in first.stdout
    lines = re.findall("^resumed after epoch 2|^epoch 3/3", more.stdout, re.M)
    assert lines == ["resumed after epoch 2", "epoch 3/3"]
    wrong = train(tmp_path)
    assert wrong.returncode == 2 and len(wrong.stderr.splitlines()) == 1
