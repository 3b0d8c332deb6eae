"""SwinV2-MoE, the vision model of Tutel's paper (arXiv 2206.03382, section 5.3), in plain PyTorch.

The architecture is that of the code and the checkpoints that Microsoft published (Swin-Transformer,
``models/swin_transformer_moe.py``): pre-norm Swin blocks with scaled dot products (arXiv
2103.14030), whose position bias is SwinV2's small network over log-spaced coordinates (arXiv
2111.09883, section 3.3), fc2 without bias, and in every second block of the third stage and the
last block a sparse layer in place of the feed-forward one: top-1, capacity factor 1.25 in training
and evaluation, batch-prioritised, noise 1/E, load and importance losses.

Names of parameters are the published ones but for the experts (convert.py). B images, H x W
patches, C channels, N = window^2 tokens of a window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_tutel.moe import MoELayer

MOE = {
    "top_k": 1,
    "capacity_factor": 1.25,
    "eval_capacity_factor": 1.25,
    "batch_prioritized": True,
    "gate_noise": 1.0,
    "load_importance_loss": True,
}


@dataclass(frozen=True)
class SwinConfig:
    """Sizes of a model.

    Attributes:
        image, patch, channels, classes: of the images, in pixels.
        dim: channels of the first stage; each stage doubles them and halves height and width.
        depths, heads: blocks and attention heads of each stage.
        window: side of a window in patches; a stage that is no larger is one window.
        moe_blocks: of each stage, the blocks with experts.
        num_experts: E of each layer; 0: a dense model.
        drop_path: probability of the last block to be left out of an image; it grows from 0.
        moe_dropout: after the experts' activation.
        moe: further options of :class:`~fairseq_tutel.moe.MoELayer`.
    """

    image: int = 192
    patch: int = 4
    channels: int = 3
    classes: int = 21841
    dim: int = 96
    depths: tuple[int, ...] = (2, 2, 18, 2)
    heads: tuple[int, ...] = (3, 6, 12, 24)
    window: int = 12
    moe_blocks: tuple[tuple[int, ...], ...] = ((), (), tuple(range(1, 18, 2)), (1,))
    num_experts: int = 8
    drop_path: float = 0.2
    moe_dropout: float = 0.1
    init_std: float = 0.005
    recompute: bool = False
    moe: dict[str, Any] = field(default_factory=lambda: dict(MOE))


PRESETS = {
    "small": SwinConfig(),
    "base": SwinConfig(dim=128, heads=(4, 8, 16, 32), drop_path=0.3),
    "tiny": SwinConfig(
        image=32, channels=1, classes=10, dim=32, depths=(2, 4), heads=(2, 4), window=4,
        moe_blocks=((), (1, 3)), num_experts=4, drop_path=0.05, moe_dropout=0.0, init_std=0.02,
    ),
}  # fmt: skip


class WindowAttention(nn.Module):
    """Attention within windows of side w, rolled by ``shift`` patches: [B, H, W, C] -> the same."""

    def __init__(self, dim: int, heads: int, window: int, shift: int, resolution: int):
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.cpb_mlp = nn.Sequential(
            nn.Linear(2, 512), nn.ReLU(inplace=True), nn.Linear(512, heads, bias=False)
        )
        steps = torch.arange(1 - window, window)
        spaced = steps * (8 / max(window - 1, 1))
        spaced = spaced.sign() * torch.log2(spaced.abs() + 1) / math.log2(8)
        table = torch.stack(torch.meshgrid(spaced, spaced, indexing="ij"), -1)
        place = torch.cartesian_prod(torch.arange(window), torch.arange(window))
        between = place[:, None] - place[None] + window - 1
        index = between[..., 0] * (2 * window - 1) + between[..., 1]
        self.register_buffer("coordinates", table.flatten(0, 1), persistent=False)
        self.register_buffer("index", index, persistent=False)
        self.register_buffer("mask", _shift_mask(resolution, window, shift), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Patches that a roll brought together from far apart do not attend to each other."""
        (batch, height, width, dim), w = x.shape, self.window
        if self.shift:
            x = x.roll((-self.shift, -self.shift), (1, 2))
        x = x.view(batch, height // w, w, width // w, w, dim).transpose(2, 3)
        tokens = x.reshape(batch, -1, w * w, dim)  # [B, windows, N, C]
        q, k, v = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5)
        bias = self.cpb_mlp(self.coordinates)[self.index].permute(2, 0, 1)[None]  # [1, heads, N, N]
        if self.mask is not None:
            bias = bias + self.mask[:, None].to(bias.dtype)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        y = self.proj(y.transpose(2, 3).flatten(3))
        y = y.view(batch, height // w, width // w, w, w, dim).transpose(2, 3)
        y = y.reshape(batch, height, width, dim)
        return y.roll((self.shift, self.shift), (1, 2)) if self.shift else y


def _shift_mask(resolution: int, window: int, shift: int) -> Tensor | None:
    """[windows, N, N]: -100 between patches that are neighbours only because of the roll."""
    if not shift:
        return None
    edge = torch.zeros(resolution, dtype=torch.long)
    edge[-window:] += 1
    edge[-shift:] += 1
    region = 3 * edge[:, None] + edge
    side = resolution // window
    region = region.view(side, window, side, window).transpose(1, 2).reshape(side**2, -1)
    return torch.where(region[:, :, None] == region[:, None], 0.0, -100.0)


class Mlp(nn.Module):
    """The dense feed-forward network; its fc2 has no bias, as in the published models."""

    def __init__(self, dim: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))


