"""The experts' network in chunks against the network as one, whose gradients autograd adds up."""

import pytest
import torch
from helpers.assertions import assert_close, rms_ratio
from test_expert_ffn import E, F, M, way  # noqa: F401 (a fixture)

from fairseq_tutel import ops
from fairseq_tutel.ops import backend

# rows of each expert in each chunk
CHUNKS = {"padded": [[5, 5, 5], [4, 4, 4]], "ragged": [[2, 0, 3], [1, 4, 0], [0, 0, 0], [3, 1, 1]]}
NAMES = ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")


def make(layout, dtype, halves=1, biased=True):
    generator = torch.Generator().manual_seed(5)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    width = halves * F
    params = [randn(E, width, M), randn(E, width), randn(E, M, F), randn(E, M)]
    params = [x if biased or x.dim() == 3 else None for x in params]
    chunks = []
    for counts in CHUNKS[layout]:
        shape = (E, counts[0], M) if layout == "padded" else (sum(counts), M)
        ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
        chunks.append((randn(*shape), randn(*shape), None if layout == "padded" else ends))
    return params, chunks


def in_chunks(params, chunks, options, memory=ops.ActivationMemory()):  # noqa: B008
    """Outputs, gradients of rows, gradients of params; the seeds of the masks."""
    sources = [ops.Source(rows, ends) for rows, _, ends in chunks]
    seeds = [options.draw_seed(torch.device("cpu")) for _ in chunks]
    done = [
        ops.network_fwd(source, params, options, memory, seed)
        for source, seed in zip(sources, seeds, strict=True)
    ]
    found = [
        ops.network_bwd(source.like(d_out), source, None, saved, params, options)
        for (_, d_out, _), (_, saved), source in zip(chunks, done, sources, strict=True)
    ]
    d_params = ops.network_bwd_params([pending for *_, pending in found], params)
    return [out for out, _ in done], [d_rows for d_rows, *_ in found], d_params, seeds


def as_one(params, chunks, options, seeds):
    params = [None if x is None else x.clone().requires_grad_() for x in params]
    masks = dict(zip(("activation_dropout_p", "dropout_p"), options.dropout_p, strict=True))
    outs, d_rows = [], []
    for (rows, d_out, ends), seed in zip(chunks, seeds, strict=True):
        rows = rows.clone().requires_grad_()
        given = {"activation": options.activation, "offsets": ends, "seed": seed, **masks}
        out = ops.expert_ffn(rows, *params, **given)
        out.backward(d_out)
        outs.append(out.detach())
        d_rows.append(rows.grad)
    return outs, d_rows, [None if x is None else x.grad for x in params]


@pytest.mark.parametrize(
    "activation, dropped, biased",
    [("gelu", False, False), ("swiglu", True, True)],
)
@pytest.mark.parametrize("layout", CHUNKS)
def test_gradients_are_those_of_the_whole(layout, activation, dropped, biased, way):  # noqa: F811
    dtype = torch.float32 if backend.get_backend() == "triton" else torch.float64
    params, chunks = make(layout, dtype, 1 + (activation == "swiglu"), biased)
    options = ops.FFNOptions(activation, (0.3, 0.2) if dropped else (0.0, 0.0))
    outs, d_rows, d_params, seeds = in_chunks(params, chunks, options)
    assert len({None if seed is None else int(seed) for seed in seeds}) == (
        len(chunks) if dropped else 1
    )
    want_outs, want_d_rows, want_d_params = as_one(params, chunks, options, seeds)
    for a, b in zip([*outs, *d_rows], [*want_outs, *want_d_rows], strict=True):
        assert_close("rows", a, b, dtype)
    assert [a is None for a in d_params] == [b is None for b in params]
    for name, a, b in zip(NAMES, d_params, want_d_params, strict=True):
        if b is None:
            continue
        assert_close(name, a, b, dtype)
        assert a.is_contiguous() and a.dtype == dtype


@pytest.mark.parametrize("way", ["one-block"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype, way):  # noqa: F811
    """Sums of many chunks are as exact as those of one; added up chunk by chunk they are not."""
    params, (chunk, _) = make("padded", dtype)
    many = [(chunk[0], chunk[1].abs(), None)] * 64
    options = ops.FFNOptions("relu", (0.0, 0.0))
    _, _, exact = as_one(
        [x.double() for x in params], [(a.double(), b.double(), c) for a, b, c in many], options,
        [None] * len(many),
    )  # fmt: skip
    _, _, got, _ = in_chunks(params, many, options)
    _, _, added = as_one(params, many, options, [None] * len(many))
    for name, a, b, want in zip(NAMES, got, added, exact, strict=True):
        limit = 2 * torch.finfo(dtype).eps
        assert rms_ratio(a, want) < limit, name
        assert rms_ratio(b, want) > limit, name
