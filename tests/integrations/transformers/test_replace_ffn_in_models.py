"""``replace_ffn`` on five models of transformers: the same outputs, then a loss that falls."""

import copy

import pytest
import torch
from helpers.distributed import run_ranks
from helpers.replaced import train_replaced

from fairseq_tutel.moe import every_other, replace_ffn

transformers = pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.extras

TEXT = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 49, "pad_token_id": 0}
DECODER = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, **TEXT,
}  # fmt: skip
IMAGE = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 4, "num_labels": 5,
}  # fmt: skip
# class, options, blocks by name, experts
MODELS = {
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32, "resid_pdrop": 0.0,
         "embd_pdrop": 0.0, "attn_pdrop": 0.0, **TEXT},
        r"\.mlp$", "Experts",
    ),
    "llama": ("LlamaForCausalLM", DECODER, r"\.mlp$", "SwiGLUExperts"),
    "vit": ("ViTForImageClassification", IMAGE, r"\.mlp$", "Experts"),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4,
         "dropout_rate": 0.0, "decoder_start_token_id": 0, **TEXT},
        r"\.DenseReluDense$", "Experts",
    ),
    # its gelu is the approximation, for which there are no built-in gated experts
    "gemma": ("GemmaForCausalLM", DECODER, r"\.mlp$", "ExpertList"),
}  # fmt: skip


def make(name):
    kind, options, match, experts = MODELS[name]
    cls = getattr(transformers, kind)
    torch.manual_seed(0)
    model = cls(cls.config_class(**options))
    with torch.no_grad():  # blocks whose output shows in the model's
        for key, param in model.named_parameters():
            if param.dim() == 2 and "embed" not in key and "wte" not in key:
                param.normal_(0, 0.15)
    return model, match, experts


def batch_of(name, rows=slice(None)):
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        images = torch.rand(4, 3, 16, 16, generator=generator)
        return {"pixel_values": images[rows], "labels": torch.tensor([0, 1, 2, 3])[rows]}
    ids = torch.randint(2, 49, (4, 9), generator=generator)[rows]
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("name", MODELS)
def test_experts_that_start_as_the_block_change_nothing(name):
    model, match, experts = make(name)
    model.eval()
    dense, batch = copy.deepcopy(model), batch_of(name)
    blocks = every_other(model, match)
    assert list(replace_ffn(model, blocks, 4, copy_weights=True)) == blocks and len(blocks) == 2
    assert all(type(model.get_submodule(each).experts).__name__ == experts for each in blocks)
    with torch.no_grad():
        got, want = model(**batch), dense(**batch)
        torch.testing.assert_close(got.logits, want.logits, rtol=1e-5, atol=1e-5)
        for each in blocks:
            for param in model.get_submodule(each).experts.parameters():
                param.zero_()
        assert (model(**batch).logits - want.logits).abs().max() > 1e-3  # blocks do show


def train_on_ranks(name):
    """Losses of four steps."""
    model, match, _ = make(name)
    return train_replaced(model, match, lambda net, rows: net(**batch_of(name, rows)).loss)


def train_each():
    return {name: train_on_ranks(name) for name in MODELS}


@pytest.fixture(scope="module")
def on_two_ranks():
    return run_ranks(train_each, 2, timeout=200)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_train_as_one_and_the_loss_falls(name, on_two_ranks):
    alone = train_on_ranks(name)
    means = [sum(pair) / 2 for pair in zip(*(ranks[name] for ranks in on_two_ranks), strict=True)]
    assert means == pytest.approx(alone, rel=1e-4)
    for losses in (alone, means):
        assert all(later < earlier for earlier, later in zip(losses, losses[1:], strict=False))
