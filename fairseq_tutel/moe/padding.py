"""Padding of a batch, said once for all layers of a model."""

import torch

from ..config import MoEConfig


class Padding:
    """Padding of a batch [B, T], for layers that get its tokens as [B, T, M] or [B * T, M].

    Other layers, such as those of an image tower, count all of their tokens.

    Args:
        attention_mask (Tensor): bool or integers [B, T], 0 for padding.
        skip (bool): padding goes to no expert (default False: it is routed, and not counted).

    Attributes:
        fits: whether a layer has got these tokens.
    """

    def __init__(self, attention_mask: torch.Tensor, skip: bool = False):
        if attention_mask.dim() != 2 or attention_mask.is_floating_point():
            raise ValueError(
                "attention_mask must be bool or integers [batch, tokens], 0 for padding, got "
                f"{attention_mask.dtype} {list(attention_mask.shape)}"
            )
        self.pad_BT, self.skip, self.fits = attention_mask == 0, skip, False
        self.num_tokens = (~self.pad_BT).sum()  # on the device: nobody waits for it

    def of_call(
        self, x: torch.Tensor, pad_mask: torch.Tensor | None, config: MoEConfig
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, int | torch.Tensor]:
        """Return the ``pad_mask`` of a call, what does not count, bool [T], and real tokens."""
        shape, size = x.shape[:-1], len(x.reshape(-1, x.shape[-1]))
        if shape not in (self.pad_BT.shape, (self.pad_BT.numel(),)):
            return pad_mask, None, size
        self.fits = True
        pad = self.pad_BT.to(x.device).view(shape)
        if config.balance_over != "unpadded":  # asked for: padding counts as in Meta's code
            return pad_mask, None, size
        if self.skip:
            pad_mask = pad if pad_mask is None else pad | pad_mask
        return pad_mask, pad.view(-1), self.num_tokens
