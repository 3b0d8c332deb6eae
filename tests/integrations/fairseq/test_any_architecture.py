"""``--arch NAME_moe``: names, criterions, layers and checkpoints of any model class."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils, criterions, models
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.logging import metrics
from helpers import architectures
from helpers.architectures import ROWS
from helpers.assertions import rms_ratio
from helpers.training import save

from fairseq_tutel import training
from fairseq_tutel.integrations.fairseq.models import listing as listing_module
from fairseq_tutel.integrations.fairseq.models import stock_layers
from fairseq_tutel.integrations.fairseq.models.listing import TRAINED, listing
from fairseq_tutel.integrations.fairseq.options.options import moe_frequencies
from fairseq_tutel.integrations.fairseq.trainer import trainer as trainers
from fairseq_tutel.moe.model import moe_layers


@pytest.fixture(scope="module")
def wav2vec_set(made_data, tmp_path_factory):
    """A model with experts that others begin with, and the file of its set."""
    trainer = architectures.make_trainer(ROWS["wav2vec2"], made_data, "--optimizer", "adam")
    path = str(tmp_path_factory.mktemp("wav2vec") / "x.pt")
    save(trainer, path, 0)
    architectures.take_back()
    return trainer.model, path


class InSevenths(CrossEntropyCriterion):
    """The same loss in other units: sevenths of a token."""

    def forward(self, model, sample, reduce=True):
        loss, size, log = super().forward(model, sample, reduce)
        return 7 * loss, 7 * size, {**log, "loss": 7 * log["loss"], "sample_size": 7 * size}


def _language_model(data, *options):
    return architectures.make_trainer(ROWS["transformer_lm"], data, *options)


@pytest.mark.parametrize("criterion", ["cross_entropy", "in_sevenths", "moe_cross_entropy"])
def test_any_criterion_gets_the_gate_loss_once(criterion, data):
    if "in_sevenths" not in criterions.CRITERION_REGISTRY:
        register = criterions.register_criterion("in_sevenths", CrossEntropyCriterionConfig)
        register(InSevenths)
    trainer = _language_model(data, "--criterion", criterion, "--clip-norm", "0")
    model = trainer.model.train()
    ((sample,),) = architectures.batches(trainer, 1, total=1)
    with training.collect_aux(model) as aux:
        logits = model(**sample["net_input"])[0].float()
    logp = logits.log_softmax(-1).gather(2, sample["target"][..., None])[..., 0]
    plain = -logp[sample["target"] != 1].mean()
    weights = list(model.parameters())
    want = torch.autograd.grad(plain + 0.1 * aux.loss, weights, allow_unused=True)
    with metrics.aggregate(new_root=True) as logged:
        trainer.train_step([sample])
    for weight, grad in zip(weights, want, strict=True):
        torch.testing.assert_close(weight.grad, grad, rtol=1e-4, atol=1e-6)
    logged = logged.get_smoothed_values()
    assert logged["moe_gate_loss"] == pytest.approx(float(aux.loss), rel=1e-3)
    assert {"moe_util_load", "entropy_gating"} <= logged.keys()
    shown = plain + 0.1 * aux.loss if criterion.startswith("moe_") else plain
    assert logged["loss"] == pytest.approx(float(shown) / 0.6931, rel=1e-3)


@pytest.mark.parametrize("name", ["transformer_align", "transformer_lm"])
def test_a_criterion_keeps_the_default_of_its_own_weight(name, data, monkeypatch):
    """Beside a class with a namespace or a dataclass; a weight that is given is for both."""
    monkeypatch.setattr(architectures, "SPARSE", "--moe-expert-count 4")
    for given, want in (([], [1.0, None]), (["--moe-gate-loss-wt", "0.5"], [0.5, 0.5])):
        flags = ["--criterion", "moe_cross_entropy", *given]
        trainer = architectures.make_trainer(ROWS[name], data, *flags)
        found = trainer.criterion.gate_loss_weight, trainer.cfg.model.moe_gate_loss_wt
        assert list(found) == want


def test_every_name_of_the_registry_has_one_with_experts():
    names = models.ARCH_MODEL_REGISTRY
    dense = [name for name in names if not name.endswith("_moe") and "_moe_" not in name]
    assert len(dense) >= 149
    assert [name for name in dense if f"{name}_moe" not in names] == []
    # one with a dataclass has one of its own, and its options are the dense ones and more
    sparse = models.MODEL_DATACLASS_REGISTRY["wav2vec2_moe"].__dataclass_fields__
    assert models.MODEL_DATACLASS_REGISTRY["wav2vec2"].__dataclass_fields__.keys() < sparse.keys()


@pytest.mark.long
def test_the_listing_names_stacks_or_why_there_are_none():
    """The page has the same rows; those that the long table trains say so."""
    page = Path(listing_module.__file__).parents[1] / "ARCHITECTURES.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = {row.split(" | ")[1]: row for word in ("conv", "wav2vec_seq") for row in
            listing(word).splitlines()[2:]}  # fmt: skip
    assert set(rows.values()) <= set(lines)
    wanted = " trains | encoder.transformer_layers (6), decoder.layers (6) |"
    assert "`convtransformer_moe`" in rows["convtransformer"]
    assert rows["convtransformer"].endswith(wanted)
    assert "| trains | encoder.w2v_model.encoder.layers" in rows["wav2vec_seq2seq"]
    assert "| refused | it has no layer whose feed-forward" in rows["lightconv"]
    architectures.add_names()
    assert {models.ARCH_MODEL_NAME_REGISTRY[row.arch] for row in ROWS.values()} == TRAINED
    verdicts = dict(line.split(" | ")[1:3] for line in lines if line.count(" | ") == 3)
    assert {name for name, verdict in verdicts.items() if verdict == "trains"} == TRAINED


def test_blocks_are_chosen_by_their_names(data):
    only = _language_model(data, "--moe-blocks", r"layers\.0$").model
    assert list(moe_layers(only)) == ["decoder.layers.0.fc1"]
    dense = _language_model(data, "--moe-freq", "0")
    assert type(dense).__name__ == "Trainer" and not moe_layers(dense.model)


LSTM = ROWS["transformer_lm"].options.partition(" --decoder-layers")[0] + " --decoder-layers 1"
WIDE = "--moe-overlap-degree auto --decoder-embed-dim 32 --decoder-output-dim 32"


@pytest.mark.parametrize("row, option, why", [
    ("transformer_lm", "--moe-freq 3", "--moe-freq 3 makes no MoE layer .decoder.layers has 2"),
    (ROWS["transformer_lm"]._replace(arch="lstm_lm", options=LSTM), "",
     "LSTMLanguageModel has no layer whose .* --moe-blocks"),
    ("transformer_align", WIDE, "'auto' for overlap_degree: .* 16 and 32 wide"),
    # what would have no effect on the experts of a file
    ("wav2vec_ctc", "--moe-lora-rank 4", "all experts come from .*x.pt, .* with 0: leave"),
    ("wav2vec_ctc", "--moe-load-bias sign", "all experts come from .* with none: leave"),
    ("wav2vec_ctc", "--moe-expert-count 8", "all experts come from .* with 4: leave"),
    ("wav2vec_seq2seq", "--moe-load-bias sign", "layers with --moe-load-bias none and sign"),
    ("wav2vec_seq2seq", "--moe-expert-count 8", "layers with --moe-expert-count 4 and 8"),
])  # fmt: skip
def test_refusals(row, option, why, data, wav2vec_set):
    more = ["--w2v-path", wav2vec_set[1]] if "wav2vec" in row else []
    row = ROWS[row] if isinstance(row, str) else row
    with pytest.raises(ValueError, match=why):
        architectures.make_trainer(row, data, *more, *option.split())


def _gradients(row, data, *options):
    trainer = architectures.make_trainer(row, data, *options, "--clip-norm", "0")
    trainer.train_step(next(architectures.batches(trainer, 1)))
    return {name: p.grad for name, p in trainer.model.named_parameters()}


def test_checkpointed_layers_keep_the_gate_loss(data, monkeypatch):
    """The same gradients as without, of all parameters and in padded batches."""
    offloaded = []

    class Offload(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self):
            super().__init__(lambda x: offloaded.append(x) or x.clone(), lambda x: x)

    monkeypatch.setattr(stock_layers, "save_on_cpu", Offload)
    flags = ["--moe-freq", "1", "--use-moe-pad-mask"]
    want = _gradients(ROWS["bart"], data, *flags)
    for option, number in (("--checkpoint-activations", 0), ("--offload-activations", 6)):
        found = _gradients(ROWS["bart"], data, *flags, option)
        inputs = [x for x in offloaded if x.requires_grad]  # of 4 layers, 2 with another input
        assert len(inputs) == 2 * number  # 2 batches
        for name, grad in want.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)


def test_padding_goes_to_no_expert(data):
    flags = ["--moe-freq", "1", "--use-moe-pad-mask"]
    trainer = architectures.make_trainer(ROWS["bart"], data, *flags)
    (sample,) = next(architectures.batches(trainer, 1, total=1))
    with training.collect_aux(trainer.model) as aux:
        trainer.model(**sample["net_input"])
    tokens = {
        side: int(sample["net_input"][name].ne(1).sum())
        for side, name in (("encoder", "src_tokens"), ("decoder", "prev_output_tokens"))
    }
    assert int(sample["net_input"]["src_tokens"].eq(1).sum()) > 0
    for name, load_E in aux.load.items():
        assert int(load_E.sum()) == 2 * tokens[name.partition(".")[0]], name


def test_frozen_layers_add_no_gate_loss_and_thaw(data):
    row, flags = ROWS["wav2vec_ctc"], ["--moe-load-bias", "sign"]
    trainer = architectures.make_trainer(row, data, "--freeze-finetune-updates", "1", *flags)
    gate = trainer.model.get_submodule(f"{row.stacks[0]}.1.fc1.gate")
    updates = architectures.batches(trainer, 2)
    trainer.train_step(next(updates))
    assert gate.wg.weight.grad is None or not gate.wg.weight.grad.any()
    assert not gate.load_bias.any()
    trainer.train_step(next(updates))
    assert gate.wg.weight.grad.any() and gate.load_bias.any()


def test_metrics_are_means_over_the_layers_that_were_called(data):
    flags = ["--moe-freq", "1", "--encoder-layerdrop", "0.6"]
    trainer = architectures.make_trainer(ROWS["roberta"], data, *flags)
    stock, passes = trainer.criterion.forward, []

    def forward(model, *args, **kwargs):
        with training.collect_aux(model) as aux:
            result = stock(model, *args, **kwargs)
        if aux.layers:
            passes.append((len(aux.layers), aux.metrics_dict(), aux.utilisation()))
        return result

    trainer.criterion.forward = forward
    (samples,) = architectures.batches(trainer, 1, total=8)
    with metrics.aggregate(new_root=True) as logged:
        trainer.train_step(samples)
    logged, layers = logged.get_smoothed_values(), sum(number for number, _, _ in passes)
    assert 0 < len(passes) < 8 and layers < 2 * len(passes)
    entropy = sum(found["entropy_gating"] for _, found, _ in passes) / len(passes)
    assert logged["entropy_gating"] == pytest.approx(entropy, abs=2e-3)
    load = sum(number * used["moe_util_load"] for number, _, used in passes) / layers
    assert logged["moe_util_load"] == pytest.approx(load, abs=0.02)


@pytest.mark.parametrize("dense", [True, False])
def test_finetuning_builds_on_a_model_with_experts(dense, data, wav2vec_set):
    """By the dense name and by the other one: both find the experts inside, and train them."""
    inner, path = wav2vec_set
    outer = architectures.make_trainer(ROWS["wav2vec_ctc"], data, "--w2v-path", path, dense=dense)
    assert type(outer).__name__ == "MoETrainer"
    prefix = "w2v_encoder.w2v_model."
    names = [name.removeprefix(prefix) for name in moe_layers(outer.model)]
    assert names == list(moe_layers(inner)) == ["encoder.layers.1.fc1"]
    for name, value in inner.encoder.layers[1].named_parameters():
        other = outer.model.get_parameter(f"{prefix}encoder.layers.1.{name}")
        assert torch.equal(other, value), name
    outer.train_step(next(architectures.batches(outer, 1)))
    assert outer.model.get_parameter(f"{prefix}encoder.layers.1.fc1.gate.wg.weight").grad.any()


@pytest.mark.parametrize("name", ["bart", "transformer_lm"])
def test_programs_load_what_was_saved(name, data, tmp_path):
    """The model of a class with a namespace or a dataclass, also with experts in int8.

    Generation then drops nothing.
    """
    limit = ["--moe-eval-capacity-factor", "0.1"]
    trainer = architectures.make_trainer(ROWS[name], data, "--optimizer", "adam", *limit)
    (sample,) = next(architectures.batches(trainer, 1, total=1))
    path = str(tmp_path / "x.pt")
    save(trainer, path, 0)
    load = checkpoint_utils.load_model_ensemble_and_task
    ((model,), *_), ((small,), *_) = load([path]), load([path], {"moe_expert_dtype": "int8"})
    for layer in moe_layers(trainer.model).values():
        layer.config = dataclasses.replace(layer.config, eval_capacity_factor=0.0)
    each = (model, small, trainer.model)
    with torch.no_grad():
        found, held, want = (m.eval()(**sample["net_input"])[0] for m in each)
    torch.testing.assert_close(found, want)
    assert 0 < rms_ratio(held, want) < 0.05


def test_hydra_is_told_the_command_for_a_class_without_a_dataclass():
    model = models.MODEL_REGISTRY["s2t_transformer_moe"]
    with pytest.raises(ValueError, match="not from Hydra: fairseq-train .* --arch s2t_tr"):
        model.build_model(SimpleNamespace(_name="s2t_transformer_s_moe"), None)


@pytest.mark.parametrize(
    "task", [{"eval_bleu": True}, {"eval_wer": True}, {"_name": "online_backtranslation"}]
)
def test_what_decodes_on_each_rank_is_refused_before_work(task):
    groups = SimpleNamespace(needs_sync=True, world_size=2)
    cfg = SimpleNamespace(
        task=SimpleNamespace(**task), dataset=SimpleNamespace(disable_validation=False)
    )
    with pytest.raises(ValueError, match="each rank alone, .* --moe-expert-parallel-size 1"):
        trainers._refuse_decoding(cfg, SimpleNamespace(moe_groups=groups))
    groups.needs_sync = False
    trainers._refuse_decoding(cfg, SimpleNamespace(moe_groups=groups))


def _outputs(trainer, sample):
    """Of the model, or of the models of all pairs of languages, which share an encoder."""
    model = trainer.model.eval()
    if "net_input" in sample:
        return [model(**sample["net_input"])[0]]
    return [each(**sample[pair]["net_input"])[0] for pair, each in model.models.items()]


@pytest.mark.parametrize("name", ["transformer_lm", "s2t_conformer", "multilingual_transformer"])
def test_a_dense_checkpoint_becomes_experts_that_compute_the_same(name, data, tmp_path):
    row, path = ROWS[name], str(tmp_path / "dense.pt")
    dense = architectures.make_trainer(row, data, dense=True)
    ((sample,),) = architectures.batches(dense, 1, total=1)
    dense.train_step([dict(sample)])
    dense.consolidate_optimizer()
    dense.save_checkpoint(path, {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}})
    sparse = architectures.make_trainer(row, data)
    gates = {n: p.clone() for n, p in sparse.model.named_parameters() if "gate.wg" in n}
    sparse.load_checkpoint(path)
    assert moe_layers(sparse.model) and sparse.get_num_updates() == 0
    for name, gate in gates.items():
        assert torch.equal(sparse.model.get_parameter(name), gate)
    found, want = (_outputs(each, sample) for each in (sparse, dense))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_layers_that_are_no_number_are_not_counted():
    """Options of fairseq's fconv, which is dense; its programs ask, too."""
    args = SimpleNamespace(encoder_layers="[(512, 3)] * 20", decoder_layers="[(512, 3)] * 20")
    assert moe_frequencies(args) == (0, 0)
