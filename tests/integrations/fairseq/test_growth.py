"""Growth of checkpoints against stock fairseq's own dense models, in fp64."""

import copy
import json
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models.transformer import TransformerModel
from fairseq.modules import gelu
from fairseq.options import get_training_parser, parse_args_and_arch
from helpers.assertions import assert_same_state
from helpers.sets import member
from helpers.training import convert, make_batch, make_config, make_trainer, save
from helpers.translation import make_pairs, pair_config
from omegaconf import open_dict

from fairseq_tutel.checkpoint import CheckpointError, inspect, load_file, read_set
from fairseq_tutel.checkpoint.growth import Upcycling, grow, to_dense, upcycle
from fairseq_tutel.distributed import ExpertParallelGroups
from fairseq_tutel.integrations.fairseq.models import TransformerMoE
from fairseq_tutel.integrations.fairseq.trainer import memory
from fairseq_tutel.integrations.fairseq.trainer.growth import RunGrowth

FOUR_LAYERS = ["--decoder-layers", "4"]
EXACT = {"rtol": 0, "atol": 1e-12}  # of logits, in fp64


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

    def __init__(self, folder, config, sample):
        self.trainer, self.sample = make_trainer(config, sample), sample
        for _ in range(3):
            self.trainer.train_step([sample])
        self.path = str(folder / "dense.pt")
        self.trainer.consolidate_optimizer()
        save(self.trainer, self.path)
        self.logits = _logits(self.trainer, sample)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    return Dense(folder, make_config(*FOUR_LAYERS, moe=False), make_batch(1))


