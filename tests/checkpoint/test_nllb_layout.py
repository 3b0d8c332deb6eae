"""A set in the layout of NLLB-200 (54.5B): 24+24 layers, a file of each expert, each file twice.

Its widths are others, and it has 32 experts, not 128: those files have 350 GB.
"""

from argparse import Namespace

import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fairseq_tutel.checkpoint import CheckpointError, inspect, load_for_rank
from fairseq_tutel.checkpoint import reader as reader_module
from fairseq_tutel.checkpoint.__main__ import format_report
from fairseq_tutel.integrations.fairseq.programs import evaluation

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
    assert report["params_total"] == sum(tensor.numel() for tensor in whole.values())
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
