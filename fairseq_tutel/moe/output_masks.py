"""Masks on what experts return, in training (NLLB, arXiv 2207.04672, section 6.2.2).

Expert output masking leaves out single outputs of experts, final output masking the layer's whole
result for single tokens, which then have their residual only. Neither is scaled in training;
evaluation multiplies by the share that is kept instead, which is its expected value.
"""

from __future__ import annotations

import torch


def mask_at_random(values: torch.Tensor, probability: float, training: bool) -> torch.Tensor:
    """Zero each entry with a probability in training; else multiply by one minus it.

    Args:
        values: weights of the outputs, any shape; differentiable.
        probability: 0 leaves them as they are, and draws nothing.
    """
    if probability == 0:
        return values
    if not training:
        return values * (1 - probability)
    kept = torch.rand(values.shape, device=values.device) >= probability
    return torch.where(kept, values, 0)


def mask_tokens(y_TM: torch.Tensor, probability: float, training: bool) -> torch.Tensor:
    """The same of whole tokens, [T, M]."""
    if probability == 0:
        return y_TM
    return y_TM * mask_at_random(torch.ones_like(y_TM[:, :1]), probability, training)
