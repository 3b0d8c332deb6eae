"""Compare a sparse block with what its layer will compute, by the block's own weights.

A few rows go through the block, and through the parts that its description names, in plain torch.
"""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ...moe import MoEConfig, RouterCall, route_logits
from ...moe.replace.recognize import GATED
from ...moe.torch_modes import without_autocast
from .blocks import SparseBlock
from .experts import Activation, Projections
from .layers import KeptRouter, shared_of, tensor_at

_ROWS = 8
# Largest logit of a row, in turn. Sigmoids of larger ones are 1 in fp32, and are ties.
_LOGITS = (1.0, 3.0, 9.0)


@torch.no_grad()
def check_same(
    found: SparseBlock, block: nn.Module, where: str, modes: Iterable[bool] = (False,)
) -> None:
    """Raise ValueError if a layer in the place of ``found`` would change the output of ``block``.

    Run the block in each of ``modes`` (training or not) with its own experts and copies of its
    other parts. Rows whose choice is a matter of rounding are left out; if all are, as with a
    router of zeros, the copies get random routers. The dtype of the experts decides how close
    outputs must be. ValueErrors begin with ``where``.
    """
    experts, plain = found.experts, _PlainExperts(found)
    trained, like = experts.training, plain.projections.down
    tolerance = 1e-3 if like.dtype.itemsize >= 4 else 5e-2
    compare = _compare_block if found.description.router else _compare_experts
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices), without_autocast(like.device):
            torch.manual_seed(0)
            for training in modes:
                copied = copy.deepcopy(block, {id(experts): experts}).train(training)
                try:
                    mine, theirs = compare(copied, found, plain)
                except Exception as error:
                    why = _FAILED[compare].format(error)
                    raise ValueError(f"{where} cannot be replaced: {why}") from error
                close = (mine - theirs).norm(dim=-1) <= tolerance * theirs.norm(dim=-1) + 1e-6
                # half precision may overflow
                if not (close | ~theirs.isfinite().all(-1)).all():
                    raise ValueError(f"{where} cannot be replaced: {_WRONG[compare]}")
    finally:
        experts.train(trained)


def _compare_block(block: nn.Module, found: SparseBlock, plain: "_PlainExperts"):
    """Return outputs of the parts that the description names, and of the block."""
    parts, (num_experts, model_dim, _) = found.description, plain.projections.shape
    config = MoEConfig(num_experts=num_experts, capacity_factor=0.0, **parts.routing)
    router = KeptRouter(getattr(block, parts.router), model_dim, config, parts)
    router = router.to(plain.projections.down.device)
    if router.load_bias is not None:
        router.load_bias.copy_(tensor_at(block, parts.bias).flatten())
    x_TM, clear_T = _rows(router, plain.projections.down)
    if not clear_T.any():
        for param in router.wg.parameters():
            param.normal_(0, param.shape[-1] ** -0.5)
        x_TM, clear_T = _rows(router, plain.projections.down)
    x_TM = x_TM[clear_T][:_ROWS]
    theirs = _call(block, x_TM)
    routing, _ = router(x_TM, None, RouterCall(config, False, len(x_TM), reports=False))
    mine, shared = plain(x_TM, routing.expert_TK, routing.topk_weight_TK), shared_of(block, parts)
    return mine if shared is None else mine + shared(x_TM), theirs


def _compare_experts(block: nn.Module, found: SparseBlock, plain: "_PlainExperts"):
    """Return outputs of the block with plain experts and its own, or of the experts alone."""
    like, (num_experts, model_dim, _) = plain.projections.down, plain.projections.shape
    x_TM = torch.randn(_ROWS, model_dim).to(like)
    try:
        theirs = _call(block, x_TM)
    except Exception:  # it takes more than tokens
        theirs = None
    if theirs is None:
        index_TK = torch.randint(num_experts, (_ROWS, 1)).to(like.device)
        chosen = x_TM, index_TK, torch.rand(_ROWS, 1).to(like)
        return plain(*chosen), found.experts(*chosen)
    block.experts = plain
    return _call(block, x_TM), theirs


