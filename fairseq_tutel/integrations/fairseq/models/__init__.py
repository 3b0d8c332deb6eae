"""fairseq models with MoE layers; importing this package registers them."""

from .architectures import ARCHITECTURES, Architecture, moe_architecture, name_with_experts
from .transformer_lm_gpt_moe import (
    TransformerLMGPTMoE,
    TransformerLMGPTMoEConfig,
    check_model_options,
)
from .transformer_moe import TransformerMoE, TransformerMoEConfig

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "TransformerLMGPTMoE",
    "TransformerLMGPTMoEConfig",
    "TransformerMoE",
    "TransformerMoEConfig",
    "check_model_options",
    "moe_architecture",
    "name_with_experts",
]
