"""The experts' whole feed-forward network in plain torch, for CPUs: a block of rows at a time.

On a CPU a buffer of R x F numbers costs more than the elementwise work on it: the system maps and
clears its pages each time. A block of one expert's rows goes through both products while its hidden
values are in the cache, so that of the four such buffers of the step by step computation only the
pre-activations remain; the backward pass recomputes the activation from them. Threads take whole
parts of the work, on one thread each: blocks in the forward pass, experts in the backward pass,
which sums weight gradients over an expert's blocks. An expert with far more than a thread's share
of the rows is taken in several parts there, whose sums are added in order. So the same rows give
the same bits on the same number of threads.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._expert_chain import Functions, chain_bwd, chain_fwd
from ._grouped import rows_product, weight_gradient
from ._threads import share_out
from .activation import ACTIVATIONS, bias_act_bwd, bias_act_fwd

# Hidden elements per block: 4 MiB of fp32; and rows that keep the products efficient.
_BLOCK_NUMEL = 1 << 20
_MIN_ROWS = 256
# An expert is split if the largest one has this many times a thread's equal share of the rows.
_UNEVEN = 1.25

_FUNCTIONS = Functions(bias_act_fwd, bias_act_bwd, rows_product, weight_gradient)
_aten = torch.ops.aten


@dataclass(frozen=True)
class _Options:
    """What forward and backward pass have in common.

    Attributes:
        activation: a key of ACTIVATIONS.
        dropout_p: after the activation and after fc2.
        seed: of the masks.
        block_rows: rows per block.
        acc: dtype of everything but products.
    """

    activation: str
    dropout_p: tuple[float, float]
    seed: int
    block_rows: int
    acc: torch.dtype

    def activate(self, z: Tensor, out: Tensor) -> Tensor:
        """activation(z) in ``out``, which may be z."""
        if self.activation == "gelu":
            return _aten.gelu.out(z, out=out)
        return ACTIVATIONS[self.activation][0](out.copy_(z))

    def d_activate(self, d_a: Tensor, z: Tensor) -> Tensor:
        """d_a * activation'(z), in place of d_a; z stays as it is."""
        if self.activation == "gelu":
            return _aten.gelu_backward.grad_input(d_a, z, grad_input=d_a)
        return d_a.copy_(ACTIVATIONS[self.activation][1](d_a, z.clone()))

    def masks(self, rows: slice, *likes: Tensor) -> list[Tensor | None]:
        """For the hidden values and the output of a block: 0 or 1 / (1 - p), None if p is 0."""
        if not any(self.dropout_p):
            return [None, None]
        generator = torch.Generator().manual_seed(self.seed + rows.start)
        found: list[Tensor | None] = []
        for like, p in zip(likes, self.dropout_p, strict=True):
            keep = torch.empty_like(like, dtype=self.acc) if p > 0 else None
            if keep is not None:
                keep.bernoulli_(1.0 - p, generator=generator).div_(1.0 - p)
            found.append(keep)
        return found

    def blocks(self, span: tuple[int, int]) -> Iterator[slice]:
        """Rows of an expert in blocks."""
        begin, end = span
        for first in range(begin, end, self.block_rows):
            yield slice(first, min(first + self.block_rows, end))


