"""Growth of checkpoints against stock fairseq's own dense models, in fp64."""

import copy

import pytest
import torch
from fairseq.modules import gelu
from helpers.training import make_batch, make_config, make_trainer, save
from helpers.translation import make_pairs, pair_config

from fairseq_tutel.checkpoint import CheckpointError, load_file, read_set
from fairseq_tutel.checkpoint.growth import Upcycling, to_dense, upcycle

FOUR_LAYERS = ["--decoder-layers", "4"]
EXACT = {"rtol": 0, "atol": 1e-12}  # of logits, in fp64
FC1 = "decoder.layers.1.fc1.weight"
MOE = "decoder.layers.1.moe_layer."


def _logits(trainer, sample):
    model = copy.deepcopy(trainer.get_model()).double()
    for module in model.modules():
        if getattr(module, "activation_fn", None) is gelu:  # which computes in fp32
            module.activation_fn = torch.nn.functional.gelu
    model.train()  # the configs have no dropout; nothing may be dropped in training, either
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
        Upcycling(4, top_k=2, granularity=2),
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
    assert trainer.get_num_updates() == 0  # without the optimizer's state the schedule begins anew


def test_an_upcycled_encoder_decoder_starts_as_the_dense_one(tmp_path):
    dense = Dense(tmp_path, pair_config(moe=False), make_pairs(1))
    how = Upcycling(4, top_k=2, copy_optimizer=True)
    path = upcycle(dense.path, str(tmp_path / "up.pt"), how, ranks=2)
    trainer = _loaded(path, *_flags(how), config=pair_config, sample=dense.sample)
    torch.testing.assert_close(_logits(trainer, dense.sample), dense.logits, **EXACT)
    assert trainer.get_num_updates() == 3
    back = to_dense(path, str(tmp_path / "back.pt"))
    stock = make_trainer(pair_config(moe=False), dense.sample)
    assert stock.load_checkpoint(back)
    torch.testing.assert_close(_logits(stock, dense.sample), dense.logits, **EXACT)


def _moments(trainer):
    """Stock Adam's state by name; the order is that of the model's parameters."""
    states = trainer.optimizer.state_dict()["state"].values()
    names = [name for name, _ in trainer.get_model().named_parameters()]
    return dict(zip(names, states, strict=True))


def test_the_optimizer_goes_on_with_its_state_scaled_for_experts(dense, tmp_path):
    how = Upcycling(8, top_k=2, copy_optimizer=True)
    path = upcycle(dense.path, str(tmp_path / "up.pt"), how, ranks=4)
    source, want = read_set(path), _moments(dense.trainer)
    named = source.state_of(range(8))["last_optimizer_state"]["named_state"]
    for number in range(8):
        got = named[f"{MOE}experts.{number}.fc1.weight"]
        assert torch.equal(got["exp_avg"], want[FC1]["exp_avg"] / 8)
        assert torch.equal(got["exp_avg_sq"], want[FC1]["exp_avg_sq"] / (8 * 2))
        assert got["step"] == 3
    gate = named[f"{MOE}gate.wg.weight"]
    assert gate["step"] == 0 and not gate["exp_avg"].any() and not gate["exp_avg_sq"].any()
    for name, state in want.items():
        if ".1.fc" not in name and ".3.fc" not in name:
            assert torch.equal(named[name]["exp_avg_sq"], state["exp_avg_sq"]), name
    trainer = _loaded(path, *FOUR_LAYERS, *_flags(how))
    assert trainer.get_num_updates() == 3
    loss = trainer.train_step([dense.sample])["loss"]
    assert loss < 7 and trainer.get_num_updates() == 4

    # stock --fp16 keeps the statistics of all parameters in one vector, in the model's order
    state = torch.load(dense.path, weights_only=False)
    flat = {
        key: torch.cat([each[key].flatten() for each in want.values()])
        for key in ("exp_avg", "exp_avg_sq")
    }
    groups = [{**state["last_optimizer_state"]["param_groups"][0], "params": [0]}]
    stored = {"state": {0: {"step": 3, **flat}}, "param_groups": groups, "loss_scale": 4.0}
    torch.save({**state, "last_optimizer_state": stored}, tmp_path / "flat.pt")
    other = upcycle(str(tmp_path / "flat.pt"), str(tmp_path / "up16.pt"), how)
    again = read_set(other).state_of(range(8))["last_optimizer_state"]
    assert again["loss_scale"] == 4.0 and again["named_state"].keys() == named.keys()
    for name, each in again["named_state"].items():
        assert each["step"] == named[name]["step"]
        assert all(torch.equal(each[k], named[name][k]) for k in flat), name


def test_what_would_not_start_as_the_dense_model_is_refused(dense, tmp_path):
    out = str(tmp_path / "x.pt")
    for options, words in (
        ({"top_k": 1}, "--top-k 1 weights an expert by the gate's probability.*--allow-inexact"),
        ({"top_k": 2, "granularity": 4}, "--granularity 4 does not divide --top-k 2"),
        ({"top_k": 2, "drop_ratio": 0.5}, "--drop-ratio 0.5 draws hidden units anew"),
        ({"granularity": 3}, "--num-experts 8 is no multiple of --granularity 3"),
        ({"top_k": 9}, "--top-k 9 must lie between 1 and --num-experts 8"),
        ({"freq": 5}, "none of its layers becomes sparse with --moe-freq 5"),
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


def _there_and_back(dense, folder):
    """Names of the sets from the dense model to fewer experts and to a dense model again."""
    names = ["up", "grown", "resharded", "fewer", "back"]
    return dense.path, *(str(folder / f"{name}.pt") for name in names)
