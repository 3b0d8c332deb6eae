"""Growth of checkpoints against stock fairseq's own dense models, in fp64: one or several of them
become experts, and experts become dense models."""

import copy
import functools
import json
import re

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models.transformer import TransformerModel
from fairseq.modules import gelu
from fairseq.options import get_training_parser, parse_args_and_arch
from helpers.assertions import assert_same_state
from helpers.training import convert, make_batch, make_config, make_trainer, save
from helpers.translation import make_pairs, pair_config
from omegaconf import open_dict

from fairseq_tutel.checkpoint import CheckpointError, inspect, load_file, read_set
from fairseq_tutel.checkpoint.__main__ import main
from fairseq_tutel.checkpoint.growth import Upcycling, grow, to_dense, upcycle
from fairseq_tutel.integrations.fairseq.models import TransformerMoE

EXACT = {"rtol": 0, "atol": 1e-12}  # of logits, in fp64
LM, PAIRS = "language model", "translation"
KINDS = {
    LM: (make_config, make_batch, ["--decoder-layers", "4"]),
    PAIRS: (pair_config, make_pairs, []),
}


def _logits(model, sample, training=True):
    """Of a model, or that of a trainer; the configs have no dropout."""
    model = copy.deepcopy(getattr(model, "get_model", lambda: model)()).double()
    for module in model.modules():
        if getattr(module, "activation_fn", None) is gelu:  # which computes in fp32
            module.activation_fn = torch.nn.functional.gelu
    model.train(training)
    with torch.no_grad():
        return model(**sample["net_input"])[0]


class Dense:
    """A stock model that was trained for some updates: its file, trainer and logits."""

    def __init__(self, path, config, sample, updates=3):
        self.trainer, self.sample, self.path = make_trainer(config, sample), sample, str(path)
        for _ in range(updates):
            self.trainer.train_step([sample])
        self.trainer.consolidate_optimizer()
        save(self.trainer, self.path)
        self.logits = _logits(self.trainer, sample)


@pytest.fixture(scope="module")
def branches(tmp_path_factory):
    """Function (kind) -> three stock models, trained on other data from the same start."""

    @functools.cache
    def trained(kind):
        config, batch, layers = KINDS[kind]
        folder = tmp_path_factory.mktemp("branches")
        return [Dense(folder / f"{seed}.pt", config(*layers, moe=False), batch(seed), seed)
                for seed in (1, 2, 3)]  # fmt: skip

    return trained


@pytest.fixture
def dense(branches):
    return branches(LM)[2]


def _loaded(path, *flags, kind=LM):
    """A trainer with what a set holds."""
    config, batch, layers = KINDS[kind]
    cfg = config("--moe-capacity-factor", "0", *layers, *flags)
    trainer = make_trainer(cfg, batch(1))
    assert trainer.load_checkpoint(path.replace(".pt", "-shared.pt"))
    return trainer


def _flags(how):
    words = f"--moe-expert-count {how.num_experts} --moe-top-k {how.top_k} --moe-freq {how.freq}"
    words += f" --moe-expert-ffn-dim {24 // how.granularity}"
    return [*words.split(), *(["--moe-shared-expert-ffn-dim", "24"] if how.shared else [])]


