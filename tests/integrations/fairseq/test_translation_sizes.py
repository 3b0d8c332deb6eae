"""Sizes of the named encoder-decoders: those of stock fairseq, and of NLLB-200."""

from types import SimpleNamespace

import pytest
import torch
from fairseq import options
from fairseq.data import Dictionary
from helpers.training import convert

from fairseq_tutel.integrations.fairseq.models import TransformerMoE

SIZES = ("encoder_embed_dim", "encoder_ffn_embed_dim", "encoder_layers", "encoder_attention_heads",
         "decoder_layers", "decoder_attention_heads", "dropout", "attention_dropout",
         "encoder_normalize_before")  # fmt: skip


def _configured(arch, *words):
    given = ["--task", "dummy_mt", "--arch", arch, *words]
    args = options.parse_args_and_arch(options.get_training_parser(), input_args=given)
    return convert(args).model


@pytest.mark.parametrize("ours, stock", [("", ""), ("_base", "_wmt_en_de"),
                                         ("_big", "_wmt_en_de_big")])  # fmt: skip
def test_sizes_are_stock_ones(ours, stock):
    mine, theirs = _configured(f"transformer_moe{ours}"), _configured(f"transformer{stock}")
    assert {name: mine[name] for name in SIZES} == {name: getattr(theirs, name) for name in SIZES}
    assert mine.decoder_embed_dim in (None, theirs.decoder_embed_dim)


def test_nllb_200_has_its_published_number_of_parameters():
    """arXiv 2207.04672: 54.5 billion; its dictionary has 256,206 symbols."""
    model_cfg = _configured("transformer_moe_nllb_54b", "--dict-size", "256202")
    dictionary = Dictionary()
    dictionary.symbols = [""] * 256206
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    with torch.device("meta"):
        model = TransformerMoE.build_model(model_cfg, task)
    total = sum(param.numel() for param in model.parameters())
    assert total == pytest.approx(54.5e9, rel=1e-3)
    numbers = [f"{side}.{i}" for side in ("encoder", "decoder") for i in range(3, 24, 4)]
    assert list(model.moe_layers) == numbers and model.moe_groups.num_experts == 128