def _call(block: nn.Module, x_TM: Tensor) -> Tensor:
    """Call a block with [1, T, M], as transformers does, or with [T, M]; return [T, M]."""
    try:
        y = block(x_TM[None].clone())
    except Exception:
        try:
            y = block(x_TM.clone())
        except Exception:
            y = None
        if y is None:
            raise
    y = y[0] if isinstance(y, tuple) else y
    return y.view(x_TM.shape)


def _rows(router: KeptRouter, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return random rows [T, M], and whether rounding leaves a row's choice as it is, bool [T]."""
    x_TM = torch.randn(4 * _ROWS, router.model_dim).to(like)
    largest_T = router.logits(x_TM).abs().amax(1)
    wanted_T = torch.tensor(_LOGITS).repeat(len(x_TM))[: len(x_TM)].to(largest_T)
    x_TM = x_TM * (wanted_T / largest_T).clamp(max=10)[:, None].to(like)
    logits_TE = router.logits(x_TM)
    call = RouterCall(router.config, False, len(x_TM), reports=False)

    def choice(logits_TE: Tensor) -> Tensor:
        routing, _ = route_logits(logits_TE, call, load_bias_E=router.load_bias)
        return routing.expert_TK.sort(1).values

    # of probabilities in the block's dtype, and of logits in fp32
    rounding = 2 * torch.finfo(like.dtype).eps + 1e-6 * logits_TE.abs().amax(1, keepdim=True)
    rounded = [choice(logits_TE + rounding * torch.randn_like(logits_TE)) for _ in range(4)]
    agree = [(each == choice(logits_TE)).all(1) for each in rounded]
    return x_TM, torch.stack(agree).all(0) & (largest_T > 0)


class _PlainExperts(nn.Module):
    """The experts of a module one by one, by their matrices and activation alone."""

    def __init__(self, found: SparseBlock):
        super().__init__()
        self.projections = Projections.of(found.name, found.experts)
        self._views = self.projections.views()
        self._activation = Activation(found.experts, self.projections)
        self._known = GATED.get(self._activation.built_in() or "")

    def forward(self, x: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Compute tokens [..., M]; a choice out of range is no expert."""
        if index_TK.shape != weight_TK.shape:
            shapes = f"{list(index_TK.shape)} and {list(weight_TK.shape)}"
            raise ValueError(f"choices and weights have the shapes {shapes}")
        x_TM, index_TK, weight_TK = (t.flatten(0, -2) for t in (x, index_TK, weight_TK))
        y_TM = torch.zeros_like(x_TM)
        for expert in range(len(self.projections.down)):
            token_N, choice_N = (index_TK == expert).nonzero(as_tuple=True)
            if len(token_N):
                out = self._expert(expert, x_TM[token_N]) * weight_TK[token_N, choice_N, None]
                y_TM.index_add_(0, token_N, out.to(y_TM.dtype))
        return y_TM.view(x.shape)

    def _expert(self, expert: int, rows: Tensor) -> Tensor:
        layers = ("fc_gate", "fc1") if self.projections.gated else ("fc1",)
        hidden = [self._linear(layer, expert, rows) for layer in layers]
        active = self._known(hidden[0]) * hidden[1] if self._known else self._activation(*hidden)
        return self._linear("fc2", expert, active)

    def _linear(self, layer: str, expert: int, rows: Tensor) -> Tensor:
        weight, bias = (self._views.get(f"{layer}.{end}") for end in ("weight", "bias"))
        return nn.functional.linear(rows, weight[expert], None if bias is None else bias[expert])


_FAILED = {
    _compare_experts: (
        "its experts take other arguments ({}); if they are gated as those of Mixtral, declare the "
        "block in SPARSE_BLOCKS"
    ),
    _compare_block: "router and block cannot be called with tokens alone ({})",
}
_WRONG = {
    _compare_experts: "its experts compute more than their projections",
    _compare_block: (
        "by its own weights it computes something else than router, experts and expert of all "
        "tokens, as they were recognised or declared"
    ),
}
