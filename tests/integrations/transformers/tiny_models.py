"""Tiny models with random weights of every folder of transformers.models with routed experts."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.integrations.transformers import replace_moe
from fairseq_tutel.integrations.transformers.blocks import REFUSED

# Sizes by the name of a config's field; a config takes those that it has.
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "moe_topk": 2, "top_k_experts": 2, "moe_k": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "n_shared_experts": 1,
    "num_shared_experts": 1, "shared_intermediate_size": 24,
    "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "index_topk": 8, "index_head_dim": 8, "index_n_heads": 2,
    "shared_experts_intermediate_size": 24,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8,
    "chunk_size": 8, "moe_shared_expert_intermediate_size": 24, "rel_extent": 16,
    "unpadded_vocab_size": 64, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "attention_dropout": 0.0, "attn_implementation": "eager", "use_cache": False,
    "mlp_layer_types": ["dense", "sparse", "sparse"], "image_size": 32, "patch_size": 8,
}  # fmt: skip
# Class by folder, if it is not the first ForCausalLM, TextModel or Model.
CLASSES = {
    "bert": "BertForMaskedLM", "gpt2": "GPT2LMHeadModel", "t5": "T5EncoderModel",
    "diffusion_gemma": "DiffusionGemmaEncoderTextModel",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerTextModel",
}  # fmt: skip
# Sizes by folder beside SIZES.
_LINEAR = {"linear_num_heads": 4, "linear_head_dim": 8}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "group_limited_greedy", "num_experts_per_tok": 3},
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe", "moe"]},
    "dots3_note": {"layer_types": ["full_attention"] * 3},
    "gemma4": {"enable_moe_block": True, "hidden_size_per_layer_input": 0},
    "glm4v_moe": {"rope_parameters": {
        **_ROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5,
    }},
    "glm5_next": {"qk_rope_head_dim": 0, "index_kpool": 4, **_LINEAR},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "kimi_linear": _LINEAR,
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"]},
    "mimo_v2_flash": {"num_key_value_heads": 2, "rope_parameters": {
        kind: {**_ROPE, "partial_rotary_factor": 0.5}
        for kind in ("full_attention", "sliding_attention")
    }},
    "muse_spark": {"moe_hidden_size": 32},
    "squeezebert": {"embedding_size": 32},
    "step3p7": {"sliding_window": 8},
    "t5": {"d_ff": 24},
    "wav2vec2": {
        "conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2),
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
_ROUTES = re.compile(r"^class \w+(Experts|MoE|Moe|SparseMoeBlock|SparseMoEBlock)\(", re.MULTILINE)


def folders() -> list[str]:
    """Return the folders of ``transformers.models`` with a class of routed experts."""
    root = Path(transformers.__file__).parent / "models"
    files = sorted(root.glob("*/modeling_*.py"))
    return sorted({f.parent.name for f in files if _ROUTES.search(f.read_text(encoding="utf-8"))})


def model_class(folder: str) -> type:
    """Return the smallest class of a folder that has its experts, without images and sound."""
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    if folder in CLASSES:
        return getattr(module, CLASSES[folder])
    for end in ("ForCausalLM", "TextModel", "Model"):
        for name, each in inspect.getmembers(module, inspect.isclass):
            if name.endswith(end) and each.__module__ == module.__name__:
                return each
    raise LookupError(folder)


def refused(folder: str) -> nn.Module | None:
    """Return an empty block of a class that is refused, if the folder has one."""
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    for name in REFUSED:
        if hasattr(module, name):
            block = getattr(module, name).__new__(getattr(module, name))
            nn.Module.__init__(block)
            return nn.ModuleDict({"mlp": block})
    return None


def config_of(kind: type, **own: Any) -> Any:
    """Return a config of a kind with the sizes that it has, and without dropout."""
    is_dataclass = dataclasses.is_dataclass(kind)  # since transformers 5.6
    options = (
        dataclasses.fields(kind) if is_dataclass else inspect.signature(kind).parameters.values()
    )
    known = {option.name for option in options} | set(kind.attribute_map)
    ours = {kind.attribute_map.get(name, name) for name in own}
    names = [name for name in SIZES if name in known and kind.attribute_map.get(name) not in ours]
    given = {name: SIZES[name] for name in names}
    drops = [option.name for option in options if re.search("drop|mask_.*_prob", option.name)]
    floats = {option.name for option in options if isinstance(option.default, float)}
    return kind(**{**given, **dict.fromkeys(floats & set(drops), 0.0), **own})


def make(folder: str, **more: Any) -> nn.Module:
    """Return a tiny model in evaluation, with weights large enough that routing shows.

    ``more``: other options of its config.
    """
    cls = model_class(folder)
    torch.manual_seed(0)
    model = cls(config_of(cls.config_class, **{**OWN.get(folder, {}), **more})).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("correction_bias", "expert_bias")):
                tensor.normal_(0, 0.3)
            elif name.endswith("tid2eid"):  # experts by token
                tensor.copy_(torch.rand(len(tensor), 8).topk(tensor.shape[1]).indices)
            elif tensor.is_floating_point() and tensor.dim() > 1:
                tensor.normal_(0, 0.2)
    return model


def tokens(rows: int = 4, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 60, (rows, 9), generator=torch.Generator().manual_seed(seed))


def logits(model: nn.Module, rows: slice = slice(None)) -> torch.Tensor:
    """Return the first output for some of four rows of tokens, images or sounds."""
    name = getattr(model, "module", model).main_input_name  # behind data parallelism
    shape = {"pixel_values": (4, 3, 32, 32), "input_values": (4, 400)}.get(name)
    x = torch.rand(shape, generator=torch.Generator().manual_seed(1)) if shape else tokens()
    return model(**{name: x[rows]})[0]


def adapters(*names: str) -> Any:
    """Return peft's options of low-rank updates of experts."""
    import peft

    given = {"r": 2, "lora_alpha": 6, "init_lora_weights": False, "target_modules": []}
    return peft.LoraConfig(**given, target_parameters=[f"experts.{name}" for name in names])


def call_all(order: str, folder: str, **moe: Any) -> tuple[Any, Any]:
    """Return a model and its blocks after calls by letter.

    R: replace_moe, L: add_lora, l: add_lora(freeze=False), A: add_adapter of attention; peft's
    get_peft_model of attention (P), experts (T), or both (B).
    """
    import peft

    model, blocks = make(folder), None
    for call in order:
        if call == "R":
            blocks = replace_moe(model, **moe)
        elif call in "lL":
            training.add_lora(model, 2, freeze=call == "L", seed=1)
        else:
            names = ("fc1_weight", "fc2_weight") if blocks else ("gate_up_proj", "down_proj")
            options = adapters(*(names if call in "TB" else ()))
            options.target_modules = {"q_proj"} if call in "APB" else set()
            if call == "A":
                model.add_adapter(options)
            else:
                model = peft.get_peft_model(model, options)
    return model, blocks
