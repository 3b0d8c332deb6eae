"""Files of Meta's own code, and a set in the layout of NLLB-200, load at any number of ranks."""

import re
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from helpers.assertions import assert_same_state

from fairseq_tutel.checkpoint import CheckpointError, inspect, load_for_rank
from fairseq_tutel.checkpoint import reader as reader_module
from fairseq_tutel.checkpoint.__main__ import format_report
from fairseq_tutel.integrations.fairseq.programs import evaluation

GOLDEN = Path(__file__).parents[1] / "golden"


def read(path: Path) -> dict:
    return torch.load(path, weights_only=True)["model"]


RUNS = [(1, "init", 1), (1, "final", 8), (2, "init", 4), (2, "final", 1), (2, "final", 2)]


@pytest.mark.parametrize(("ranks", "moment", "world_size"), RUNS)
def test_metas_files_load(ranks, moment, world_size):
    folder, experts = GOLDEN / f"top2_world{ranks}" / moment, {}  # by global number
    for rank in range(ranks):
        for key, tensor in read(folder / f"checkpoint_last-rank-{rank}.pt").items():
            head, expert, rest = re.fullmatch(r"(.*\.experts)\.(\d)\.(.*)", key).groups()
            experts[head, rank * (4 // ranks) + int(expert), rest] = tensor
    assert len(experts) == 2 * 4 * 4
    for rank in range(world_size):
        path = str(folder / "checkpoint_last.pt")
        state = load_for_rank(path, rank=rank, world_size=world_size)
        mine = [rank * 4 // world_size + j for j in range(4 // world_size)] or [rank % 4]
        expected = read(folder / "checkpoint_last-shared.pt")
        assert len(expected) == 64
        for (head, expert, rest), tensor in experts.items():
            if expert in mine:
                expected[f"{head}.{mine.index(expert)}.{rest}"] = tensor
        assert_same_state(state["model"], expected)
        assert state["cfg"]["model"]["moe_expert_count"] == 4
        assert state["optimizer_history"][-1]["num_updates"] == {"init": 1, "final": 20}[moment]
        assert "last_optimizer_state" not in state and state["moe_checkpoint"] is None


def test_inspect_counts_each_parameter_once():
    report = inspect(str(GOLDEN / "top2_world2" / "final" / "checkpoint_last.pt"))
    assert report["kind"] == "set" and report["consistent"] and report["num_experts"] == 4
    # 4 experts in 2 layers of 64x32 + 64 + 32x64 + 32
    assert report["params_expert"] == 2 * 4 * (2 * 64 * 32 + 64 + 32)
    # the output projection is the embedding under a second name: counted once
    dense = read(GOLDEN / "top2_world2/final/checkpoint_last-shared.pt")
    tied = dense.pop("decoder.output_projection.weight")
    assert torch.equal(tied, dense["decoder.embed_tokens.weight"])
    for mark in ("decoder.version", "decoder.embed_positions._float_tensor"):
        assert dense.pop(mark).numel() == 1  # of one element: fairseq's models tell their version
    assert report["params_dense"] == sum(tensor.numel() for tensor in dense.values())
    assert report["moe_layers"] == ["decoder.layers.1", "decoder.layers.3"]
    assert report["num_updates"] == 20 and report["optimizer_state"] == "none"


@pytest.mark.parametrize("lost", [0, 1])
def test_missing_file_is_found_by_the_gates(tmp_path, lost):
    """Meta's files say nowhere how many there are; the gates choose from 4 experts."""
    for file in (GOLDEN / "top2_world2" / "final").glob("*.pt"):
        if file.name != f"checkpoint_last-rank-{lost}.pt":
            shutil.copy(file, tmp_path)
    with pytest.raises(CheckpointError, match=f"1 of 2 rank files missing: .*rank-{lost}.pt"):
        load_for_rank(str(tmp_path / "checkpoint_last.pt"), rank=0, world_size=1)


E, RANKS, WORDS = 32, 64, 8
STEM = "checkpoint_2_300000"
SPARSE = [f"{side}.layers.{i}" for side in ("encoder", "decoder") for i in range(3, 24, 4)]


def ours():
    """Arguments of our model of these sizes; the branch's has the same options."""
    parser = options.get_training_parser()
    words = f"""--task dummy_mt --dict-size {WORDS - 4} --arch transformer_moe_nllb_54b
        --moe-expert-count {E} --encoder-embed-dim 4 --decoder-embed-dim 4
        --encoder-ffn-embed-dim 3 --decoder-ffn-embed-dim 3
        --encoder-attention-heads 2 --decoder-attention-heads 2"""
    return options.parse_args_and_arch(parser, input_args=words.split())


def build(options):
    return tasks.setup_task(convert_namespace_to_omegaconf(ours()).task).build_model(options)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(folder, parameters by name with global numbers of experts)."""
    torch.manual_seed(0)
    folder, args = tmp_path_factory.mktemp("model_moe_54b"), ours()
    # the names and shapes are held against Meta's own code in tests of golden runs
    state = build(convert_namespace_to_omegaconf(args).model).state_dict()
    whole = {name: torch.randn(value.shape).half() for name, value in state.items()}
    del whole["encoder.version"], whole["decoder.version"]
    for name in ("decoder.embed_tokens", "decoder.output_projection"):  # stored three times
        whole[f"{name}.weight"] = whole["encoder.embed_tokens.weight"].clone()
    history = [{"num_updates": 300000, "optimizer_name": "Adam", "lr_scheduler_state": {}}]
    rest = {"cfg": None, "criterion": None, "optimizer_history": history, "task_state": {},
            "extra_state": {"train_iterator": {"epoch": 2}}}  # fmt: skip
    shared = {name: value for name, value in whole.items() if ".experts." not in name}
    foreign = {"state": {0: {"step": 300000}}, "param_groups": []}
    args = Namespace(**{**vars(args), "arch": "transformer_24_24", "replication_count": 2})
    shared = {**rest, "args": args, "model": shared, "last_optimizer_state": foreign}
    torch.save(shared, folder / f"{STEM}-shared.pt")
    for expert in range(E):
        mark = f".experts.{expert}."
        model = {n.replace(mark, ".experts.0."): value for n, value in whole.items() if mark in n}
        for rank in range(expert, RANKS, E):
            # fewer arguments than there, which would only take time to read
            state = {**rest, "args": Namespace(moe_freq=4), "model": model}
            torch.save(state, folder / f"{STEM}-rank-{rank}.pt")
    return folder, whole


@pytest.mark.parametrize("world_size, rank", [(8, 3), (64, 50)])
def test_a_rank_opens_its_experts_files_alone(published, monkeypatch, caplog, world_size, rank):
    caplog.set_level("WARNING", logger="fairseq_tutel")
    folder, whole = published
    opened, load = [], reader_module.load_file

    def watched(path):
        opened.append(path.rpartition(f"{STEM}-")[2].removesuffix(".pt"))
        return load(path)

    monkeypatch.setattr(reader_module, "load_file", watched)
    path = str(folder / f"{STEM}.pt")
    state = load_for_rank(path, rank=rank, world_size=world_size)
    assert f"{STEM}-shared.pt: its optimizer state is not keyed by" in caplog.text
    model = state["model"]
    assert "last_optimizer_state" not in state
    local = max(1, E // world_size)
    first = (rank * local) % E
    # the first file tells how many experts a file has
    assert set(opened) == {"shared", "rank-0", *(f"rank-{first + i}" for i in range(local))}
    experts = [name for name in model if ".experts." in name]
    assert len(experts) == 12 * 4 * local and len(model) == len(whole) - 12 * 4 * (E - local)
    for name in model:
        head, inside, tail = name.partition(".experts.")
        number, _, kind = tail.partition(".")
        source = f"{head}{inside}{first + int(number)}.{kind}" if inside else name
        assert torch.equal(model[name], whole[source]), name


def test_the_model_takes_it_and_translates(published):
    """As fairseq-generate loads it: every parameter is there, none is left over."""
    folder, whole = published
    state = evaluation.load_state(str(folder / f"{STEM}.pt"), {"moe_eval_capacity_factor": 0.0})
    assert state["cfg"].model._name == "transformer_moe"
    model = build(state["cfg"].model).eval()
    model.load_state_dict(state["model"])
    assert torch.equal(model.state_dict()[next(iter(whole))], whole[next(iter(whole))].float())
    assert len(model.moe_layers) == 12 and model.moe_groups.num_experts == E
    tokens = torch.tensor([[4, 5, 2]])
    with torch.no_grad():
        x, _ = model(tokens, torch.tensor([3]), tokens)
    assert x.shape == (1, 3, WORDS) and x.isfinite().all()


def test_inspect_counts_every_expert_once(published):
    folder, whole = published
    report = inspect(str(folder / f"{STEM}.pt"), verify=True)
    assert report["consistent"], report["problems"]
    assert (report["num_experts"], report["num_rank_files"], report["replicas"]) == (E, E, E)
    assert report["moe_layers"] == SPARSE
    # fairseq 0.12.2 has a buffer of one number more on each side
    params = [tensor for name, tensor in whole.items() if not name.endswith("._float_tensor")]
    assert report["params_total"] == sum(tensor.numel() for tensor in params)
    assert (report["num_updates"], report["optimizer_state"]) == (300000, "foreign")
    assert f"set of {E} rank files and {E} that repeat them" in format_report(report)


def test_any_copy_of_a_file_serves_and_one_that_differs_is_found(published, tmp_path):
    folder, whole = published
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / f"{STEM}-rank-17.pt").unlink()
    path = str(tmp_path / f"{STEM}.pt")
    model = load_for_rank(path, rank=17, world_size=E)["model"]
    name = "decoder.layers.23.moe_layer.experts.{}.fc1.weight"
    assert torch.equal(model[name.format(0)], whole[name.format(17)])
    spoilt = tmp_path / f"{STEM}-rank-34.pt"
    state = torch.load(spoilt, weights_only=False)
    spoilt.unlink()
    state["model"][name.format(0)] += 1
    torch.save(state, spoilt)
    (problem,) = inspect(path, verify=True)["problems"]
    assert f"rank-34.pt: a replica that differs from {STEM}-rank-2.pt" in problem
    (tmp_path / f"{STEM}-rank-49.pt").unlink()
    with pytest.raises(CheckpointError, match="1 of 32 rank files missing: .*rank-17.pt"):
        load_for_rank(path, rank=0, world_size=8)
