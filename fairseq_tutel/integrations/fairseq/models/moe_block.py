"""MoE blocks in fairseq's transformers: any stock layer with an MoE layer as its FFN.

The stock ``forward`` runs on a :class:`_View` of the layer, in which ``fc1`` is the MoE layer and
the rest of the FFN is the identity. A view belongs to one call and holds its padding mask and
agreement; attributes of the block would be stale when activation checkpointing runs it again.

Stock models loop over layers, and the loop has no place for a second value. While it runs, a
:class:`ForwardScope` carries the ranks' agreement to the blocks and collects their reports.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)

from ....distributed import ExchangeRecord, StepAgreement
from ....moe import MoEAux, MoELayer
from .conditional_routing import ConditionalRouting


class ForwardScope:
    """State of one forward pass of a stack: the agreement, and the MoE layers' reports."""

    def __init__(self):
        self.step: StepAgreement | None = None  # None outside a pass
        self.drops_nothing = False  # True: the pass has no capacity, whatever the options say
        self.is_reported = True  # False: nobody reads the reports, so layers make none
        self.reports: list[MoEAux] = []

    @contextlib.contextmanager
    def open(
        self, step: StepAgreement, drops_nothing: bool = False, is_reported: bool = True
    ) -> Iterator[list[MoEAux]]:
        """Begin a pass; yield the list that blocks append to."""
        self.step, self.reports = step, []
        self.drops_nothing, self.is_reported = drops_nothing, is_reported
        try:
            yield self.reports
        finally:
            self.step, self.reports = None, []
            self.drops_nothing, self.is_reported = False, True


