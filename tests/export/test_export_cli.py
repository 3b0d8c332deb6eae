"""The command line of exports: one file after the other, and errors in one line."""

import json
import logging
import re
import shutil
import sys
import weakref

import pytest
import torch
from exported_models import make, make_translation, write_dictionary
from helpers.golden import GOLDEN
from helpers.sets import member
from safetensors.torch import load_file, save_file

from fairseq_tutel.checkpoint import reshard
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
    numbers = sum(param.numel() for param in model.parameters())
    assert sum(tensor.numel() for tensor in found.values()) == numbers
    config = json.loads((folder / "config.json").read_text())
    assert config["moe_layers"] == [1] and config["num_experts"] == 4
    program = (folder / "README.md").read_text().split("```")[1].removeprefix("python\n")
    assert 'AutoModelForCausalLM.from_pretrained("folder", trust_remote_code' in program
    compile(program, "README.md", "exec")
    code = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    imported = re.findall(r"^\s*(?:from|import) (\w+)", code, re.MULTILINE)
    assert set(imported) == {"dataclasses", "math", "torch", "transformers"}


def test_files_of_weights_have_a_largest_size(translation, tmp_path, monkeypatch, capsys):
    """Memory holds one of them: its tensors are gone before the next are made."""
    alive = []

    def watched(tensors, *args, **options):
        assert not [reference for reference in alive if reference() is not None]
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 10_000
        alive[:] = map(weakref.ref, tensors.values())
        save_file(tensors, *args, **options)

    monkeypatch.setattr("safetensors.torch.save_file", watched)
    path = reshard(str(translation.path), str(tmp_path / "four.pt"), 4)
    words = "--data", translation.data, "--max-file-gb", 1e-5
    assert run(capsys, "huggingface", path, tmp_path / "m", *words)[0] == 0
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


# what an export has no place for: options, whose flags are named, and other words
OPTIONS = {
    "saved": {"moe_null_experts": 1, "layernorm_embedding": True, "scale_heads": True,
              "use_stable_embedding": True, "decoder_output_dim": 8},
    "translation": {
        "moe_top_k": 1, "moe_expert_network": "swiglu", "moe_shared_expert_ffn_dim": 8,
        "moe_score_function": "sigmoid", "moe_load_bias": "frozen", "moe_route_scale": 2.0,
        "moe_fom": 0.1, "moe_expert_ffn_dim": 20, "alternate_ffn_embed_dim": 20,
        "moe_unnormalized_weights": True, "moe_cmr": True, "layernorm_embedding": True,
        "decoder_learned_pos": True, "encoder_normalize_before": False,
        "share_all_embeddings": False},
}  # fmt: skip
REFUSED = [
    ("saved", "cosine router", {"moe_router": "cosine"}),
    ("saved", "no experts", {"_name": "transformer_lm_gpt"}),
    ("saved", "transformer_lm_gpt_moe.w9 has no place", {}),
    ("saved", "model.embed_positions.weight has", {"decoder_learned_pos": True}),
    ("translation", "--moe-router", {"moe_router": "cosine"}),
    ("translation", "--moe-num-expert-groups 2",
     {"moe_num_expert_groups": 2, "moe_group_score": "max"}),
]  # fmt: skip
for kind, options in OPTIONS.items():
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        named = (
            f"without {flag}" if value is False else flag if value is True else f"{flag} {value}"
        )
        REFUSED.append((kind, named, {name: value}))


@pytest.mark.parametrize("kind, named, options", REFUSED)
def test_what_cannot_be_exported_is_named(kind, named, options, request, tmp_path, capsys):
    path = with_options(request.getfixturevalue(kind), tmp_path, options)
    status, out, error = run(capsys, "huggingface", path, tmp_path / "m")
    assert status == 2 and not out and named in error and error.count("\n") == 1, error
    assert not (tmp_path / "m").exists()


def test_bad_input_is_one_line(saved, translation, tmp_path, capsys):
    for name in ("full", "small", "set"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "file").touch()
    write_dictionary(tmp_path / "small", ["only", "three", "words"])
    lacking = tmp_path / "set" / "x.pt"
    golden = GOLDEN / "top2_world2" / "final"
    lacking.with_name("x-shared.pt").symlink_to(golden / "checkpoint_last-shared.pt")
    data, new, there = ("--data", saved.data), tmp_path / "m", saved.path.parent / "model.pt2"
    there.touch()
    for named, *words in (
        ("not an empty folder", "huggingface", saved.path, tmp_path / "full", *data),
        ("has 7 symbols, and the model 32", "huggingface", saved.path, new, "--data",
         tmp_path / "small"),
        ("dict.txt by --data", "huggingface", saved.path, new, "--data", tmp_path),
        ("no such file", "huggingface", saved.path, new, *data, "--sentencepiece-model", "x"),
        ("both encoder.json and vocab.bpe", "huggingface", saved.path, new, *data,
         "--gpt2-encoder-json", "e.json"),
        ("the set has no rank file", "huggingface", lacking, new, *data),
        ("no such checkpoint", "huggingface", tmp_path / "none.pt", new, *data),
        ("transformer_moe cannot be exported", "aot", translation.path, tmp_path / "m.pt2"),
        ("must end in .pt2", "aot", saved.path, tmp_path / "model.so"),
        ("exists", "aot", saved.path, there),
        ("layer 0 has no experts; give one of 1", "aot", saved.path, "x.pt2", "--layer", 0),
    ):  # fmt: skip
        status, _, error = run(capsys, *words)
        assert status == 2 and named in error and error.count("\n") == 1, (named, error)
    assert not new.exists() and not list(tmp_path.glob(".m.*"))


def test_a_capacity_in_evaluation_is_left_out_and_said(saved, tmp_path, capsys, caplog):
    path = with_options(saved, tmp_path, {"moe_eval_capacity_token_fraction": 0.25})
    with caplog.at_level(logging.WARNING, "fairseq_tutel"):
        words = ("huggingface", path, tmp_path / "m", "--data", saved.data)
        assert run(capsys, *words)[0] == 0
    assert "drops nothing" in caplog.text
