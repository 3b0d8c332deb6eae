"""fairseq models with MoE layers; importing this package registers them."""

from .options import TransformerLMGPTMoEConfig
from .stock_ranges import check_stock_ranges
from .transformer_lm_gpt_moe import TransformerLMGPTMoE

__all__ = ["TransformerLMGPTMoE", "TransformerLMGPTMoEConfig", "check_stock_ranges"]
