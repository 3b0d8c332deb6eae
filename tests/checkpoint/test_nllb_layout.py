"""A set in the layout of NLLB-200 (54.5B): 24+24 layers, a file of each expert, each file twice.

Its widths are others, and it has 32 experts, not 128: those files have 350 GB. The set is written
by loops over names.
"""

from argparse import Namespace

import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from safetensors.torch import load_file as load_tensors

from fairseq_tutel.checkpoint import CheckpointError, inspect, load_for_rank
from fairseq_tutel.checkpoint import reader as reader_module
from fairseq_tutel.checkpoint.__main__ import format_report
from fairseq_tutel.export import TokenizerFiles, export_huggingface
from fairseq_tutel.integrations.fairseq.programs import evaluation

E, RANKS, WIDTH, HIDDEN, WORDS = 32, 64, 4, 3, 8
STEM = "checkpoint_2_300000"
SPARSE = [f"{side}.layers.{i}" for side in ("encoder", "decoder") for i in range(3, 24, 4)]
SHAPES = {"fc1.weight": (HIDDEN, WIDTH), "fc1.bias": (HIDDEN,), "fc2.weight": (WIDTH, HIDDEN),
          "fc2.bias": (WIDTH,)}  # fmt: skip


def random(*shape):
    return torch.randn(*shape).half()


def dense_names():
    for side in ("encoder", "decoder"):
        for number in range(24):
            layer = f"{side}.layers.{number}"
            attention = ["self_attn", *["encoder_attn"] * (side == "decoder")]
            for part in attention:
                for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    yield f"{layer}.{part}.{name}.weight", (WIDTH, WIDTH)
                    yield f"{layer}.{part}.{name}.bias", (WIDTH,)
            for name in (*attention, "final"):
                yield f"{layer}.{name}_layer_norm.weight", (WIDTH,)
                yield f"{layer}.{name}_layer_norm.bias", (WIDTH,)
            if layer in SPARSE:
                yield f"{layer}.moe_layer.gate.wg.weight", (E, WIDTH)
            else:
                yield from ((f"{layer}.{name}", shape) for name, shape in SHAPES.items())
        yield f"{side}.layer_norm.weight", (WIDTH,)
        yield f"{side}.layer_norm.bias", (WIDTH,)


def ours():
    """Arguments of our model of these sizes; the branch's has the same options."""
    parser = options.get_training_parser()
    words = f"""--task dummy_mt --dict-size {WORDS - 4} --arch transformer_moe_nllb_54b
        --moe-expert-count {E}
        --encoder-embed-dim {WIDTH} --decoder-embed-dim {WIDTH} --encoder-ffn-embed-dim {HIDDEN}
        --decoder-ffn-embed-dim {HIDDEN} --encoder-attention-heads 2 --decoder-attention-heads 2"""
    return options.parse_args_and_arch(parser, input_args=words.split())


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(folder, parameters by name with global numbers of experts)."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model_moe_54b")
    args = Namespace(**{**vars(ours()), "arch": "transformer_24_24", "replication_count": 2})
    history = [{"num_updates": 300000, "optimizer_name": "Adam", "lr_scheduler_state": {}}]
    iterator = {"train_iterator": {"epoch": 2}}
    rest = {"args": args, "cfg": None, "criterion": None, "optimizer_history": history,
            "task_state": {}, "extra_state": iterator}  # fmt: skip
    shared = {name: random(*shape) for name, shape in dense_names()}
    embedding = random(WORDS, WIDTH)  # stored three times, as there
    for name in ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection"):
        shared[f"{name}.weight"] = embedding.clone()
    foreign = {"state": {0: {"step": 300000}}, "param_groups": []}
    torch.save(
        {**rest, "model": shared, "last_optimizer_state": foreign}, folder / f"{STEM}-shared.pt"
    )
    whole = dict(shared)
    for expert in range(E):
        names = [(f"{layer}.moe_layer.experts", name) for layer in SPARSE for name in SHAPES]
        values = {key: random(*SHAPES[key[1]]) for key in names}
        # fewer arguments than there, which would only take time to read
        state = {**rest, "args": Namespace(moe_freq=4)}
        state |= {"model": {f"{a}.0.{b}": value for (a, b), value in values.items()}}
        for rank in range(expert, RANKS, E):
            torch.save(state, folder / f"{STEM}-rank-{rank}.pt")
        whole |= {f"{a}.{expert}.{b}": value for (a, b), value in values.items()}
    return folder, whole


@pytest.mark.parametrize("world_size, rank", [(8, 3), (64, 50)])
def test_a_rank_opens_the_files_of_its_experts_alone(published, monkeypatch, world_size, rank):
    folder, whole = published
    opened, load = [], reader_module.load_file

    def watched(path):
        opened.append(path.rpartition(f"{STEM}-")[2].removesuffix(".pt"))
        return load(path)

    monkeypatch.setattr(reader_module, "load_file", watched)
    path = str(folder / f"{STEM}.pt")
    model = load_for_rank(path, rank=rank, world_size=world_size)["model"]
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
    task = tasks.setup_task(convert_namespace_to_omegaconf(ours()).task)
    model = task.build_model(state["cfg"].model).eval()
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


def test_it_is_exported(published, tmp_path):
    folder, whole = published
    (tmp_path / "dict.txt").write_text("".join(f"w{n} 1\n" for n in range(WORDS - 4)))
    files = TokenizerFiles(tmp_path)
    made = export_huggingface(folder / f"{STEM}.pt", tmp_path / "m", files)
    (file,) = made.glob("*.safetensors")
    found, expert = load_tensors(file), "decoder.layers.23.{}fc1.weight"
    assert len(found) == len(whole) - 2  # the embedding once
    got = found["model." + expert.format("ffn.experts.expert_17.")]
    assert torch.equal(got, whole[expert.format("moe_layer.experts.17.")])
