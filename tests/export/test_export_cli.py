"""The command line of exports: one file after the other, and errors in one line."""

import ast
import json
import logging
import shutil
import sys
import weakref

import pytest
import torch
from exported_models import make, make_translation, write_dictionary
from helpers.dispatched import spied
from helpers.golden import GOLDEN
from helpers.sets import member
from safetensors.torch import load_file, save_file

from fairseq_tutel.checkpoint import reader, reshard
from fairseq_tutel.checkpoint.io import Checksums
from fairseq_tutel.export import __main__ as command_line


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return make(tmp_path_factory.mktemp("set"), "--share-decoder-input-output-embed")


@pytest.fixture(scope="module")
def translation(tmp_path_factory):
    return make_translation(tmp_path_factory.mktemp("pair"))


def run(capsys, *words):
    status = command_line.main([str(word) for word in words])
    return status, *capsys.readouterr()


def imports(path):
    """Modules that a file imports, wherever in it; those beside it left out."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module


def test_weights_are_those_of_the_model_to_the_bit(saved, tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    # with the dictionary of the data that the checkpoint names
    assert run(capsys, "huggingface", saved.path, folder)[:2] == (0, f"{folder}\n")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    lines = (saved.data / "dict.txt").read_text().splitlines()
    assert list(vocabulary)[4:] == [line.split()[0] for line in lines]
    found, model = load_file(folder / "model.safetensors"), saved.model
    experts = model.moe_layers[1].experts
    assert torch.equal(found["model.layers.1.moe.ffn_experts.up_proj"], experts.fc1_weight)
    assert torch.equal(found["model.layers.1.moe.ffn_experts.down_proj_bias"], experts.fc2_bias)
    assert torch.equal(found["model.embed_tokens.weight"], model.decoder.embed_tokens.weight)
    assert torch.equal(found["model.layers.0.ffn.fc1.bias"], model.decoder.layers[0].fc1.bias)
    numbers = sum(param.numel() for param in model.parameters())
    assert sum(tensor.numel() for tensor in found.values()) == numbers
    config = json.loads((folder / "config.json").read_text())
    assert config["moe_layers"] == [1] and config["num_experts"] == 4
    program = (folder / "README.md").read_text().split("```")[1].removeprefix("python\n")
    assert 'AutoModelForCausalLM.from_pretrained("folder", trust_remote_code' in program
    compile(program, "README.md", "exec")
    imported = {name.split(".")[0] for path in folder.glob("*.py") for name in imports(path)}
    assert imported == {"dataclasses", "math", "torch", "transformers"}


def test_files_of_weights_have_a_largest_size(translation, tmp_path, monkeypatch, capsys):
    """Memory holds one of them: its tensors are gone before the next are made. Experts are checked
    for damage once, and each rank file is read once."""
    alive, checked, check = [], [], Checksums.check
    path = reshard(str(translation.path), str(tmp_path / "four.pt"), 4)
    opened = spied(monkeypatch, reader, "load_file")

    def noted(self, entries):
        checked.extend(name for name in entries if ".experts." in name)
        check(self, entries)

    monkeypatch.setattr(Checksums, "check", noted)

    def watched(tensors, *args, **options):
        assert not [reference for reference in alive if reference() is not None]
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 10_000
        alive[:] = map(weakref.ref, tensors.values())
        save_file(tensors, *args, **options)

    monkeypatch.setattr("safetensors.torch.save_file", watched)
    words = "--data", translation.data, "--max-file-gb", 1e-5
    assert run(capsys, "huggingface", path, tmp_path / "m", *words)[0] == 0
    # four tensors of four experts of two layers, and of the first expert for sizes
    assert len(checked) == 2 * 4 * (4 + 1)
    assert len({path for (path,), *_ in opened}) == len(opened) == 1 + 4
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and set(index["weight_map"].values()) == {file.name for file in files}
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert set(found) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())


def test_damage_is_found_and_nothing_is_left(saved, tmp_path, capsys):
    for file in saved.path.parent.glob("*.pt"):
        shutil.copy(file, tmp_path)
    file = tmp_path / member(tmp_path / "checkpoint_last.pt", "rank-0")
    content = bytearray(file.read_bytes())
    weights = saved.model.moe_layers[1].experts.fc2_weight[3].detach().numpy().tobytes()
    content[content.index(weights)] ^= 1
    file.write_bytes(content)
    words = (tmp_path / saved.path.name, tmp_path / "m", "--data", saved.data)
    status, _, error = run(capsys, "huggingface", *words)
    assert status == 2 and "checksum" in error
    assert not (tmp_path / "m").exists() and not list(tmp_path.glob(".m.*"))


def test_without_safetensors_one_line_says_what_to_install(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "safetensors", None)  # as if it were not installed
    status, _, error = run(capsys, "huggingface", saved.path, tmp_path / "m")
    assert status == 2 and "pip install safetensors" in error and error.count("\n") == 1


REFUSED = {
    "cosine router": {"moe_router": "cosine"},
    "--moe-null-experts 1": {"moe_null_experts": 1},
    "--layernorm-embedding": {"layernorm_embedding": True},
    "--scale-heads": {"scale_heads": True},
    "--use-stable-embedding": {"use_stable_embedding": True},
    "--decoder-output-dim 8": {"decoder_output_dim": 8},
    "no experts": {"_name": "transformer_lm_gpt"},
    "transformer_lm_gpt_moe.w9 has no place": {},
    "model.embed_positions.weight has": {"decoder_learned_pos": True},
}


def with_options(saved, folder, options):
    """The set with other options in its files, or with a weight that no model has."""
    for file in saved.path.parent.glob("*.pt"):
        state = torch.load(file, weights_only=False)
        if file.name.endswith("-shared.pt"):
            state["cfg"]["model"].update(options)
            if not options:
                state["model"]["transformer_lm_gpt_moe.w9"] = torch.zeros(1)
        if options.get("_name"):
            if not file.name.endswith("-shared.pt"):
                continue
            file = saved.path  # noqa: PLW2901
            state["model"] = {k: v for k, v in state["model"].items() if ".experts." not in k}
            state["cfg"]["model"]["moe_freq"] = 0
            state.pop("moe_checkpoint")
        torch.save(state, folder / file.name)
    return folder / saved.path.name


# what transformers' class for translation has no place for
REFUSED_THERE = {
    "--moe-top-k 1": {"moe_top_k": 1},
    "--moe-expert-network swiglu": {"moe_expert_network": "swiglu"},
    "--moe-shared-expert-ffn-dim 8": {"moe_shared_expert_ffn_dim": 8},
    "--moe-score-function sigmoid": {"moe_score_function": "sigmoid"},
    "--moe-load-bias frozen": {"moe_load_bias": "frozen"},
    "--moe-num-expert-groups 2": {"moe_num_expert_groups": 2, "moe_group_score": "max"},
    "a model with --moe-unnormalized-weights": {"moe_unnormalized_weights": True},
    "--moe-route-scale 2.0": {"moe_route_scale": 2.0},
    "--moe-fom 0.1": {"moe_fom": 0.1},
    "--moe-expert-ffn-dim 20": {"moe_expert_ffn_dim": 20},
    "--alternate-ffn-embed-dim 20": {"alternate_ffn_embed_dim": 20},
    "a model with --moe-cmr": {"moe_cmr": True},
    "a model without --encoder-normalize-before": {"encoder_normalize_before": False},
    "a model with --decoder-learned-pos": {"decoder_learned_pos": True},
    "a model without --share-all-embeddings": {"share_all_embeddings": False},
    "--layernorm-embedding": {"layernorm_embedding": True},
    "--moe-router": {"moe_router": "cosine"},
}
CASES = [("saved", *each) for each in REFUSED.items()]
CASES += [("translation", *each) for each in REFUSED_THERE.items()]


@pytest.mark.parametrize("kind, named, options", CASES)
def test_what_cannot_be_exported_is_named(kind, named, options, request, tmp_path, capsys):
    path = with_options(request.getfixturevalue(kind), tmp_path, options)
    status, out, error = run(capsys, "huggingface", path, tmp_path / "m")
    assert status == 2 and not out and named in error and error.count("\n") == 1, error
    assert not (tmp_path / "m").exists()


def test_a_translation_model_is_no_package(translation, tmp_path, capsys):
    error = run(capsys, "aot", translation.path, tmp_path / "m.pt2")[2]
    assert "architecture transformer_moe cannot be exported" in error and error.count("\n") == 1


def test_bad_input_is_one_line(saved, tmp_path, capsys):
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    small = tmp_path / "small"
    small.mkdir()
    write_dictionary(small, ["only", "three", "words"])
    lacking = tmp_path / "set"
    lacking.mkdir()
    golden = GOLDEN / "top2_world2" / "final"
    (lacking / "x-shared.pt").symlink_to(golden / "checkpoint_last-shared.pt")
    data = ("--data", saved.data)
    gpt2 = ("--gpt2-encoder-json", "e.json")
    for named, words in (
        ("not an empty folder", (saved.path, full, *data)),
        ("has 7 symbols, and the model 32", (saved.path, tmp_path / "m", "--data", small)),
        ("dict.txt by --data", (saved.path, tmp_path / "m", "--data", tmp_path)),
        ("no such file", (saved.path, tmp_path / "m", *data, "--sentencepiece-model", "x")),
        ("both encoder.json and vocab.bpe", (saved.path, tmp_path / "m", *data, *gpt2)),
        ("the set has no rank file", (lacking / "x.pt", tmp_path / "m", *data)),
        ("no such checkpoint", (tmp_path / "none.pt", tmp_path / "m", *data)),
    ):
        status, _, error = run(capsys, "huggingface", *words)
        assert status == 2 and named in error and error.count("\n") == 1, (named, error)
    assert not (tmp_path / "m").exists()
    assert not list(tmp_path.glob(".m.*"))
    for named, words in (
        ("must end in .pt2", (saved.path, tmp_path / "model.so")),
        ("exists", (saved.path, saved.path.parent / "model.pt2")),
        ("layer 0 has no experts; give one of 1", (saved.path, "x.pt2", "--layer", 0)),
    ):
        (saved.path.parent / "model.pt2").touch()
        status, _, error = run(capsys, "aot", *words)
        assert status == 2 and named in error and error.count("\n") == 1, (named, error)


def test_a_capacity_in_evaluation_is_left_out_and_said(saved, tmp_path, capsys, caplog):
    path = with_options(saved, tmp_path, {"moe_eval_capacity_token_fraction": 0.25})
    with caplog.at_level(logging.WARNING, "fairseq_tutel"):
        words = ("huggingface", path, tmp_path / "m", "--data", saved.data)
        assert run(capsys, *words)[0] == 0
    assert "drops nothing" in caplog.text
