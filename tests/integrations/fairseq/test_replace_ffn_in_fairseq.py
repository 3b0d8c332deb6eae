"""``replace_ffn`` on layers of fairseq's transformers, and on its wav2vec 2.0."""

import pytest
import torch
from fairseq.models.transformer import TransformerConfig
from fairseq.models.wav2vec import Wav2Vec2Config, Wav2Vec2Model
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from helpers.replaced import take_steps
from helpers.training import make_config, make_trainer, own_batches
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.integrations.fairseq.trainer import trainer as trainers
from fairseq_tutel.moe import MoELayer, every_other, replace_ffn


def test_a_norm_between_the_parts_is_refused():
    config = TransformerConfig()
    config.scale_fc = True
    model = nn.ModuleList([TransformerDecoderLayerBase(config)])
    with pytest.raises(ValueError, match=r"^0: .* something else between fc1, .*--scale-fc"):
        replace_ffn(model, "0$", 4)
    assert isinstance(model[0].fc1, nn.Linear)


@pytest.mark.parametrize("norm_first", [False, True])
def test_wav2vec_gets_experts_and_trains(norm_first):
    """fairseq's own speech model: the same features, then a training step."""
    config = Wav2Vec2Config(
        conv_feature_layers="[(8, 10, 5), (8, 3, 2)]", encoder_layers=2, encoder_embed_dim=16,
        encoder_ffn_embed_dim=32, encoder_attention_heads=2, conv_pos=4, conv_pos_groups=2,
        dropout=0.0, attention_dropout=0.0, encoder_layerdrop=0.0, layer_norm_first=norm_first,
        final_dim=16, required_seq_len_multiple=1, mask_prob=0.0, dropout_input=0.0,
    )  # fmt: skip

    def make():  # its weight norm cannot be copied
        torch.manual_seed(0)
        return Wav2Vec2Model(config).eval()

    model, dense, sound = make(), make(), torch.randn(2, 400)
    blocks = every_other(model, r"encoder\.layers\.\d+$")
    replace_ffn(model, blocks, 4, copy_weights=True, capacity_factor=0.0)
    layer = model.encoder.layers[1].fc1
    assert isinstance(layer, MoELayer) and type(layer.experts).__name__ == "Experts"
    found, want = (each.extract_features(sound, None)["x"] for each in (model, dense))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)

    optimizer = torch.optim.AdamW(model.train().parameters(), 1e-3)
    first, *_, last = take_steps(
        model, optimizer, lambda: model.extract_features(sound, None)["x"].sub(1).square().mean()
    )
    assert last < first


CRITERIONS = {
    "moe_cross_entropy": ["--moe-gate-loss-wt", "0.5", "--moe-gate-loss-combine-method", "sum"],
    "moe_label_smoothed_cross_entropy": [
        "--label-smoothing", "0.1", "--moe-gate-loss-wt", "0.5",
        "--moe-gate-loss-combine-method", "sum",
    ],
}  # fmt: skip


def dense_run(*given, **moe):
    """fairseq's own language model with experts in both layers, under fairseq's own trainer."""
    host = make_trainer(make_config(*given, moe=False))
    replace_ffn(host.model, r"layers\.\d+$", 4, seed=0, capacity_factor=0.0, **moe)
    return host


@pytest.mark.parametrize("training_mode", [True, False])
@pytest.mark.parametrize("name", CRITERIONS)
def test_the_criterion_finds_the_losses_of_replaced_layers(name, training_mode):
    host = dense_run("--criterion", name, *CRITERIONS[name])
    model, criterion = host.model.train(training_mode), host.criterion.train(training_mode)
    (sample,) = own_batches(0, 1)
    with training.collect_aux(model) as aux:
        net_output = model(**sample["net_input"])
    plain = criterion.compute_loss(model, net_output, sample)[0]
    loss, size, logged = criterion(model, sample)
    torch.testing.assert_close(loss, plain + 0.5 * size * aux.loss)
    torch.testing.assert_close(logged["moe_loss"], size * aux.loss.detach())
    unused = aux.metrics_dict()["unused_expert1_count"]
    assert float(logged["unused_expert1_count"]) == pytest.approx(unused)
    loss.backward()
    weights = [layer.fc1.gate.wg.weight for layer in model.decoder.layers]
    want = torch.autograd.grad(plain + 0.5 * size * aux.loss, weights)
    torch.testing.assert_close([weight.grad for weight in weights], list(want))


def test_a_gate_loss_that_cannot_be_found_is_an_error():
    host = dense_run(*CRITERIONS["moe_cross_entropy"])
    type(host.model).moe_layers = property(lambda self: {0: self.decoder.layers[0].fc1})
    try:
        (sample,) = own_batches(0, 1)
        with pytest.raises(ValueError, match="LanguageModel has MoE layers, but returns"):
            host.criterion(host.model.train(), sample)
    finally:
        del type(host.model).moe_layers


@pytest.mark.parametrize("moe, ranks", [({"load_bias": "quantile"}, 1), ({}, 2), ({}, 1)])
def test_stock_trains_unsaid_experts_only_where_it_does_so_rightly(moe, ranks, monkeypatch):
    host = dense_run(**moe)
    parts = host.cfg, host.task, host.model, host.criterion
    if not moe and ranks == 1:
        assert type(host)(*parts).model is host.model
        return
    monkeypatch.setattr(trainers, "process_world", lambda: (0, ranks))
    with pytest.raises(ValueError, match=r"TransformerLanguageModel has MoE layers \(.*moe_groups"):
        type(host)(*parts)
