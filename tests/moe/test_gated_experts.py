"""Gated experts against a loop over rows in fp64: operators, layer, ranks, checkpoints."""

import pytest
import torch
from experts_on_ranks import check_on_ranks
from helpers.assertions import assert_close, rms_ratio
from helpers.distributed import run_ranks
from torch.nn import functional

from fairseq_tutel import ops
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.moe.experts import Experts, GeGLUExperts, SwiGLUExperts
from fairseq_tutel.ops import backend

E, N, M, F, TOKENS = 4, 5, 6, 8, 24
GATES = {"swiglu": functional.silu, "geglu": functional.gelu}
ENDS = {"padded": None, "ragged": [4, 4, 9, 15], "empty": [0, 0, 0, 0]}
CHUNKS = {"padded": [[5] * E, [2] * E], "ragged": [[2, 0, 3, 1], [1, 4, 0, 2], [0, 0, 0, 0]]}


@pytest.fixture(params=["torch", "triton"])
def way(request, monkeypatch):
    """dtype of the backend, which in the interpreter has no fp64."""
    if request.param == "torch":
        return torch.float64
    pytest.importorskip("triton.knobs")
    monkeypatch.setattr(backend, "_requested", "triton")
    return torch.float32


def make_params(dtype, biased, seed=5):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(E, 2 * F, M), (E, 2 * F), (E, M, F), (E, M)]
    made = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    return [x if biased or x.dim() == 3 else None for x in made]


def one_expert(x, w1, b1, w2, b2, gate):
    z = x @ w1.t() + (0 if b1 is None else b1)
    return (gate(z[:, :F]) * z[:, F:]) @ w2.t() + (0 if b2 is None else b2)


def loop(rows, params, ends, activation):
    """Each expert on its own rows; rows of nobody are zero."""
    if ends is None:
        return torch.stack([_expert(rows[j], params, j, activation) for j in range(E)])
    spans = zip([0, *ends], ends, strict=False)
    parts = [_expert(rows[a:b], params, j, activation) for j, (a, b) in enumerate(spans)]
    return torch.cat([*parts, torch.zeros_like(rows[ends[-1] :])])


def _expert(x, params, j, activation):
    return one_expert(x, *(None if p is None else p[j] for p in params), GATES[activation])


def grads_of(out, tensors, d_out):
    found = torch.autograd.grad(out, tensors, d_out, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, tensors, strict=True)]


