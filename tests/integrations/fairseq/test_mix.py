"""Several dense models of stock fairseq in one set with experts, by loops over their own files."""

import functools
import re
from types import SimpleNamespace

import pytest
import torch
from helpers.training import make_batch, make_config, make_trainer, save
from helpers.translation import make_pairs, pair_config

from fairseq_tutel.checkpoint import CheckpointError, inspect, load_file, read_set
from fairseq_tutel.checkpoint.__main__ import main
from fairseq_tutel.checkpoint.growth import Upcycling, upcycle

LM, PAIRS = "language model", "translation"


@pytest.fixture(scope="module")
def branches(tmp_path_factory):
    """Three stock models of a kind, trained on other data from the same start."""

    @functools.cache
    def trained(kind):
        layers = ["--decoder-layers", "4"] if kind == LM else []
        config, batch = (make_config, make_batch) if kind == LM else (pair_config, make_pairs)
        paths = []
        for seed in (1, 2, 3):
            trainer = make_trainer(config(*layers, moe=False), batch(seed))
            for _ in range(seed):
                trainer.train_step([batch(seed)])
            paths.append(str(tmp_path_factory.mktemp("branch") / "dense.pt"))
            trainer.consolidate_optimizer()
            save(trainer, paths[-1])

        def make_sparse(path, *flags):
            flags = [*layers, "--moe-capacity-factor", "0", *flags]
            trainer = make_trainer(config(*flags), batch(1))
            assert trainer.load_checkpoint(path.replace(".pt", "-shared.pt"))
            return trainer

        return SimpleNamespace(paths=paths, make_sparse=make_sparse, sample=batch(1))

    return trained


@pytest.mark.parametrize(
    ("kind", "how", "words"),
    [
        (PAIRS, Upcycling(4), "top-2"),
        (LM, Upcycling(8, top_k=4, granularity=2, from_first=True),
         "top-4, granularity 2, dense parameters of the first"),
        (LM, Upcycling(3, top_k=1, shared=True), "top-1, shared expert"),
    ],
)  # fmt: skip
def test_dense_models_become_experts_in_turn(branches, tmp_path, kind, how, words):
    """Each tensor is the one that its definition names, and the set trains on."""
    branches = branches(kind)
    dense = [torch.load(path, weights_only=False)["model"] for path in branches.paths]
    path = upcycle(branches.paths, str(tmp_path / "up.pt"), how, ranks=how.num_experts)
    got, seen = read_set(path).state_of(range(how.num_experts))["model"], set()

    def of_all(name):
        if how.from_first:
            return dense[0][name]
        return torch.stack([model[name].double() for model in dense]).mean(0).float()

    for name in dense[0]:
        prefix, _, rest = name.rpartition("fc")
        if not prefix or "layers.0." in prefix or "layers.2." in prefix:
            torch.testing.assert_close(got[name], of_all(name), rtol=1e-6, atol=1e-8)
            seen.add(name)
            continue
        for number in range(how.num_experts):
            want = dense[number // how.granularity % 3][name]
            if how.granularity == 2 and rest != "2.bias":
                part = want.chunk(2, dim=1 if rest == "2.weight" else 0)[number % 2]
                want = part * 2 if rest == "2.weight" else part
            if how.shared and rest.startswith("2"):
                want = torch.zeros_like(want)
            expert = f"{prefix}moe_layer.experts.{number}.fc{rest}"
            assert torch.equal(got[expert], want)
            seen.add(expert)
        if how.shared:
            shared = f"{prefix}moe_layer.shared_expert.fc{rest}"
            torch.testing.assert_close(got[shared], of_all(name), rtol=1e-6, atol=1e-8)
            seen.add(shared)
    gates = got.keys() - seen
    assert gates and all(name.endswith("gate.wg.weight") for name in gates)
    assert all(0.005 < float(got[name].std()) < 0.05 for name in gates)
    if kind == PAIRS:  # tied embeddings are stored once
        tied = "encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection"
        assert len({got[f"{name}.weight"].data_ptr() for name in tied}) == 1

    sizes = f"--moe-expert-count {how.num_experts} --moe-top-k {how.top_k} --moe-freq {how.freq}"
    sizes += f" --moe-expert-ffn-dim {24 // how.granularity}"
    sizes += " --moe-shared-expert-ffn-dim 24" * how.shared
    trainer = branches.make_sparse(path, *sizes.split())
    losses = [float(trainer.train_step([branches.sample])["loss"]) for _ in range(6)]
    assert losses[-1] < losses[0]
    entry = f"upcycle after 0 updates: {words}, of 3 dense models after 1, 2, 3 updates"
    assert inspect(path)["growth"] == [f"dense -> {how.num_experts} ({entry})"]


@pytest.mark.parametrize(
    ("options", "sizes", "message"),
    [
        ({"decoder_layers": 6}, {}, "in --decoder-layers: 6 against 4"),
        ({"decoder_attention_heads": 8}, {}, "in --decoder-attention-heads: 8 against 2"),
        ({"_name": "transformer_lm"}, {}, "in --arch: transformer_lm against transformer_lm_gpt"),
        ({}, {"layers.1.fc1.weight": 8}, r"in decoder.layers.1.fc1.weight: \[8, 16\] float32 "
         r"against \[24, 16\] float32"),
        ({}, {"embed_tokens.weight": 20}, r"embed_tokens.weight: \[20, 16\] float32 against \[32"),
        ({}, {"layers.3.fc2.bias": 0}, r"layers.3.fc2.bias: absent against \[16\] float32"),
    ],
    ids=["layers", "heads", "arch", "width", "dictionary", "missing"],
)  # fmt: skip
def test_models_that_differ_are_refused(
    branches, tmp_path, monkeypatch, capsys, options, sizes, message
):
    """By a command that names both files and what they have, and writes nothing."""
    monkeypatch.chdir(tmp_path)
    state = load_file(branches(LM).paths[0])
    torch.save(state, "a.pt")
    state["cfg"]["model"] |= options
    for name, size in sizes.items():
        tensor = state["model"].pop(f"decoder.{name}")
        if size:
            state["model"][f"decoder.{name}"] = tensor[:size].clone()
    torch.save(state, "b.pt")
    assert main(["upcycle", "a.pt", "a.pt", "b.pt", "out.pt", "--num-experts", "8"]) == 2
    output = capsys.readouterr().err
    message = f"alike .*: b.pt differs from a.pt .*{message}"
    assert output.count("\n") == 1 and re.search(message, output), output
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.pt", "b.pt"]


def test_other_refusals(branches, tmp_path):
    path, out = branches(LM).paths[0], str(tmp_path / "x.pt")
    for how, words in (
        (Upcycling(2), "3 dense models cannot become 2 experts .* --num-experts 3 or more"),
        (Upcycling(4, granularity=2), "cannot become 2 experts .* --num-experts 6 or more"),
    ):
        with pytest.raises(CheckpointError, match=words):
            upcycle([path] * 3, out, how)
    with pytest.raises(CheckpointError, match="is the source itself"):
        upcycle(["no.pt", path], path, Upcycling(4), force=True)
    sparse = upcycle(path, str(tmp_path / "sparse.pt"), Upcycling(4))
    with pytest.raises(CheckpointError, match="sparse.pt: has experts"):
        upcycle([path, sparse], out, Upcycling(4))
