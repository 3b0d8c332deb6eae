"""Folders of transformers as sets: the same bits, a model that trains on, refusals by name."""

import json
import re
import shutil

import pytest
import torch
from exported_models import CASES, NLLB_CASES, make, make_translation
from helpers.assertions import assert_same_state
from helpers.sets import member
from helpers.training import make_batch, make_config, make_trainer
from helpers.translation import make_pairs, pair_config
from safetensors.torch import load_file, save_file

from fairseq_tutel.checkpoint import __main__ as command_line
from fairseq_tutel.checkpoint import load_for_rank
from fairseq_tutel.export import TokenizerFiles, export_huggingface

MAKERS = {**dict.fromkeys(CASES, make), **dict.fromkeys(NLLB_CASES, make_translation)}


def run(capsys, *words):
    status = command_line.main(["import", *map(str, words)])
    return status, *capsys.readouterr()


@pytest.mark.parametrize("case", MAKERS)
def test_export_import_and_export_are_equal_to_the_bit(case, tmp_path, capsys):
    saved = MAKERS[case](tmp_path, {**CASES, **NLLB_CASES}[case])
    export_huggingface(saved.path, tmp_path / "one", max_bytes=9000)
    path = tmp_path / "set" / "model.pt"
    assert run(capsys, tmp_path / "one", path, "--ranks", 2)[:2] == (0, f"{path}\n")
    assert member(path, "rank-1")
    state = load_for_rank(str(path), rank=0, world_size=1)["model"]
    no_weights = ("_float_tensor", "experts_held")
    want = {k: v for k, v in saved.model.state_dict().items() if not k.endswith(no_weights)}
    assert_same_state(state, want)
    # the dictionary is in the folder that was imported
    dictionary = path.parent / "dict.txt"
    export_huggingface(path, tmp_path / "two", TokenizerFiles(dictionary), max_bytes=9000)
    files = {each.name for each in (tmp_path / "one").iterdir()}
    assert files == {each.name for each in (tmp_path / "two").iterdir()}
    files.remove("README.md")  # has the folder's name
    for name in files:
        one, two = (tmp_path / folder / name for folder in ("one", "two"))
        assert one.read_bytes() == two.read_bytes(), name
        assert one.stat().st_mode == dictionary.stat().st_mode, name  # the umask's


@pytest.mark.parametrize("create, config, batch", [
    (make, make_config, make_batch), (make_translation, pair_config, make_pairs),
])  # fmt: skip
def test_the_flags_that_it_prints_train_on(create, config, batch, tmp_path, capsys, caplog):
    """fairseq's trainer loads the set, and the first loss is that of the model."""
    saved = create(tmp_path)
    export_huggingface(saved.path, tmp_path / "m")
    path = tmp_path / "set.pt"
    with caplog.at_level("INFO", logger="fairseq_tutel"):
        assert run(capsys, tmp_path / "m", path)[0] == 0
    (flags,) = re.findall(r"continue training with: --arch \w+ (.*)", caplog.text)
    trainer = make_trainer(config(*flags.split()), batch(0))
    trainer.load_checkpoint(str(path))
    net = batch(1)["net_input"]
    with torch.no_grad():
        got, want = (each.eval()(**net)[0] for each in (trainer.get_model(), saved.model))
    assert torch.equal(got, want)
    log = trainer.train_step([batch(1)])
    assert log["loss"] > 0 and trainer.get_num_updates() == 1


FIELDS = {
    "router_bias True": {"router_bias": True},
    "tie_word_embeddings False": {"tie_word_embeddings": False},
    "moe_eval_capacity_token_fraction -1.0": {"moe_eval_capacity_token_fraction": -1.0},
    "activation_function 'quick_gelu'": {"activation_function": "quick_gelu"},
    "pad_token_id 0": {"pad_token_id": 0},
    "the type 'mixtral'": {"model_type": "mixtral"},
    "has no experts": {"encoder_sparse_step": 0, "decoder_sparse_step": 0},
    "lacks model.encoder.layers.2": {"encoder_layers": 3},
    "d_model '16' in config.json is no int": {"d_model": "16"},
    "dropout [0.1] in config.json is no float": {"dropout": [0.1]},
    "scale_embedding None in config.json is no bool": {"scale_embedding": None},
    "the type ['nllb-moe'] cannot be imported": {"model_type": ["nllb-moe"]},
    "model.shared.weight has the shape [32, 16], and": {"vocab_size": 40},
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return export_huggingface(make_translation(folder).path, folder / "m")


@pytest.mark.parametrize("named, fields", FIELDS.items(), ids=FIELDS)
def test_what_fairseq_lacks_is_refused_by_name(named, fields, exported, tmp_path, capsys):
    folder = shutil.copytree(exported, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    status, out, error = run(capsys, folder, tmp_path / "set" / "x.pt")
    assert status == 2 and not out and named in error and error.count("\n") == 1, error
    assert not (tmp_path / "set").exists()


WEIGHT = "model.encoder.layers.0.ffn.fc1.weight"
DAMAGED = {
    "config.json": (b"", b"[3]", b"\xff", b"[" * 10**5),
    "generation_config.json": (b"text", b"[[1, [2]]]"),
    "tokenizer.json":
        (b"[3]", b'{"model": 3}', b'{"model": {"vocab": [3]}}', b'{"added_tokens": [3]}'),
    "vocab.json": (b"[3]", b"{"),
    "model.safetensors.index.json": (b"3", b'{"weight_map": [3]}', b'{"weight_map": {"a": 3}}'),
    "model.safetensors": (b"", b"text" * 9),
    WEIGHT: (torch.Tensor.t, torch.Tensor.flatten, torch.Tensor.long, lambda w: w[:-1]),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_folders_are_refused_by_name(name, exported, tmp_path, capsys):
    for number, content in enumerate(DAMAGED[name]):
        folder = shutil.copytree(exported, tmp_path / str(number))
        file = folder / ("model.safetensors" if name == WEIGHT else name)
        if name == WEIGHT:
            tensors = load_file(file)
            file.unlink()  # it is mapped
            tensors[name] = content(tensors[name]).contiguous()
            save_file(tensors, file)
        else:
            file.unlink(missing_ok=True)
            file.write_bytes(content)
        status, out, error = run(capsys, folder, tmp_path / "set" / "x.pt")
        assert status == 2 and not out and name in error and error.count("\n") == 1, error
        assert not (tmp_path / "set").exists()


def test_other_tensors_and_other_folders(exported, tmp_path, capsys):
    """A tied tensor may be stored under its other names; one without a place is named."""
    folder = shutil.copytree(exported, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors.pop("model.shared.weight")
    tensors |= {"lm_head.weight": embedding, "model.decoder.embed_tokens.weight": embedding.clone()}
    save_file(tensors, folder / "model.safetensors")
    assert run(capsys, folder, tmp_path / "x.pt")[0] == 0
    state = load_for_rank(str(tmp_path / "x.pt"), rank=0, world_size=1)["model"]
    assert torch.equal(state["encoder.embed_tokens.weight"], embedding)
    assert "exists" in run(capsys, folder, tmp_path / "x.pt")[2]
    save_file({**tensors, "model.extra": embedding + 1}, folder / "model.safetensors")
    assert "model.extra has no place" in run(capsys, folder, tmp_path / "y.pt")[2]
    assert "no config.json" in run(capsys, tmp_path, tmp_path / "y.pt")[2]
    (folder / "model.safetensors").unlink()
    assert "model.safetensors: no such file" in run(capsys, folder, tmp_path / "y.pt")[2]
