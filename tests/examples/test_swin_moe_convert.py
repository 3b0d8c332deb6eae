"""Checkpoints of Microsoft's Swin-MoE: their own model's logits, from files that it wrote itself.

Their model and Tutel's layer made the files: swin_moe_files/provenance.json names the versions, and
the program in this repository's history.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.distributed import run_ranks
from helpers.examples import example

from fairseq_tutel import training
from fairseq_tutel.checkpoint import CheckpointError
from fairseq_tutel.distributed import process_world

FILES = Path(__file__).with_name("swin_moe_files")
CASES = ("slices", "cosine")
WITHOUT_NOISE = {"gate_noise": 0.0, "load_importance_loss": False}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def converted(name, **moe):
    config, state = example("convert").read(str(FILES / f"{name}.pth"))
    config = replace(config, drop_path=0.0, moe_dropout=0.0, moe={**config.moe, **moe})
    model = example("model").SwinMoE(config)
    training.load_full_state_dict(model, state)
    return model


def by_rank(name):
    return torch.load(FILES / "expected.pt", weights_only=True)[name]


def pixels(found):
    return found["images"] / 64 - 2


PUBLISHED = {
    "top_k": 1, "capacity_factor": 1.25, "eval_capacity_factor": 1.25, "gate_noise": 1.0,
    "batch_prioritized": True, "load_importance_loss": True,
}  # fmt: skip
COSINE = {"router": "cosine", "router_options": {"proj_dim": 8, "bias": True}}
SIZES = {
    "slices": {"depths": (1, 2), "heads": (2, 2), "moe_blocks": ((0,), (1,)), "num_experts": 2,
               "drop_path": 0.2, "moe_dropout": 0.1, "init_std": 0.005, "moe": PUBLISHED},
    # the file of weights alone has no rates: the published values
    "cosine": {"depths": (2,), "heads": (2,), "moe_blocks": ((0, 1),), "num_experts": 4,
               "drop_path": 0.0, "moe_dropout": 0.0, "init_std": 0.02, "moe": PUBLISHED | COSINE},
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_read_from_the_files(name):
    config, _ = example("convert").read(str(FILES / f"{name}.pth"))
    sizes = {"image": 16, "patch": 2, "channels": 3, "classes": 5, "dim": 8, "window": 2}
    assert config == example("model").SwinConfig(**sizes, **SIZES[name])


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_their_model(name, mode):
    model = converted(name, **WITHOUT_NOISE).train(mode == "train")
    for found in by_rank(name):
        with torch.no_grad():
            torch.testing.assert_close(model(pixels(found)), found[mode], **CLOSE)


def logits_on_ranks(name, file):
    rank, _ = process_world()
    train = example("train")
    config, weights = train.make_config(train.parse(["--init", file]))
    model = example("model").SwinMoE(config).eval()
    train.start_from(weights, model)
    with torch.no_grad():
        return model(pixels(by_rank(name)[rank]))


@pytest.mark.parametrize("name", CASES)
def test_their_experts_run_on_two_ranks(tmp_path, name):
    file = str(tmp_path / "out.pt")
    assert example("convert").main([str(FILES / f"{name}.pth"), file]) == 0
    for rank, logits in enumerate(run_ranks(logits_on_ranks, 2, name, file)):
        torch.testing.assert_close(logits, by_rank(name)[rank]["eval"], **CLOSE)


def test_slices_of_a_width_that_does_not_divide():
    """Of 4 ranks to 2 experts; F = 6, M = 5: the slices of the last bias are 3 wide, one padded."""
    fc1, fc1_bias, fc2 = torch.randn(2, 6, 5), torch.randn(2, 6), torch.randn(2, 6, 5)
    fc2_bias = torch.randn(2, 5)
    padded = torch.cat([fc2_bias, torch.zeros(2, 1)], 1)
    whole = {"fc1_w": fc1, "fc1_bias": fc1_bias, "fc2_w": fc2, "fc2_bias": padded}
    ranks = [
        {short: value[e : e + 1, 3 * part : 3 * part + 3] for short, value in whole.items()}
        for e in (0, 1)
        for part in (0, 1)
    ]
    joined = example("convert")._join_experts("x.pth", "mlp", ranks, 2)
    for e in (0, 1):
        wanted = {
            "fc1.weight": fc1[e], "fc1.bias": fc1_bias[e], "fc2.weight": fc2[e].t(),
            "fc2.bias": fc2_bias[e],
        }  # fmt: skip
        for name, value in wanted.items():
            assert torch.equal(joined[f"mlp.experts.{e}.{name}"], value), name


class Harmful:
    def __reduce__(self):
        return print, ("a file ran this",)


@pytest.mark.parametrize("name, problem", [
    ("slices", r"slices.pth: no .*slices.pth.global, and of its rank files \[0, 2, 3\]"),
    ("cosine", r"cosine.pth.rank1.*print"),
])  # fmt: skip
def test_other_files_are_refused_by_name(tmp_path, capsys, name, problem):
    for file in FILES.glob(f"{name}.pth.*"):
        shutil.copy(file, tmp_path)
    (tmp_path / f"{name}.pth.rank1").unlink()
    if name == "cosine":
        torch.save({"model": {}, "config": Harmful()}, tmp_path / "cosine.pth.rank1")
    with pytest.raises(CheckpointError, match=problem):
        example("convert").read(str(tmp_path / f"{name}.pth"))
    assert example("convert").main([str(tmp_path / f"{name}.pth"), str(tmp_path / "out.pt")]) == 1
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == 1 and "a file ran this" not in printed.out
    assert not (tmp_path / "out.pt").exists()


def test_training_goes_on_from_their_weights(tmp_path):
    assert example("convert").main([str(FILES / "cosine.pth"), str(tmp_path / "out.pt")]) == 0
    train = example("train")
    words = ["--init", str(tmp_path / "out.pt"), "--data", "digits", "--lr", "0.001"]
    run = train.Run(train.parse(words), 0, 1, torch.device("cpu"))
    theirs = converted("cosine").state_dict()
    mine = run.model.state_dict()
    assert {name for name in mine if mine[name].shape != theirs[name].shape} == {
        "head.weight", "head.bias",  # 10 digits, and their 5 classes
    }  # fmt: skip
    for name, value in theirs.items():
        assert "head" in name or torch.equal(mine[name], value), name
    losses = [run.step(number, torch.arange(16)) for number in range(12)]
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match="convert.py did not write it"):
        train.make_config(train.parse(["--init", str(FILES / "slices.pth.rank0")]))
