"""fairseq's transformer encoder and decoder with MoE layers in place of some of their layers."""

import copy
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
)
from torch import nn

from ....distributed import StepAgreement
from ....moe import MoELayer
from ....tuning import ExchangeTuner
from .conditional_routing import ConditionalRouting
from .moe_block import (
    ForwardScope,
    MoETransformerDecoderLayer,
    MoETransformerEncoderLayer,
    OneCopyEncoderLayer,
)
from .moe_stack import LayerFactory, agree, reports_to_extra
from .shared_decoding import SharedDecoding

_SECOND_COPY = re.compile(r"encoder\.layers\.\d+\.(in_proj|out_proj|fc[12])_(weight|bias)")


class Sparsity(NamedTuple):
    """Sparse layers of a stack."""

    freq: int  # layer i (from 1) is sparse if it is a multiple of this; 0: none
    factory: LayerFactory | None  # None: dense layers take the place of sparse ones
    dense_width: int = 0  # hidden dimension of the FFNs of these dense layers
    gate_dropout: float | None = None  # of conditional routing; None: no such routing


class MoEStack:
    """Mixin of a stock encoder or decoder, to be named before it.

    The constructor takes the :class:`Sparsity` before the stock arguments. A model that runs
    several stacks in one pass opens the :attr:`scope` of each. A stack whose scope is not open
    agrees with the other ranks by itself.
    """

    side: str  # the stack's part of TransformerConfig
    block: type  # its layer with experts
    is_evaluated = False  # True: a program reads outputs alone, as eval-lm does
    shared_decoding: SharedDecoding | None = None  # while ranks generate together
    # None: each layer uses the exchange that it was built with
    exchange_tuner: ExchangeTuner | None = None

    def __init__(self, sparsity: Sparsity, cfg: TransformerConfig, *stock: Any, **options: Any):
        self._sparsity = sparsity
        self._layer_numbers = itertools.count(1)
        self.scope = ForwardScope()
        super().__init__(cfg, *stock, **options)
        if type(self.layers) is nn.ModuleList:  # a dense model may have layer drop
            self.layers = Layers(self.layers)

    def _build_layer(self, cfg: TransformerConfig, stock: Callable[..., nn.Module], **options: Any):
        """Build the next layer; the stock constructor calls this from the bottom up."""
        freq, factory, dense_width, gate_dropout = self._sparsity
        number = next(self._layer_numbers)
        if not freq or number % freq:
            return stock(cfg, **options)
        if factory is None:
            wide, side = copy.copy(cfg), copy.copy(getattr(cfg, self.side))
            side.ffn_embed_dim = dense_width
            setattr(wide, self.side, side)
            return stock(wide, **options)
        side = getattr(cfg, self.side)
        layer = factory.build(cfg, side)
        conditional = None
        if gate_dropout is not None:
            conditional = ConditionalRouting(side.embed_dim, gate_dropout)
        return self.block(cfg, layer, self.scope, conditional, **options)

    @functools.cached_property
    def moe_layers(self) -> dict[int, MoELayer]:
        """MoE layers by the 0-based number of the stack's layer that holds them."""
        return {
            i: layer.moe_layer
            for i, layer in enumerate(self.layers)
            if isinstance(layer, self.block)
        }

    def agree_alone(self, num_tokens: int, generating: bool) -> StepAgreement:
        """Agree with the other ranks on a pass through this stack only."""
        if self.shared_decoding is not None:
            return self.shared_decoding.agree(self, num_tokens, generating)
        layers, dtype = list(self.moe_layers.values()), self.embed_tokens.weight.dtype
        return agree([layers], [num_tokens], dtype, self.exchange_tuner, generating)[0]


class MoETransformerEncoder(MoEStack, TransformerEncoderBase):
    """Stock encoder with MoE layers."""

    side, block = "encoder", MoETransformerEncoderLayer

    def build_encoder_layer(self, cfg):
        layer = self._build_layer(cfg, super().build_encoder_layer)
        # dense layers of fairseq 0.12.2 would take nested tensors, which experts cannot, and call
        # torch's own encoder layer, with arguments that torch 2 refuses
        layer.can_use_fastpath = False
        OneCopyEncoderLayer.convert(layer)
        return layer

    def upgrade_state_dict_named(self, state_dict, name):
        """Drop the second copies of weights that 0.12.2's dense layers save."""
        for key in [key for key in state_dict if _SECOND_COPY.fullmatch(key)]:
            del state_dict[key]
        return super().upgrade_state_dict_named(state_dict, name)

    def forward(self, src_tokens, *args, **options):
        """Compute the stock method; drop nothing without an open scope, as in generation."""
        if self.scope.step is not None:
            return super().forward(src_tokens, *args, **options)
        step = self.agree_alone(src_tokens.numel(), generating=True)
        with self.scope.open(step, drops_nothing=True, is_reported=False):
            return super().forward(src_tokens, *args, **options)


class MoETransformerDecoder(MoEStack, TransformerDecoderBase):
    """Stock decoder with MoE layers, of a language model or of an encoder-decoder."""

    side, block = "decoder", MoETransformerDecoderLayer

    def build_decoder_layer(self, cfg, no_encoder_attn=False):
        return self._build_layer(cfg, super().build_decoder_layer, no_encoder_attn=no_encoder_attn)

    def extract_features(
        self, prev_output_tokens, encoder_out=None, incremental_state=None, **options
    ):
        """Compute the stock method; add :func:`reports_to_extra` to its result if it is read."""
        run = functools.partial(
            super().extract_features, prev_output_tokens, encoder_out, incremental_state, **options
        )
        if self.scope.step is not None:
            return run()
        generating = incremental_state is not None
        step = self.agree_alone(prev_output_tokens.numel(), generating)
        # a token's continuation must not depend on other sentences and beams of its batch
        unread = generating or self.is_evaluated
        with self.scope.open(step, generating, not unread) as reports:
            x, extra = run()
        return x, extra | reports_to_extra(reports, list(self.moe_layers.values()), step)


class Layers(nn.ModuleList):
    """Module list that prints each kind of layer once; torch merges equal neighbours only."""

    def __repr__(self) -> str:
        numbers: dict[str, list[int]] = {}
        for number, layer in enumerate(self):
            numbers.setdefault(repr(layer), []).append(number)
        lines = [
            f"({', '.join(map(str, which))}): {f'{len(which)} x ' if len(which) > 1 else ''}{text}"
            for text, which in numbers.items()
        ]
        inside = "\n".join(lines).replace("\n", "\n  ")
        return f"ModuleList(\n  {inside}\n)"