@pytest.mark.parametrize(
    "how",
    [
        Upcycling(8, top_k=4, freq=1),
        Upcycling(8, top_k=4, granularity=2),
        Upcycling(8, top_k=4, granularity=4),
        Upcycling(4, top_k=1, shared=True, drop_ratio=0.5),
    ],
    ids=lambda how: f"{how.num_experts} {how.top_k} {how.granularity} {how.shared}",
)
def test_an_upcycled_language_model_starts_as_the_dense_one(dense, tmp_path, how):
    path = upcycle(dense.path, str(tmp_path / "up.pt"), how)
    trainer = _loaded(path, *_flags(how))
    torch.testing.assert_close(_logits(trainer, dense.sample), dense.logits, **EXACT)
    rows = [layer.gate.wg.weight for layer in trainer.get_model().moe_layers.values()]
    assert [len(each) for each in rows] == [how.num_experts] * (4 // how.freq)
    assert 0.01 < float(rows[0].detach().std()) < 0.03
    # without the optimizer's state the schedule begins anew
    assert inspect(path)["num_updates"] == trainer.get_num_updates() == 0
    assert inspect(path)["growth"][0].endswith("of a dense model after 3 updates)")


def test_an_upcycled_encoder_decoder_starts_as_the_dense_one(branches, tmp_path, caplog):
    dense, how = branches(PAIRS)[2], Upcycling(4, top_k=2)
    path = upcycle(dense.path, str(tmp_path / "up.pt"), how, ranks=2)
    trainer = _loaded(path, *_flags(how), kind=PAIRS)
    torch.testing.assert_close(_logits(trainer, dense.sample), dense.logits, **EXACT)
    back = to_dense(path, str(tmp_path / "back.pt"))
    for file, kind in ((path, TransformerMoE), (back, TransformerModel)):  # as programs load them
        (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([file])
        assert type(model) is kind
        torch.testing.assert_close(_logits(model, dense.sample, False), dense.logits, **EXACT)

    how = Upcycling(4, freq=0, decoder_freq=2, shared=True)
    with caplog.at_level("INFO", "fairseq_tutel"):
        side = upcycle(dense.path, str(tmp_path / "side.pt"), how)
    assert "continue training with: --arch transformer_moe " in caplog.text  # not a language model
    caplog.clear()
    kept = to_dense(side, str(tmp_path / "kept.pt"), "shared")
    assert "load" not in caplog.text  # of the experts, which are not asked
    assert_same_state(load_file(kept)["model"], load_file(dense.path)["model"])


RUN = "--dict-size 28 --cpu --no-save --optimizer adam --lr 0.01 --batch-size 4"
LANGUAGE = (
    "--task dummy_lm --tokens-per-sample 8 --arch transformer_lm_gpt2_tiny "
    "--criterion cross_entropy --share-decoder-input-output-embed --decoder-learned-pos "
    "--attention-dropout 0"
)
TRANSLATION = (
    "--task dummy_mt --arch transformer_tiny --criterion label_smoothed_cross_entropy "
    "--label-smoothing 0.2 --share-all-embeddings --encoder-normalize-before --activation-fn gelu "
    "--decoder-ffn-embed-dim 48 --dropout 0.3 --max-source-positions 99"
)


@pytest.mark.parametrize("words, batch", [(LANGUAGE, make_batch), (TRANSLATION, make_pairs)])
def test_the_flags_that_upcycle_prints_train_on(words, batch, tmp_path, caplog):
    """With the data and the optimizer alone beside them; fairseq's parser reads them."""

    def parsed(words):
        given = f"{words} {RUN}".split()
        return convert(parse_args_and_arch(get_training_parser(), input_args=given))

    dense = Dense(tmp_path / "dense.pt", parsed(words), batch(1))
    with caplog.at_level("INFO", "fairseq_tutel"):
        path = upcycle(dense.path, str(tmp_path / "up.pt"), Upcycling(4))
    (flags,) = re.findall("continue training with: (.*)", caplog.text)
    trainer = make_trainer(parsed(flags), dense.sample)
    assert trainer.load_checkpoint(path)
    want = _logits(dense.trainer, dense.sample, False)
    torch.testing.assert_close(_logits(trainer, dense.sample, False), want, **EXACT)
    (entry,) = read_set(path).shared["optimizer_history"]
    assert type(trainer.criterion).__name__ == entry["criterion_name"]
    smoothing = (getattr(each.criterion, "eps", 0) for each in (trainer, dense.trainer))
    assert len(set(smoothing)) == 1
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        assert getattr(trainer.cfg.model, name) == getattr(dense.trainer.cfg.model, name), name
    assert trainer.train_step([dense.sample])["loss"] > 0


def test_the_best_loss_is_left_out_if_the_loss_is_another(dense, tmp_path):
    """A run writes checkpoint_best.pt for no greater loss; a gate loss adds to that."""
    one, two, more = (str(tmp_path / f"{name}.pt") for name in ("one", "two", "more"))
    state = load_file(dense.path)
    torch.save({**state, "extra_state": {**state["extra_state"], "best": 0.5}}, one)
    how = Upcycling(4)
    for number, sources in enumerate((one, [one, dense.path])):
        path = upcycle(sources, str(tmp_path / f"up{number}.pt"), how)
        extra = read_set(path).shared["extra_state"]
        assert "best" not in extra
        assert extra["train_iterator"] == state["extra_state"]["train_iterator"]
    save(_loaded(path, *_flags(how)), two, best=0.7)
    assert read_set(grow(two, more, 8)).shared["extra_state"]["best"] == 0.7
    assert "best" not in load_file(to_dense(two, str(tmp_path / "back.pt")))["extra_state"]


def test_a_trained_translation_model_becomes_one_of_stock_fairseq(tmp_path):
    """Its options leave sizes out, which stock fairseq does not fill in."""
    sample, path = make_pairs(1), str(tmp_path / "m.pt")
    trainer = make_trainer(pair_config("--moe-expert-count", "2"), sample)
    trainer.train_step([sample])
    save(trainer, path)
    out = to_dense(path, str(tmp_path / "dense.pt"))
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([out])
    assert type(model) is TransformerModel
    built = make_trainer(pair_config(moe=False), sample).get_model()  # by stock's own parser
    state = load_file(out)
    theirs, criterion = {"_name", "label_smoothing", "sentence_avg"}, state["cfg"]["criterion"]
    assert {name for name in criterion if "moe_" in name or name in theirs} == theirs
    built.load_state_dict(state["model"])
    want = _logits(built, sample, False)
    torch.testing.assert_close(_logits(model, sample, False), want, **EXACT)


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
    paths = [each.path for each in branches(kind)]
    dense = [torch.load(path, weights_only=False)["model"] for path in paths]
    path = upcycle(paths, str(tmp_path / "up.pt"), how, ranks=how.num_experts)
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

    trainer, sample = _loaded(path, *_flags(how), kind=kind), branches(kind)[0].sample
    losses = [float(trainer.train_step([sample])["loss"]) for _ in range(6)]
    assert losses[-1] < losses[0]
    entry = f"upcycle after 0 updates: {words}, of 3 dense models after 1, 2, 3 updates"
    assert inspect(path)["growth"] == [f"dense -> {how.num_experts} ({entry})"]


@pytest.mark.parametrize("number, options, words", [
    (1, {"top_k": 1}, "--top-k 1 weights an expert by the gate's probability.*--allow-inexact"),
    (1, {"top_k": 2, "granularity": 4}, "--granularity 4 does not divide --top-k 2"),
    (1, {"top_k": 2, "drop_ratio": 0.5}, "--drop-ratio 0.5 draws hidden units anew"),
    (1, {"granularity": 3}, "--num-experts 8 is no multiple of --granularity 3"),
    (1, {"top_k": 9}, "--top-k 9 must lie between 1 and --num-experts 8"),
    (1, {"freq": 5}, "none of its layers becomes sparse, --moe-freq 5"),
    (9, {}, "9 dense models cannot become 8 experts .* --num-experts 9 or more"),
    (5, {"granularity": 2}, "cannot become 4 experts .* --num-experts 10 or more"),
])  # fmt: skip
def test_what_would_not_start_as_the_dense_model_is_refused(
    dense, tmp_path, number, options, words
):
    with pytest.raises(CheckpointError, match=words):
        upcycle([dense.path] * number, str(tmp_path / "x.pt"), Upcycling(8, **options))


def test_sources_that_cannot_be_are_refused(dense, tmp_path):
    sparse, out = str(tmp_path / "sparse.pt"), str(tmp_path / "out.pt")
    assert upcycle(dense.path, sparse, Upcycling(8, top_k=1, inexact=True)) == sparse
    for sources, target, words in (
        (sparse, out, "has experts; `grow` makes more of them"),
        ([dense.path, sparse], out, "sparse.pt: has experts"),
        (["no.pt", dense.path], dense.path, "is the source itself"),
    ):
        with pytest.raises(CheckpointError, match=words):
            upcycle(sources, target, Upcycling(8), force=True)
    state, other = load_file(dense.path), str(tmp_path / "other.pt")
    for options, words in (
        ({"decoder_normalize_before": False}, "norms come after the blocks"),
        ({"scale_fc": True}, "--scale-fc True cannot be combined with experts"),
    ):
        cfg = {**state["cfg"], "model": {**state["cfg"]["model"], **options}}
        torch.save({**state, "cfg": cfg}, other)
        with pytest.raises(CheckpointError, match=words):
            upcycle(other, out, Upcycling(8))
    trainer = make_trainer(make_config("--moe-expert-count", "8", *KINDS[LM][2]))
    with pytest.raises(ValueError, match="is dense, .* by python -m .* upcycle .*--num-experts 8"):
        trainer.load_checkpoint(dense.path)


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
    dense, tmp_path, monkeypatch, capsys, options, sizes, message
):
    """By a command that names both files and what they have, and writes nothing."""
    monkeypatch.chdir(tmp_path)
    state = load_file(dense.path)
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


def test_a_set_of_a_version_that_held_new_experts_back_loads(tmp_path):
    """Its option and what its history says of that are ignored; a run keeps the history."""
    path, again, sample = str(tmp_path / "m.pt"), str(tmp_path / "again.pt"), make_batch(1)
    flags = ["--moe-expert-count", "4", "--moe-load-bias", "quantile"]
    trainer = make_trainer(make_config("--moe-capacity-factor", "0", *flags))
    trainer.train_step([sample])
    held = {"ramp": 9, "held": {"decoder.layers.1.moe_layer.": [1, 3]}}
    entry = {"what": "grow", "how": "copies", "before": 2, "after": 4, "update": 1, **held}
    trainer.growth.resume({"moe_growth": [entry]})
    with open_dict(trainer.cfg.model):
        trainer.cfg.model.moe_growth_updates = 9
    save(trainer, path)
    resumed = _loaded(path, *flags, "--decoder-layers", "2")
    torch.testing.assert_close(_logits(resumed, sample), _logits(trainer, sample), **EXACT)
    save(resumed, again)
    text = "2 -> 4 (grow after 1 updates: copies)"
    assert inspect(path)["growth"] == inspect(again)["growth"] == [text]
    grown = inspect(grow(again, str(tmp_path / "grown.pt"), 8))["growth"]
    assert grown == [text, "4 -> 8 (grow after 1 updates: copies of each in turn)"]


def test_commands_lead_from_dense_to_experts_and_back(dense, tmp_path, programs):
    """What a step does not change keeps every bit; the processes have no model."""
    up, grown, fewer, back = (tmp_path / f"{name}.pt" for name in ("up", "grown", "fewer", "back"))
    loads = [9, 1, 9, 1, 9, 1, 9, 1], [1, 2, 9, 3]  # the originals' and the copies' turns
    lines = [json.dumps({"layers": {"1": load, "3": load}}) for load in loads]
    (tmp_path / "expert_load.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for words in (
        f"upcycle {dense.path} {up} --num-experts 4 --ranks 2",
        f"grow {up} {grown} --num-experts 8 --ranks 4",
        f"shrink {grown} {fewer} --num-experts 4",
        f"shrink {fewer} {back} --dense one",
    ):
        done = programs.run(["-m", "fairseq_tutel.checkpoint", *words.split()])
        assert done.status == 0, done.text
    first, last = (read_set(str(each)).state_of(range(4))["model"] for each in (up, fewer))
    assert_same_state(last, first)
    assert_same_state(load_file(str(back))["model"], load_file(dense.path)["model"])
    kinds = [text.split(" (")[0] for text in inspect(str(back))["growth"]]
    assert kinds == ["dense -> 4", "4 -> 8", "8 -> 4", "4 -> dense"]
