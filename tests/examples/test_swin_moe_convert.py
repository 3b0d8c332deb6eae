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
from fairseq_tutel.moe import MoELayer

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


@pytest.mark.parametrize("name, ranks, experts", [("slices", 4, 2), ("cosine", 2, 4)])
def test_sizes_are_read_from_the_files(name, ranks, experts):
    config, _ = example("convert").read(str(FILES / f"{name}.pth"))
    wanted = example("model").SwinConfig(
        image=16, patch=2, channels=3, classes=5, dim=8, window=2, num_experts=experts,
        depths=(1, 2) if name == "slices" else (2,), heads=(2, 2) if name == "slices" else (2,),
        moe_blocks=((0,), (1,)) if name == "slices" else ((0, 1),), moe=config.moe,
        # the file of weights alone has none of these: the published values
        drop_path=0.2 if name == "slices" else 0.0, moe_dropout=0.1 if name == "slices" else 0.0,
        init_std=0.005 if name == "slices" else 0.02,
    )  # fmt: skip
    assert config == wanted and len(by_rank(name)) == ranks
    published = {
        "top_k": 1, "capacity_factor": 1.25, "eval_capacity_factor": 1.25, "gate_noise": 1.0,
        "batch_prioritized": True, "load_importance_loss": True,
    }  # fmt: skip
    router = {"router": "cosine", "router_options": {"proj_dim": 8, "bias": True}}
    assert config.moe == (published if name == "slices" else published | router)


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_their_model(name, mode):
    model = converted(name, **WITHOUT_NOISE).train(mode == "train")
    for found in by_rank(name):
        with torch.no_grad():
            torch.testing.assert_close(model(pixels(found)), found[mode], **CLOSE)


@pytest.mark.parametrize("name", CASES)
def test_the_routing_that_their_auxiliary_loss_sees_is_the_same(name):
    """Their load is of Phi((probability - logit) / std), with n - 1 in the variance; this
    package's follows arXiv 1701.06538, as its tests show. So theirs is computed of our logits."""
    model = converted(name, **WITHOUT_NOISE).train()
    layers = [each for each in model.modules() if isinstance(each, MoELayer)]
    seen = []
    for layer in layers:
        route = layer.gate.logits
        layer.gate.logits = lambda x, route=route: seen.append(route(x)) or seen[-1]
    for found in by_rank(name):
        seen.clear()
        with torch.no_grad():
            model(pixels(found))
        loss = 0.0
        for logits in seen:
            std = 1.0 / logits.shape[1]
            load = torch.special.ndtr((logits.softmax(1) - logits.amax(1, keepdim=True)) / std)
            parts = [each.sum(0) for each in (logits.softmax(1), load)]
            loss += sum(each.var() / each.mean() ** 2 for each in parts) / 2
        assert len(seen) == 2
        torch.testing.assert_close(0.01 * loss, found["train_aux"], **CLOSE)


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


def spoil(folder, name, change):
    """A copy of the files, of which one is changed; the path to convert."""
    for file in FILES.glob(f"{name}.pth.*"):
        shutil.copy(file, folder)
    if change == "missing":
        (folder / f"{name}.pth.rank1").unlink()
        return
    path = folder / f"{name}.pth.{'master' if name == 'slices' else 'rank1'}"
    state = torch.load(path) if name == "slices" else {"model": {}}
    if change == "table":
        state["model"]["layers.1.blocks.0.attn.relative_coords_table"] *= 0.5
    if change == "bias":
        state["model"]["layers.1.blocks.0.mlp.fc2.bias"] = torch.zeros(16)
    if change == "code":
        state["config"] = Harmful()
    torch.save(state, path)


@pytest.mark.parametrize("name, change, problem", [
    ("slices", "missing", r"slices.pth: no .*slices.pth.global, and of its rank files \[0, 2, 3\]"),
    ("slices", "table", "relative_coords_table is not that of windows of 2 patches"),
    ("slices", "bias", r"mlp.fc2.bias is \[16\], and nothing in a model of this size"),
    ("cosine", "code", r"cosine.pth.rank1.*print"),
    ("cosine", "empty", "of ranks 0 and 1 is not of one model"),
])  # fmt: skip
def test_other_files_are_refused_by_name(tmp_path, capsys, name, change, problem):
    spoil(tmp_path, name, change)
    with pytest.raises(CheckpointError, match=problem):
        example("convert").read(str(tmp_path / f"{name}.pth"))
    assert example("convert").main([str(tmp_path / f"{name}.pth"), str(tmp_path / "out.pt")]) == 1
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == 1 and "a file ran this" not in printed.out
    assert not (tmp_path / "out.pt").exists()


def test_ranks_that_differ_a_little_are_named(tmp_path):
    for file in FILES.glob("slices.pth.*"):
        state = torch.load(file)
        if file.suffix == ".rank2":
            state["model"]["head.bias"] = torch.full((5,), 0.25)
        elif file.suffix == ".master":
            state["model"]["head.bias"] = torch.zeros(5)
        torch.save(state, tmp_path / file.name)
    with pytest.warns(UserWarning, match=r"head.bias of rank 2 differs from rank 0's by 0.25"):
        _, state = example("convert").read(str(tmp_path / "slices.pth"))
    assert not state["head.bias"].any()


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
