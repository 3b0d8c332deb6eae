"""Tiny sparse models of transformers: Mixtral, Qwen3-MoE, OLMoE and others by their class."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "bos_token_id": 1,
    "eos_token_id": 49, "pad_token_id": 0, "num_experts_per_tok": 2,
}  # fmt: skip
FOUR = {"num_experts": 4}
MIXTRAL = {"intermediate_size": 24, "num_local_experts": 4}
QWEN = {"intermediate_size": 40, "moe_intermediate_size": 24, "mlp_only_layers": [1], **FOUR}
OLMOE = {"intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
MODELS = {
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral, gelu": ("Mixtral", {**MIXTRAL, "hidden_act": "gelu"}),
    "mixtral, relu": ("Mixtral", {**MIXTRAL, "hidden_act": "relu"}),
    "mixtral, tied": ("Mixtral", {**MIXTRAL, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Moe", {**QWEN, "norm_topk_prob": False}),
    "qwen3, normalised": ("Qwen3Moe", {**QWEN, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", OLMOE),
    "olmoe, normalised": ("Olmoe", {**OLMOE, "norm_topk_prob": True}),
    "olmoe, top-1": ("Olmoe", {**OLMOE, "num_experts_per_tok": 1}),
    "olmoe, two experts": ("Olmoe", {**OLMOE, "num_experts": 2, "num_experts_per_tok": 2}),
}


def make(name, **more):
    """A model with weights far enough from zero that routing and experts show in its logits."""
    kind, options = MODELS.get(name, (name, {}))
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **options, **more})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(0, 0.3)
    return model.eval()


def tokens(rows=4, seed=1):
    return torch.randint(2, 49, (rows, 9), generator=torch.Generator().manual_seed(seed))