@pytest.mark.parametrize("biased", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("layout", ENDS)
def test_operator_equals_a_loop(layout, activation, biased, way):
    ends = ENDS[layout]
    rows = torch.randn((E, N, M) if ends is None else (18, M), dtype=way).requires_grad_()
    params = [None if p is None else p.requires_grad_() for p in make_params(way, biased)]
    offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    d_out = torch.randn(rows.shape, dtype=way)
    tensors = [rows, *(p for p in params if p is not None)]
    got = ops.expert_ffn(rows, *params, activation=activation, offsets=offsets)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    rest = iter(exact[1:])
    want = loop(exact[0], [None if p is None else next(rest) for p in params], ends, activation)
    assert_close("out", got, want, way)
    used = slice(None) if ends is None else slice(ends[-1])
    want_grads = grads_of(want, exact, d_out.double()) if want.requires_grad else map(
        torch.zeros_like, exact)  # fmt: skip
    for number, (a, b) in enumerate(zip(grads_of(got, tensors, d_out), want_grads, strict=True)):
        a, b = (a, b) if number else (a[used], b[used])
        assert_close(f"gradient {number}", a, b, way)


@pytest.mark.parametrize("dropout", [(0.0, 0.0), (0.3, 0.2)], ids=["", "dropout"])
@pytest.mark.parametrize("biased", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("layout", CHUNKS)
def test_chunks_are_parts_of_the_whole(layout, biased, dropout, way):
    params = make_params(way, biased)
    options = ops.FFNOptions("swiglu", dropout)
    leaves = [p.clone().requires_grad_() for p in params if p is not None]
    given = iter(leaves)
    whole = [None if p is None else next(given) for p in params]
    states, gradients, total = [], [], 0
    for counts in CHUNKS[layout]:
        padded = layout == "padded"
        rows = torch.randn((E, counts[0], M) if padded else (sum(counts), M), dtype=way)
        ends = None if padded else torch.tensor(counts).cumsum(0, dtype=torch.int32)
        out, state = ops.ffn_chunk(rows, *params, offsets=ends, options=options, keep_hidden=True)
        d_out = torch.randn(rows.shape, dtype=way)
        states.append(state)
        gradients.append(ops.ffn_chunk_bwd(d_out, state, *params, options=options))
        rows = rows.clone().requires_grad_()
        want = ops.expert_ffn(
            rows, *whole, activation="swiglu", offsets=ends, activation_dropout_p=dropout[0],
            dropout_p=dropout[1], seed=state.seed,
        )  # fmt: skip
        assert torch.equal(out, want)
        total = total + (want * d_out).sum()
        assert_close("d_rows", gradients[-1].d_rows, *torch.autograd.grad(
            (want * d_out).sum(), rows, retain_graph=True), way)  # fmt: skip
    got = ops.ffn_chunks_bwd_params(states, gradients, *params, options=options)
    assert [g is None for g in got] == [p is None for p in params]
    wanted = torch.autograd.grad(total, leaves)
    for a, b in zip((g for g in got if g is not None), wanted, strict=True):
        assert_close("gradient", a, b, way)


def make_layer(network, bias=True, experts=E, **options):
    torch.manual_seed(0)
    return MoELayer(
        M, experts, F, expert_network=network, expert_options={"bias": bias},
        **{"capacity_factor": 0.0, "second_expert_policy": "all", "seed": 3, **options},
    )  # fmt: skip


def layer_by_hand(layer, state, x):
    """Mixtral's block in fp64: softmax, the best two over their sum; w2(silu(w1 x) * w3 x)."""
    state = {name: value.double() for name, value in state.items()}
    probs = (x @ state["gate.wg.weight"].t()).softmax(-1)
    weight, chosen = probs.topk(2, -1)
    weight = weight / weight.sum(-1, keepdim=True)
    gate, y = GATES[layer.experts.gated_by], torch.zeros_like(x)
    for j in range(E):
        own = {
            name.removeprefix(f"experts.{j}."): value
            for name, value in state.items()
            if name.startswith(f"experts.{j}.")
        }
        hidden = gate(functional.linear(x, own["fc_gate.weight"], own.get("fc_gate.bias")))
        hidden = hidden * functional.linear(x, own["fc1.weight"], own.get("fc1.bias"))
        out = functional.linear(hidden, own["fc2.weight"], own.get("fc2.bias"))
        y += (weight * (chosen == j)).sum(-1, keepdim=True) * out
    return y


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("network", GATES)
@pytest.mark.parametrize("factor", [0.0, 4.0], ids=["ragged", "padded"])
def test_layer_is_the_formula(network, bias, factor):
    layer = make_layer(network, bias, capacity_factor=factor).double()
    x = torch.randn(TOKENS, M, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer_by_hand(layer, layer.state_dict(), x))


def test_autocast():
    layer = make_layer("swiglu")
    x = torch.randn(TOKENS, M)
    want = layer_by_hand(layer, layer.state_dict(), x.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and rms_ratio(y, want) < 0.02
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.extras
def test_equals_hugging_face():
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = mixtral.MixtralConfig(
        hidden_size=M, intermediate_size=F, num_local_experts=E, num_experts_per_tok=2
    )
    layer, block = make_layer("swiglu", bias=False), mixtral.MixtralSparseMoeBlock(config)
    state = layer.state_dict()
    theirs = dict(block.named_parameters())
    with torch.no_grad():
        theirs["gate.weight"].copy_(state["gate.wg.weight"])
        for j in range(E):
            gate, up, down = (
                state[f"experts.{j}.{name}.weight"] for name in ("fc_gate", "fc1", "fc2")
            )
            if "experts.gate_up_proj" in theirs:  # since version 5
                theirs["experts.gate_up_proj"][j].copy_(torch.cat([gate, up]))
                theirs["experts.down_proj"][j].copy_(down)
            else:
                for name, value in (("w1", gate), ("w3", up), ("w2", down)):
                    theirs[f"experts.{j}.{name}.weight"].copy_(value)
    x = torch.randn(2, TOKENS, M)
    y = block(x)
    torch.testing.assert_close(layer(x), y[0] if isinstance(y, tuple) else y)


def test_names_and_sizes():
    layer = make_layer("swiglu", bias=False)
    assert list(layer.state_dict())[1:3] == ["experts.0.fc_gate.weight", "experts.0.fc1.weight"]
    assert SwiGLUExperts.count(M, F) == (3 * M * F, 6 * M * F)
    assert GeGLUExperts.count(M, F, {"bias": True}) == (3 * M * F + 2 * F + M, 6 * M * F)
    assert Experts.count(M, F) == (2 * M * F + F + M, 4 * M * F)


def swiglu(experts, groups, **options):
    return make_layer("swiglu", experts=experts, groups=groups, **options).double()


def on_ranks(folder):
    cases = [(E, "replicated", 1, 1), (E, "replicated", 1, 4), (E, "replicated", 0, 1)]
    cases += [(2, "sliced", 1, 2), (2, "sliced", 2, 1), (2, "sliced", 0, 1)]
    check_on_ranks(swiglu, M, cases, folder)


def test_on_ranks(tmp_path):
    run_ranks(on_ranks, 4, str(tmp_path), timeout=150)
