"""fairseq models with MoE layers; importing this package registers them."""

from .architectures import ARCHITECTURES, Architecture, moe_architecture, name_with_experts
from .shared_decoding import SharedDecoding, decode_together, is_spread
from .transformer_lm_gpt_moe import (
    TransformerLMGPTMoE,
    TransformerLMGPTMoEConfig,
    check_model_options,
)
from .transformer_moe import TransformerMoE, TransformerMoEConfig
from .transformer_stacks import MoETransformerDecoder

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "MoETransformerDecoder",
    "SharedDecoding",
    "TransformerLMGPTMoE",
    "TransformerLMGPTMoEConfig",
    "TransformerMoE",
    "TransformerMoEConfig",
    "check_model_options",
    "decode_together",
    "is_spread",
    "moe_architecture",
    "name_with_experts",
]
