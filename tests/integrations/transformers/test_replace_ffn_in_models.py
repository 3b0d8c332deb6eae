"""``replace_ffn`` on seven models of transformers: the same outputs, then a loss that falls."""

import pytest
import torch
from helpers.distributed import run_ranks
from helpers.replaced import check_losses, check_that_copies_change_nothing, train_replaced

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
    "bert": (
        "BertForMaskedLM",
        {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4,
         "num_attention_heads": 4, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
         "attention_probs_dropout_prob": 0.0, **TEXT},
        r"encoder\.layer\.\d+$", "Experts",
    ),
    "vit": ("ViTForImageClassification", IMAGE, r"\.mlp$", "Experts"),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4,
         "dropout_rate": 0.0, "decoder_start_token_id": 0, **TEXT},
        r"\.DenseReluDense$", "Experts",
    ),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4,
         "num_attention_heads": 4, "conv_dim": (8, 8), "conv_kernel": (10, 3),
         "conv_stride": (5, 2), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
         "num_conv_pos_embedding_groups": 2, "vocab_size": 20, "layerdrop": 0.0,
         "hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0,
         "feat_proj_dropout": 0.0, "final_dropout": 0.0, "mask_time_prob": 0.0,
         "ctc_loss_reduction": "mean"},
        r"\.feed_forward$", "Experts",
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
    if name == "wav2vec2":
        sound = torch.randn(4, 400, generator=generator)
        return {"input_values": sound[rows], "labels": torch.tensor([[3, 4], [5, 6]] * 2)[rows]}
    ids = torch.randint(2, 49, (4, 9), generator=generator)[rows]
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("name", MODELS)
def test_experts_that_start_as_the_block_change_nothing(name):
    batch = batch_of(name)
    check_that_copies_change_nothing(*make(name), lambda model: model(**batch).logits)


def train_on_ranks(name):
    model, match, _ = make(name)
    return train_replaced(model, match, lambda net, rows: net(**batch_of(name, rows)).loss)


def train_each():
    return {name: train_on_ranks(name) for name in MODELS}


@pytest.fixture(scope="module")
def on_two_ranks():
    return run_ranks(train_each, 2, timeout=200)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_train_as_one_and_the_loss_falls(name, on_two_ranks):
    check_losses(train_on_ranks(name), [losses[name] for losses in on_two_ranks])
