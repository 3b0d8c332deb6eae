"""A stock fairseq transformer decoder in which some layers have an MoE layer for their FFN.

The stock decoder loops over layers that return (x, attn, state) and has no place for an aux loss.
Its loop is left as it is: while it runs, a :class:`ForwardScope` carries what the ranks agreed on
to the MoE layers and collects what they report, and ``extract_features`` returns that in
``extra["moe"]``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from fairseq.models.transformer import TransformerConfig, TransformerDecoder
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase

from ..config import MoEConfig
from ..distributed import ExpertParallelGroups, StepAgreement, sync_step
from ..moe import MoEAux, MoELayer, balance_over_ranks, routing_counts
from .exchange_options import exchange_config
from .tuning_options import make_tuner


class ForwardScope:
    """Lives for one forward pass of the decoder: agreement in, reports of the MoE layers out."""

    def __init__(self):
        self.step: StepAgreement | None = None
        self.reports: list[MoEAux] = []

    @contextlib.contextmanager
    def open(self, step: StepAgreement) -> Iterator[list[MoEAux]]:
        """Set the agreement, yield the list that layers append to."""
        self.step, self.reports = step, []
        try:
            yield self.reports
        finally:
            self.step, self.reports = None, []


class MoETransformerDecoderLayer(TransformerDecoderLayerBase):
    """Self-attention as in the stock layer, then ``moe_layer``; decoder-only (no encoder
    attention).

    With activation checkpointing the whole computation is recomputed in the backward pass; the aux
    loss is one of its outputs, so it keeps its gradient.

    Args:
        cfg: fairseq's TransformerConfig.
        moe_layer: takes the place of fc1, activation and fc2. Dropout is applied inside the
            experts.
        scope: of the decoder.
    """

    def __init__(self, cfg: TransformerConfig, moe_layer: MoELayer, scope: ForwardScope):
        super().__init__(cfg, no_encoder_attn=True)
        self.moe_layer = moe_layer
        self._scope = scope
        self._run = self._compute
        if cfg.checkpoint_activations:
            block = SimpleNamespace(forward=self._compute)
            self._run = checkpoint_wrapper(block, offload_to_cpu=cfg.offload_activations).forward

    def build_fc1(self, *args):
        """No dense FFN."""
        return None

    build_fc2 = build_fc1

    def forward(
        self,
        x: torch.Tensor,
        encoder_out=None,
        encoder_padding_mask=None,
        incremental_state=None,
        self_attn_mask: torch.Tensor | None = None,
        self_attn_padding_mask: torch.Tensor | None = None,
        **unused,
    ):
        """Signature and result of the stock layer: x [seq, batch, M] -> (x, None, None)."""
        x, *aux = self._run(
            x,
            incremental_state=incremental_state,
            self_attn_mask=self_attn_mask,
            self_attn_padding_mask=self_attn_padding_mask,
            step=self._scope.step,
        )
        self._scope.reports.append(MoEAux(*aux))
        return x, None, None

    def _compute(self, x, incremental_state, self_attn_mask, self_attn_padding_mask, step):
        residual = x
        if self.normalize_before:
            x = self.self_attn_layer_norm(x)
        x, _ = self.self_attn(
            query=x,
            key=x,
            value=x,
            key_padding_mask=self_attn_padding_mask,
            incremental_state=incremental_state,
            need_weights=False,
            attn_mask=self_attn_mask,
        )
        if self.c_attn is not None:
            heads = x.view(*x.shape[:2], self.nh, self.head_dim)
            x = (heads * self.c_attn[:, None]).reshape(x.shape)
        if self.attn_ln is not None:
            x = self.attn_ln(x)
        x = residual + self.dropout_module(x)
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)

        residual = x
        if self.normalize_before:
            x = self.final_layer_norm(x)
        # batch first: capacity goes to the tokens of the first sentence first, as in the reference
        x, aux = self.moe_layer(
            x.transpose(0, 1),
            pad_mask=self_attn_padding_mask,
            step=step,
            # a token's continuation must not depend on the other sentences and beams of its batch
            capacity_factor=None if incremental_state is None else 0.0,
            return_aux=True,
        )
        if self.w_resid is not None:
            residual = self.w_resid * residual
        x = residual + x.transpose(0, 1)
        if not self.normalize_before:
            x = self.final_layer_norm(x)
        return (x, *aux)


class _Layers(torch.nn.ModuleList):
    """Printed with every kind of layer once: MoE layers stand between dense ones, so that torch,
    which puts equal neighbours into one, would print all (some 400 lines for 24 layers)."""

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


class MoETransformerDecoder(TransformerDecoder):
    """Decoder of a language model whose every ``moe_freq``-th layer is an MoE layer.

    Args:
        args: the model's config.
        groups: placement of the experts; None makes every layer dense.
        routing: routing options of all MoE layers.
    """

    def __init__(
        self,
        args,
        dictionary,
        embed_tokens,
        groups: ExpertParallelGroups | None,
        routing: MoEConfig | None,
    ):
        self.moe_groups = groups
        self.moe_routing = routing
        self._scope = ForwardScope()
        self._layer_numbers = itertools.count(1)
        super().__init__(args, dictionary, embed_tokens, no_encoder_attn=True)
        layers = list(self.moe_layers.values())
        # None: each layer uses the exchange that it was built with
        self.exchange_tuner = make_tuner(args, layers) if layers else None
        if type(self.layers) is torch.nn.ModuleList:  # a dense model may have layer drop
            self.layers = _Layers(self.layers)

    def build_decoder_layer(self, cfg, no_encoder_attn=False):
        """Called by the stock constructor once per layer, from the bottom up."""
        args, number = self.args, next(self._layer_numbers)
        if not args.moe_freq or number % args.moe_freq:
            return super().build_decoder_layer(cfg, no_encoder_attn)
        if self.moe_groups is None:
            dense = copy.deepcopy(cfg)
            dense.decoder.ffn_embed_dim = args.alternate_decoder_ffn_embed_dim
            return super().build_decoder_layer(dense, no_encoder_attn)
        layer = MoELayer(
            cfg.decoder.embed_dim,
            hidden_dim=args.moe_expert_ffn_dim or cfg.decoder.ffn_embed_dim,
            config=self.moe_routing,
            activation=str(cfg.activation_fn),
            groups=self.moe_groups,
            shared_expert_dim=args.moe_shared_expert_ffn_dim,
            dropout=cfg.dropout,
            activation_dropout=cfg.activation_dropout or cfg.relu_dropout or 0.0,
            exchange=exchange_config(args),
            record_exchange_time=args.record_a2a_perf_stats,
            skip_exchange=args.dummy_a2a,
        )
        return MoETransformerDecoderLayer(cfg, layer, self._scope)

    @functools.cached_property
    def moe_layers(self) -> dict[int, MoELayer]:
        """MoE layers by the 0-based number of the decoder layer that holds them."""
        return {
            i: layer.moe_layer
            for i, layer in enumerate(self.layers)
            if isinstance(layer, MoETransformerDecoderLayer)
        }

    def extract_features(
        self,
        prev_output_tokens,
        encoder_out=None,
        incremental_state=None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
    ):
        """As the stock method; ``extra["moe"]`` holds one :class:`MoEAux` per MoE layer.

        ``extra["moe_bias_counts"]``: what moves their load biases, in training if they have them.
        ``extra["moe_counts"]``: this rank's :class:`~fairseq_tutel.moe.RoutingCounts` of them.
        """
        step = self._agree(prev_output_tokens, incremental_state)
        with self._scope.open(step) as reports:
            x, extra = super().extract_features(
                prev_output_tokens,
                encoder_out,
                incremental_state,
                full_context_alignment,
                alignment_layer,
                alignment_heads,
            )
            extra["moe"] = list(reports)
        if extra["moe"] and incremental_state is None:
            extra["moe"] = balance_over_ranks(extra["moe"], self.moe_routing)
            exchange = step.exchange or next(iter(self.moe_layers.values())).exchange_config
            extra["moe_counts"] = routing_counts(extra["moe"], self.moe_groups, exchange.r)
            if all(aux.bias_counts is not None for aux in extra["moe"]):
                extra["moe_bias_counts"] = torch.stack([aux.bias_counts for aux in extra["moe"]])
        return x, extra

    def _agree(self, tokens, incremental_state) -> StepAgreement:
        """Exchange token counts with the other ranks, once for all layers."""
        if not self.moe_layers or not self.moe_groups.agrees:
            return StepAgreement(tokens.numel())
        if incremental_state is not None:
            ranks = self.moe_groups.ep_size * self.moe_groups.num_slices
            raise ValueError(
                f"generation runs without expert parallelism, but the experts of this model are "
                f"spread over {ranks} ranks: start generation without "
                "torch.distributed (--distributed-world-size 1); a process then loads all experts"
            )
        if self.exchange_tuner is not None:
            return self.exchange_tuner.agree(tokens.numel(), self.embed_tokens.weight.dtype)
        layer = next(iter(self.moe_layers.values()))
        settings = layer.step_settings(self.embed_tokens.weight.dtype)
        return sync_step(tokens.numel(), settings, self.moe_groups)
