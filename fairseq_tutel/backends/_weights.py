"""Weights of the rows of a buffer."""

import torch
from torch import Tensor


def row_weights(topk_weight_TK: Tensor, src_pair_R: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight of the pair in each row, (R,); 0 in unused rows."""
    if topk_weight_TK.numel() == 0:
        return topk_weight_TK.new_zeros(len(src_pair_R), dtype=dtype)
    weight_R = topk_weight_TK.reshape(-1).index_select(0, src_pair_R.clamp(min=0).long())
    return weight_R.to(dtype).masked_fill_(src_pair_R < 0, 0)
