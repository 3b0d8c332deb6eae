"""fairseq models with MoE layers; ``fairseq_tutel.register`` makes fairseq know them."""

from .any_architecture import AnyMoEOptions, adopt_inner, register_all
from .architectures import ARCHITECTURES, Architecture, moe_architecture, name_with_experts
from .shared_decoding import SharedDecoding, is_spread
from .transformer_lm_gpt_moe import TransformerLMGPTMoE, TransformerLMGPTMoEConfig
from .transformer_moe import TransformerMoE, TransformerMoEConfig
from .transformer_stacks import MoETransformerDecoder