def _loaded(path, *flags, config=make_config, sample=None, **options):
    """A trainer with what a set holds."""
    trainer = make_trainer(config("--moe-capacity-factor", "0", *flags), sample)
    assert trainer.load_checkpoint(path.replace(".pt", "-shared.pt"), **options)
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
    ids=lambda how: (
        f"E={how.num_experts} K={how.top_k} G={how.granularity} {how.shared * 'shared'}"
    ),
)
def test_an_upcycled_language_model_starts_as_the_dense_one(dense, tmp_path, how):
    path = upcycle(dense.path, str(tmp_path / "up.pt"), how)
    trainer = _loaded(path, *FOUR_LAYERS, *_flags(how))
    torch.testing.assert_close(_logits(trainer, dense.sample), dense.logits, **EXACT)
    rows = [layer.gate.wg.weight for layer in trainer.get_model().moe_layers.values()]
    assert [len(each) for each in rows] == [how.num_experts] * (4 // how.freq)
    assert 0.01 < float(rows[0].detach().std()) < 0.03
    # without the optimizer's state the schedule begins anew
    assert inspect(path)["num_updates"] == trainer.get_num_updates() == 0
    assert inspect(path)["growth"][0].endswith("of a dense model after 3 updates)")


def test_an_upcycled_encoder_decoder_starts_as_the_dense_one(tmp_path, caplog):
    dense = Dense(tmp_path, pair_config(moe=False), make_pairs(1))
    how = Upcycling(4, top_k=2)
    path = upcycle(dense.path, str(tmp_path / "up.pt"), how, ranks=2)
    trainer = _loaded(path, *_flags(how), config=pair_config, sample=dense.sample)
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
LM = (
    "--task dummy_lm --tokens-per-sample 8 --arch transformer_lm_gpt2_tiny "
    "--criterion cross_entropy --share-decoder-input-output-embed --decoder-learned-pos "
    "--attention-dropout 0"
)
PAIRS = (
    "--task dummy_mt --arch transformer_tiny --criterion label_smoothed_cross_entropy "
    "--label-smoothing 0.2 --share-all-embeddings --encoder-normalize-before --activation-fn gelu "
    "--decoder-ffn-embed-dim 48 --dropout 0.3 --max-source-positions 99"
)


@pytest.mark.parametrize("words, batch", [(LM, make_batch), (PAIRS, make_pairs)])
def test_the_flags_that_upcycle_prints_train_on(words, batch, tmp_path, caplog):
    """With the data and the optimizer alone beside them; fairseq's parser reads them."""

    def parsed(words):
        given = f"{words} {RUN}".split()
        return convert(parse_args_and_arch(get_training_parser(), input_args=given))

    dense = Dense(tmp_path, parsed(words), batch(1))
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
    save(_loaded(path, *FOUR_LAYERS, *_flags(how)), two, best=0.7)
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
    built.load_state_dict(load_file(out)["model"])
    want = _logits(built, sample, False)
    torch.testing.assert_close(_logits(model, sample, False), want, **EXACT)


def test_what_would_not_start_as_the_dense_model_is_refused(dense, tmp_path):
    out = str(tmp_path / "x.pt")
    for options, words in (
        ({"top_k": 1}, "--top-k 1 weights an expert by the gate's probability.*--allow-inexact"),
        ({"top_k": 2, "granularity": 4}, "--granularity 4 does not divide --top-k 2"),
        ({"top_k": 2, "drop_ratio": 0.5}, "--drop-ratio 0.5 draws hidden units anew"),
        ({"granularity": 3}, "--num-experts 8 is no multiple of --granularity 3"),
        ({"top_k": 9}, "--top-k 9 must lie between 1 and --num-experts 8"),
        ({"freq": 5}, "none of its layers becomes sparse, --moe-freq 5"),
    ):
        with pytest.raises(CheckpointError, match=words):
            upcycle(dense.path, out, Upcycling(8, **options))
    assert upcycle(dense.path, out, Upcycling(8, top_k=1, inexact=True)) == out
    with pytest.raises(CheckpointError, match="has experts; `grow` makes more of them"):
        upcycle(out, str(tmp_path / "y.pt"), Upcycling(8))
    state = load_file(dense.path)
    for options, words in (
        ({"decoder_normalize_before": False}, "norms come after the blocks"),
        ({"scale_fc": True}, "--scale-fc True cannot be combined with experts"),
    ):
        cfg = {**state["cfg"], "model": {**state["cfg"]["model"], **options}}
        torch.save({**state, "cfg": cfg}, tmp_path / "other.pt")
        with pytest.raises(CheckpointError, match=words):
            upcycle(str(tmp_path / "other.pt"), out, Upcycling(8), force=True)
    trainer = make_trainer(make_config("--moe-expert-count", "8", *FOUR_LAYERS))
    with pytest.raises(ValueError, match="is dense, .* by python -m .* upcycle .*--num-experts 8"):
        trainer.load_checkpoint(dense.path)


def test_a_set_of_a_version_that_held_new_experts_back_loads(tmp_path):
    """Its option and what its history says of that are ignored; a run keeps the history."""
    path, again, sample = str(tmp_path / "m.pt"), str(tmp_path / "again.pt"), make_batch(1)
    flags = ["--moe-expert-count", "4", "--moe-load-bias", "quantile"]
    trainer = make_trainer(make_config("--moe-capacity-factor", "0", *flags), sample)
    trainer.train_step([sample])
    held = {"ramp": 9, "held": {"decoder.layers.1.moe_layer.": [1, 3]}}
    entry = {"what": "grow", "how": "copies", "before": 2, "after": 4, "update": 1, **held}
    trainer.growth.resume({"moe_growth": [entry]})
    with open_dict(trainer.cfg.model):
        trainer.cfg.model.moe_growth_updates = 9
    for layer in trainer.get_model().moe_layers.values():
        layer.gate.load_bias[1::2] -= 299
    save(trainer, path)
    file = member(path, "shared")
    (evaluated,), _ = checkpoint_utils.load_model_ensemble([file], task=trainer.task)
    torch.testing.assert_close(_logits(evaluated, sample), _logits(trainer, sample), **EXACT)
    resumed = _loaded(path, *flags)
    for update in range(5):  # the rule lets the experts in
        resumed.train_step([make_batch(update)])
    for layer in resumed.get_model().moe_layers.values():
        assert layer.gate.load_bias.abs().max() < 100
    save(resumed, again)
    text = "2 -> 4 (grow after 1 updates: copies)"
    assert inspect(path)["growth"] == inspect(again)["growth"] == [text]
    grown = inspect(grow(again, str(tmp_path / "grown.pt"), 8))["growth"]
    assert grown == [text, "4 -> 8 (grow after 6 updates: copies of each in turn)"]


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


@pytest.mark.parametrize(
    ("options", "sizes", "message"),
    [
        ({}, {"num_experts": 16}, "must make more experts, but there are 16"),
        ({}, {"world_size": 3, "ep_size": 3}, "8 experts cannot be spread over 3"),
        (
            {"moe_expert_parallel_size": 3},
            {"world_size": 6, "ep_size": 3},
            "must divide the number of ranks, 6, and that of experts, 8",
        ),
        (
            {"moe_parallelism_r": "4"},
            {"num_experts": 2, "world_size": 16, "ep_size": 2, "placement": "sliced"},
            "--moe-parallelism-r 4 does not fit 8 experts on 16 ranks: choose one of 0, 1, 2",
        ),
        ({}, {"num_experts": 1, "world_size": 40, "placement": "sliced"}, "cannot be cut into 5"),
        ({"moe_tune_file": "x.json"}, {}, "sizes that --moe-tune-file is for"),
    ],
)
def test_growth_that_cannot_be_is_refused_before_the_first_update(
    options, sizes, message, monkeypatch
):
    """Placements of more ranks than a test has: what is checked needs no others."""
    cfg = make_config("--moe-grow-at", "300:8", "--moe-expert-count", "4")
    cfg.checkpoint.no_save = False
    for name, value in options.items():
        cfg.model[name] = value
    layer = SimpleNamespace(experts=SimpleNamespace(hidden_dim=24))
    groups = ExpertParallelGroups(**{"num_experts": 4, **sizes})
    model = SimpleNamespace(moe_groups=groups, moe_layers={1: layer})
    started = "needs fairseq-train, and ranks of python -m fairseq_tutel.launch or torchrun"
    for method, words in (("tcp://h:1", started), ("env://", message)):
        cfg.distributed_training.distributed_world_size = 2
        cfg.distributed_training.distributed_init_method = method
        if method != "env://" and "moe_tune_file" in options:
            continue
        with pytest.raises(ValueError, match=f"--moe-grow-at 300:8.*{words}"):
            RunGrowth(cfg, model)
    cfg.distributed_training.distributed_world_size = 1
    monkeypatch.setattr(sys, "argv", ["fairseq-hydra-train"])
    if "moe_tune_file" not in options:
        with pytest.raises(ValueError, match=started):
            RunGrowth(cfg, model)


def test_the_memory_of_the_model_to_come_is_checked_before_the_first_update(monkeypatch):
    eight = make_trainer(make_config("--moe-expert-count", "8")).memory_of_step()
    cfg = make_config("--moe-grow-at", "300:8", "--moe-expert-count", "4")
    cfg.checkpoint.no_save = False
    trainer = make_trainer(cfg)
    assert trainer.memory_of_step(8).kinds == eight.kinds != trainer.memory_of_step().kinds
    needed, mine = sum(eight.kinds.values()), 4 * sum(p.numel() for p in trainer.model.parameters())
    for free in (needed - mine, needed - mine - 1):
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        fits = free == needed - mine
        with nullcontext() if fits else pytest.raises(ValueError, match="300:8.* does NOT fit"):
            make_trainer(cfg)