def _moe_layer(dim: int, config: SwinConfig) -> MoELayer:
    layer = MoELayer(
        dim, config.num_experts, 4 * dim, activation_dropout=config.moe_dropout, **config.moe
    )
    bank = layer.experts  # no nn.Linear: the model's initialisation does not see it
    seed = int(torch.randint(2**31, (), device="cpu"))
    for slot, expert in enumerate(bank.expert_ids):  # alike on any number of ranks
        generator = torch.Generator().manual_seed(seed + expert)
        for weight in (bank.fc1_weight, bank.fc2_weight):
            values = torch.empty(weight.shape[1:], device=weight.device)
            if not values.is_meta:
                nn.init.trunc_normal_(values, std=config.init_std, generator=generator)
                weight.data[slot].copy_(values)
    nn.init.zeros_(bank.fc1_bias)
    nn.init.zeros_(bank.fc2_bias).requires_grad_(False)
    return layer


class Block(nn.Module):
    """x + attention(norm(x)), then x + network(norm(x)); [B, H, W, C]."""

    def __init__(self, config: SwinConfig, stage: int, number: int, drop_path: float):
        super().__init__()
        dim = config.dim << stage
        resolution = config.image // config.patch >> stage
        window = min(config.window, resolution)
        shift = window // 2 if number % 2 and window < resolution else 0
        self.drop_path = drop_path
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, config.heads[stage], window, shift, resolution)
        sparse = config.num_experts and number in config.moe_blocks[stage]
        self.mlp = _moe_layer(dim, config) if sparse else Mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._path(self.attn(self.norm1(x)))
        return x + self._path(self.mlp(self.norm2(x)))

    def _path(self, x: Tensor) -> Tensor:
        """Stochastic depth (arXiv 1603.09382): left out of whole images in training."""
        if not self.training or self.drop_path == 0:
            return x
        keep = 1 - self.drop_path
        return x * (torch.rand(len(x), 1, 1, 1, device=x.device) < keep).to(x.dtype) / keep


class PatchMerging(nn.Module):
    """Four neighbouring patches become one of twice the channels."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.reduction(self.norm(torch.cat(parts, -1)))


class PatchEmbed(nn.Module):
    """[B, channels, image, image] -> [B, H, W, C]."""

    def __init__(self, config: SwinConfig):
        super().__init__()
        self.proj = nn.Conv2d(config.channels, config.dim, config.patch, config.patch)
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class SwinMoE(nn.Module):
    """Images [B, channels, image, image] -> logits [B, classes]."""

    def __init__(self, config: SwinConfig):
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        step = config.drop_path / max(sum(config.depths) - 1, 1)
        self.layers = nn.ModuleList()
        for stage, depth in enumerate(config.depths):
            first = sum(config.depths[:stage])
            blocks = [Block(config, stage, n, step * (first + n)) for n in range(depth)]
            layer = nn.Module()
            layer.blocks = nn.ModuleList(blocks)
            last = stage == len(config.depths) - 1
            layer.downsample = None if last else PatchMerging(config.dim << stage)
            self.layers.append(layer)
        width = config.dim << (len(config.depths) - 1)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, config.classes)
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=self.config.init_std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)
        for layer in self.layers:
            for block in layer.blocks:
                if self.config.recompute and self.training:
                    x = checkpoint(block, x, use_reentrant=False)
                else:
                    x = block(x)
            if layer.downsample is not None:
                x = layer.downsample(x)
        return self.head(self.norm(x).mean((1, 2)))

    def decay_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Groups for an optimizer: biases, norms, position networks and gates do not decay."""
        kept, decayed = [], []
        for name, param in self.named_parameters():
            if param.requires_grad:
                plain = name.endswith("bias") or param.dim() == 1 or "cpb_mlp" in name
                plain = plain or name.endswith(("expert_dirs", "gate.proj.weight", "log_scale"))
                (kept if plain else decayed).append(param)
        return [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": kept, "weight_decay": 0.0},
        ]


def dense(config: SwinConfig) -> SwinConfig:
    """The same model without experts."""
    return replace(config, num_experts=0)