class MoEBlock:
    """Mixin of a stock transformer layer, to be named before it.

    Args:
        cfg, stock: arguments of the stock layer.
        moe_layer: replaces fc1, activation, fc2 and their dropout, which the experts have inside.
        scope: of the stack.
        conditional: mixes the stock FFN, which then stays, with the MoE layer; None: no FFN.
    """

    pad_mask_argument: str  # of the stock ``forward``

    def __init__(
        self,
        cfg: TransformerConfig,
        moe_layer: MoELayer,
        scope: ForwardScope,
        conditional: ConditionalRouting | None = None,
        **stock: Any,
    ):
        self._keeps_ffn = conditional is not None
        super().__init__(cfg, **stock)
        self.moe_layer = moe_layer
        self.cmr_layer = conditional
        self._scope = scope
        self._run = self._compute
        self._recomputes = cfg.checkpoint_activations
        if self._recomputes:
            block = SimpleNamespace(forward=self._compute)
            self._run = checkpoint_wrapper(block, offload_to_cpu=cfg.offload_activations).forward

    def build_fc1(self, *args: Any) -> Any:
        """Build the FFN of conditional routing, else a stub: fairseq 0.12.2 reads its shapes."""
        return super().build_fc1(*args) if self._keeps_ffn else _no_weights()

    def build_fc2(self, *args: Any) -> Any:
        """See :meth:`build_fc1`."""
        return super().build_fc2(*args) if self._keeps_ffn else _no_weights()

    def _mixed(
        self, x: torch.Tensor, y: torch.Tensor, pad_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix the MoE layer's output y with the FFN's; also return the mixture's report."""
        if self.cmr_layer is None:
            return y, None
        hidden = self.activation_dropout_module(self.activation_fn(self.fc1(x)))
        return self.cmr_layer(x, self.dropout_module(self.fc2(hidden)), y, pad_mask)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute the stock layer, with its signature and result; x [seq, batch, M]."""
        scope = self._scope
        capacity_factor = 0.0 if scope.drops_nothing else None
        if not scope.is_reported:
            how = {"step": scope.step, "capacity_factor": capacity_factor}

            def silent(x: torch.Tensor, pad_mask: torch.Tensor | None) -> torch.Tensor:
                return self._mixed(x, self.moe_layer(x, pad_mask=pad_mask, **how), pad_mask)[0]

            return self._stock(silent, x, *args, **kwargs)
        if self._recomputes and torch.is_grad_enabled() and not x.requires_grad:
            # a recomputed block gets gradients only if an input needs one: with frozen layers
            # before it (LoRA) none does
            x = x.detach().requires_grad_()
        outputs = self._run(scope.step, capacity_factor, ExchangeRecord(), x, *args, **kwargs)
        split = len(outputs) - len(MoEAux._fields)
        scope.reports.append(MoEAux(*outputs[split:]))
        return outputs[0] if split == 1 else outputs[:split]

    def _compute(
        self,
        step: StepAgreement,
        capacity_factor: float | None,
        record: ExchangeRecord,
        *args: Any,
        **kwargs: Any,
    ) -> tuple:
        """Return the stock layer's results and the aux value's members, which keep their gradient.

        A recomputation adds to the same record, because gradients use its exchanges.
        """
        reports = []
        how = {"step": step, "record": record, "capacity_factor": capacity_factor}

        def reported(x: torch.Tensor, pad_mask: torch.Tensor | None) -> torch.Tensor:
            y, aux = self.moe_layer(x, pad_mask=pad_mask, return_aux=True, **how)
            y, share = self._mixed(x, y, pad_mask)
            reports.append(aux._replace(share_of_layer=share))
            return y

        result = self._stock(reported, *args, **kwargs)
        return (*(result if isinstance(result, tuple) else (result,)), *reports[0])

    def _stock(self, routed: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """Run the stock layer with ``routed(x, pad_mask)``, batch first, as its FFN."""
        stock = super().forward.__func__
        pad_mask = None
        if self.moe_layer.config.use_pad_mask:
            given = inspect.signature(stock).bind(self, *args, **kwargs).arguments
            pad_mask = given.get(self.pad_mask_argument)

        def ffn(x: torch.Tensor) -> _Routed:
            # batch first: capacity goes to the tokens of the first sentence first, as in Meta's
            return _Routed(routed(x.transpose(0, 1), pad_mask).transpose(0, 1))

        return stock(_View(self, ffn), *args, **kwargs)


def _no_weights() -> SimpleNamespace:
    return SimpleNamespace(weight=torch.empty(0), bias=torch.empty(0))


class _Routed(NamedTuple):
    """Output of the experts, marked so that the stock layer's dropout lets it pass."""

    x: torch.Tensor


class _View:
    """Block as the stock ``forward`` sees it for one call: ``fc1`` is the MoE layer."""

    def __init__(self, block: MoEBlock, routed):
        self._block = block
        self.fc1 = routed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)

    def fc2(self, x: Any) -> Any:
        return x

    activation_fn = activation_dropout_module = fc2

    def dropout_module(self, x: Any) -> Any:
        return x if isinstance(x, _Routed) else self._block.dropout_module(x)

    def residual_connection(self, x: Any, residual: torch.Tensor) -> torch.Tensor:
        return self._block.residual_connection(x.x if isinstance(x, _Routed) else x, residual)


class MoETransformerDecoderLayer(MoEBlock, TransformerDecoderLayerBase):
    """Decoder layer with experts."""

    pad_mask_argument = "self_attn_padding_mask"


class OneCopyEncoderLayer(TransformerEncoderLayerBase):
    """Stock encoder layer without the second copy of its weights that fairseq 0.12.2 keeps.

    The copy is for torch's own encoder layer, which does not run beside experts. Parameters without
    use would take memory and stop ``--ddp-backend pytorch_ddp``.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._drop_copy()

    @classmethod
    def convert(cls, layer: torch.nn.Module) -> None:
        """Make a stock layer one of these if it has the copy; fairseq's builder names its class."""
        if "fc1_weight" in layer._parameters:
            layer.__class__ = cls
            cast("OneCopyEncoderLayer", layer)._drop_copy()

    def _drop_copy(self) -> None:
        for part in ("in_proj", "out_proj", "fc1", "fc2"):
            for kind in ("weight", "bias"):
                self._parameters.pop(f"{part}_{kind}", None)

    def _load_from_state_dict(self, *args: Any) -> None:
        torch.nn.Module._load_from_state_dict(self, *args)


class MoETransformerEncoderLayer(MoEBlock, OneCopyEncoderLayer):
    """Encoder layer with experts."""

    pad_mask_argument = "encoder_padding_mask"
