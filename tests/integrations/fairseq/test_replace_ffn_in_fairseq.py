"""``replace_ffn`` on layers of fairseq's transformers."""

import copy

import pytest
import torch
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import nn

from fairseq_tutel.moe import MoELayer, replace_ffn


def layers(kind, **options):
    config = TransformerConfig()
    for part in (config.encoder, config.decoder):
        part.embed_dim, part.ffn_embed_dim, part.attention_heads = 16, 32, 2
    config.activation_dropout = 0.1
    for name, value in options.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return nn.ModuleList([kind(config)]).eval()


@pytest.mark.parametrize("kind", [TransformerEncoderLayerBase, TransformerDecoderLayerBase])
def test_a_layer_computes_what_it_did(kind):
    model = layers(kind)
    dense, x = copy.deepcopy(model), torch.randn(5, 2, 16)
    replace_ffn(model, "0$", 4, copy_weights=True, capacity_factor=0.0)
    assert isinstance(model[0].fc1, MoELayer) and model[0].fc1.experts.activation_dropout == 0.1
    found, want = (each[0](x, None) for each in (model, dense))
    if isinstance(found, tuple):
        found, want = found[0], want[0]
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_a_norm_between_the_parts_is_refused():
    model = layers(TransformerDecoderLayerBase, scale_fc=True)
    with pytest.raises(ValueError, match=r"^0: .* something else between fc1, .*--scale-fc"):
        replace_ffn(model, "0$", 4)
    assert isinstance(model[0].fc1, nn.Linear)