def _options(rows, hidden_dim, activation, dropout_p, seed) -> _Options:
    half = rows.dtype in (torch.float16, torch.bfloat16)
    return _Options(
        activation,
        dropout_p,
        seed=0 if seed is None else int(seed),
        block_rows=max(_MIN_ROWS, _BLOCK_NUMEL // max(1, hidden_dim)),
        acc=torch.float32 if half else rows.dtype,
    )


def _by_blocks(rows: Tensor) -> bool:
    return rows.device.type == "cpu"


def _spans(rows: Tensor, num_experts: int, offsets: Tensor | None) -> list[tuple[int, int]]:
    """Begin and end of each expert's rows. NOTE: reads the offsets on the host."""
    if offsets is None:
        step = rows.shape[1]
        return [(x * step, (x + 1) * step) for x in range(num_experts)]
    ends = offsets.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _parts(spans, options: _Options, model_dim: int, whole: bool) -> list[tuple[int, list[slice]]]:
    """(expert, consecutive blocks of its rows) for a thread each, the blocks in order.

    Args:
        whole: keep the blocks of an expert together, unless threads would wait for an overloaded
            one.
    """
    by_expert = [list(options.blocks(span)) for span in spans]
    if not whole:
        return [(x, [part]) for x, blocks in enumerate(by_expert) for part in blocks]
    threads = torch.get_num_threads()
    sizes = [end - begin for begin, end in spans]
    share = max(1.0, sum(sizes) / threads)
    uneven = max(sizes, default=0) > _UNEVEN * share
    parts = []
    for expert, (size, blocks) in enumerate(zip(sizes, by_expert, strict=True)):
        if not blocks:
            continue
        # a part's own weight gradients, 2 M F numbers, are not to exceed its hidden values
        most = min(math.ceil(size / share), size // (2 * model_dim)) if uneven else 1
        step = math.ceil(len(blocks) / max(1, most))
        parts += [(expert, blocks[i : i + step]) for i in range(0, len(blocks), step)]
    return parts


def _scratch(like: Tensor, spans, options: _Options, width: int, dtype) -> Tensor:
    """For one block of any expert."""
    rows = max((end - begin for begin, end in spans), default=0)
    return like.new_empty((min(rows, options.block_rows), width), dtype=dtype)


def _add_bias(h: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    """h + bias in the dtype of ``out``, which may be h."""
    if h.dtype == out.dtype:
        return torch.add(h, bias, out=out)
    return out.copy_(h).add_(bias)


def expert_ffn_fwd(
    rows: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    *,
    activation: str,
    offsets: Tensor | None = None,
    dropout_p: tuple[float, float] = (0.0, 0.0),
    seed: Tensor | None = None,
    keep_hidden: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dropout(fc2(dropout(activation(fc1(rows)))))`` of every expert on its own rows.

    Products are rounded to the dtype of the rows, everything else is computed in fp32 (fp64).

    Args:
        rows: (e, N, M), or (R, M) with ``offsets``.
        fc1_weight, fc1_bias: (e, F, M), (e, F).
        fc2_weight, fc2_bias: (e, M, F), (e, M).
        activation: a key of :data:`~fairseq_tutel.backends.torch.ACTIVATIONS`.
        offsets: (e,) int32 end row of each expert; rows past the last come out zero.
        dropout_p: after the activation and after fc2.
        seed: int64 scalar tensor; needed with dropout.
        keep_hidden: whether a backward pass follows.

    Returns:
        the output, like rows; what the backward pass needs of the hidden values, (R, F), or (0, F)
        without ``keep_hidden``; the same after the activation, (0, F) on a CPU, which recomputes
        them.
    """
    if not _by_blocks(rows):
        return chain_fwd(
            _FUNCTIONS,
            rows,
            fc1_weight,
            fc1_bias,
            fc2_weight,
            fc2_bias,
            activation=activation,
            offsets=offsets,
            dropout_p=dropout_p,
            seed=seed,
            keep_hidden=keep_hidden,
        )
    num_experts, hidden_dim, model_dim = fc1_weight.shape
    options = _options(rows, hidden_dim, activation, dropout_p, seed)
    acc, dtype = options.acc, rows.dtype
    spans = _spans(rows, num_experts, offsets)
    rows_RM = rows.reshape(-1, model_dim)
    out_RM = rows.new_empty(rows_RM.shape)  # contiguous, as the operator promises
    saved_RF = rows.new_empty((len(rows_RM) if keep_hidden else 0, hidden_dim))
    parts = _parts(spans, options, model_dim, whole=False)

    def run(numbers: Iterator[int]) -> None:
        scratch = _scratch(rows, spans, options, hidden_dim, acc)
        products = _scratch(rows, [] if keep_hidden else spans, options, hidden_dim, dtype)
        for number in numbers:
            expert, blocks = parts[number]
            for part in blocks:
                count = part.stop - part.start
                h = saved_RF[part] if keep_hidden else products[:count]
                torch.mm(rows_RM[part], fc1_weight[expert].t(), out=h)
                # in fp32 the sum with the bias is saved, in half precision what it is made of
                z = _add_bias(h, fc1_bias[expert], h if dtype == acc else scratch[:count])
                a = options.activate(z, scratch[:count])
                y = out_RM[part]
                keep_a, keep_y = options.masks(part, a, y)
                if keep_a is not None:
                    a.mul_(keep_a)
                torch.mm(a.to(dtype), fc2_weight[expert].t(), out=y)
                biased = _add_bias(y, fc2_bias[expert], y if dtype == acc else y.to(acc))
                if keep_y is not None:
                    biased.mul_(keep_y)
                if dtype != acc:
                    y.copy_(biased)

    share_out(run, len(parts))
    out_RM[spans[-1][1] :] = 0
    return out_RM.view(rows.shape), saved_RF, saved_RF.new_empty((0, hidden_dim))


def expert_ffn_bwd(
    d_out: Tensor,
    rows: Tensor,
    saved: Tensor,
    active: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor,
    fc2_weight: Tensor,
    fc2_bias: Tensor,
    *,
    activation: str,
    offsets: Tensor | None = None,
    dropout_p: tuple[float, float] = (0.0, 0.0),
    seed: Tensor | None = None,
    needs_rows: bool = True,
    needs_params: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`expert_ffn_fwd`: of the rows, fc1's weight and bias, fc2's.

    Args:
        d_out: like the output.
        saved, active: second and third value of the forward pass.
        needs_rows, needs_params: a gradient that is not needed comes back with shape (0,).
    """
    if not _by_blocks(rows):
        return chain_bwd(
            _FUNCTIONS,
            d_out,
            rows,
            saved,
            active,
            fc1_weight,
            fc1_bias,
            fc2_weight,
            fc2_bias,
            activation=activation,
            offsets=offsets,
            dropout_p=dropout_p,
            seed=seed,
            needs_rows=needs_rows,
            needs_params=needs_params,
        )
    num_experts, hidden_dim, model_dim = fc1_weight.shape
    options = _options(rows, hidden_dim, activation, dropout_p, seed)
    acc, dtype = options.acc, rows.dtype
    spans = _spans(rows, num_experts, offsets)
    rows_RM, d_out_RM = rows.reshape(-1, model_dim), d_out.reshape(-1, model_dim)
    d_rows_RM = rows.new_empty(rows_RM.shape if needs_rows else 0)
    d_w1, d_w2 = (w.new_empty(w.shape if needs_params else 0) for w in (fc1_weight, fc2_weight))
    d_b1, d_b2 = (
        b.new_zeros(b.shape if needs_params else 0, dtype=acc) for b in (fc1_bias, fc2_bias)
    )
    parts = _parts(spans, options, model_dim, whole=needs_params)
    sums, later = [], []
    if needs_params:
        sums, later = _sums((d_w1, d_b1, d_w2, d_b2), parts)
    # the largest first, so that nobody is left with one at the end
    by_size = sorted(range(len(parts)), key=lambda i: sum(x.start - x.stop for x in parts[i][1]))

    def run(numbers: Iterator[int]) -> None:
        scratch = _scratch(rows, spans, options, hidden_dim, acc)
        wide = _scratch(rows, [] if dtype == acc else spans, options, hidden_dim, acc)
        products = _scratch(rows, spans, options, hidden_dim, dtype)
        for number in (by_size[i] for i in numbers):
            expert, blocks = parts[number]
            for part in blocks:
                count, first = part.stop - part.start, part is blocks[0]
                dy, z = d_out_RM[part], saved[part]
                if dtype != acc:
                    z = _add_bias(z, fc1_bias[expert], wide[:count])
                keep_a, keep_y = options.masks(part, z, dy)
                if keep_y is not None:
                    dy = (dy * keep_y).to(dtype)
                if needs_params:
                    sum_w1, sum_b1, sum_w2, sum_b2 = sums[number]
                    sum_b2 += dy.sum(0, dtype=acc)
                    a = options.activate(z, scratch[:count])
                    if keep_a is not None:
                        a.mul_(keep_a)
                    _accumulate(sum_w2, dy.t(), a.to(dtype), first)
                d_a = torch.mm(dy, fc2_weight[expert], out=products[:count]).to(acc)
                if keep_a is not None:
                    d_a.mul_(keep_a)
                d_z = options.d_activate(d_a, z)
                d_h = d_z.to(dtype)
                if needs_params:
                    sum_b1 += d_z.sum(0)
                    _accumulate(sum_w1, d_h.t(), rows_RM[part], first)
                if needs_rows:
                    torch.mm(d_h, fc1_weight[expert], out=d_rows_RM[part])

    share_out(run, len(parts))
    for expert, values in later:
        for total, value in zip((d_w1, d_b1, d_w2, d_b2), values, strict=True):
            total[expert] += value
    if needs_rows:
        d_rows_RM[spans[-1][1] :] = 0
        d_rows_RM = d_rows_RM.view(rows.shape)
    return d_rows_RM, d_w1, d_b1.to(fc1_bias.dtype), d_w2, d_b2.to(fc2_bias.dtype)


def _sums(totals, parts):
    """Where each part adds up its gradients: in its expert's own, or apart, to be added later.

    Args:
        totals: gradients of all experts, (e, ...); those of experts without rows are set to zero.

    Returns:
        per part, a tensor for each of the totals; (expert, these) for parts after an expert's
        first.
    """
    sums, later, seen = [], [], set()
    for expert, _ in parts:
        if expert in seen:
            # weights are overwritten by the first block, biases are added to
            sums.append(
                [
                    total.new_empty(total.shape[1:])
                    if total.dim() > 2
                    else total.new_zeros(total.shape[1:])
                    for total in totals
                ]
            )
            later.append((expert, sums[-1]))
        else:
            sums.append([total[expert] for total in totals])
        seen.add(expert)
    for expert in set(range(len(totals[0]))) - seen:
        for total in totals:
            total[expert] = 0
    return sums, later


def _accumulate(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total = a @ b for the first block of a part, total += a @ b for the next ones."""
    if first:
        torch.mm(a, b, out=total)
    else:
        total.addmm_(a, b)
