"""What ``replace_ffn`` makes of blocks that are easily mistaken for others."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from fairseq_tutel.moe import replace_ffn

M, F = 8, 12
COPIED = {"copy_weights": True, "top_k": 2, "capacity_factor": 0.0}


class Block(nn.Module):
    """A block of linear layers whose forward is a function of itself, x and training."""

    def __init__(self, forward, bias=True, gated=True):
        super().__init__()
        sizes = {"down": (F, M), "up": (M, F), "gate": (M, F)}
        for name in [*sizes][: 2 + gated]:
            setattr(self, name, nn.Linear(*sizes[name], bias=bias))
        self.compute = forward

    def forward(self, x):
        return self.compute(self, x, self.training)


def two(forward, **options):
    return Block(forward, gated=False, **options)


def replaced(block, **options):
    """The MoE layer that replaces a block."""
    torch.manual_seed(1)
    model = nn.Sequential(block)
    replace_ffn(model, "0", 4, **{**COPIED, **options})
    return model[0]


def kind_of(layer):
    return type(layer.experts).__name__


def assert_like(layer, block):
    """The layer's outputs and gradients of x are the block's."""
    x = 3 * torch.randn(50, M, generator=torch.Generator().manual_seed(2))
    found = []
    for each in (layer.eval(), block.eval()):
        leaf = x.clone().requires_grad_()
        y = each(leaf)
        (y * torch.sin(torch.arange(M))).sum().backward()
        found.append((y.detach(), leaf.grad))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


ACTIVE = {
    "linear": lambda s, x, _: s.down(s.up(x)),
    "relu_squared": lambda s, x, _: s.down(torch.relu(s.up(x)).square()),
    "tanh": lambda s, x, _: s.down(torch.tanh(s.up(x))),
    "relu": lambda s, x, _: s.down(torch.relu(s.up(x))),
}
GATED = {
    "swiglu": lambda s, x, _: s.down(functional.silu(s.gate(x)) * s.up(x)),
    "swapped": lambda s, x, _: s.down(functional.silu(s.up(x)) * s.gate(x)),
}


@pytest.mark.parametrize("name", [*ACTIVE, *GATED])
def test_a_last_layer_of_zeros_does_not_hide_activation_and_gate(name):
    block = two(ACTIVE[name]) if name in ACTIVE else Block(GATED[name])
    nn.init.zeros_(block.down.weight)
    layer = replaced(block)
    if name in ACTIVE:
        assert layer.experts.activation == name
    nn.init.ones_(block.down.weight)
    nn.init.ones_(layer.experts.fc2_weight)
    assert_like(layer, block)


drop, mish, relu = functional.dropout, functional.mish, torch.relu
BLOCKS = {
    # recognized, with the probabilities after the activation and after the last layer
    "functional dropout": (lambda s, x, t: s.down(drop(relu(s.up(x)), 0.5, t)), (0.5, 0.0)),
    "torch.dropout": (
        lambda s, x, t: torch.dropout(s.down(torch.dropout(relu(s.up(x)), 0.3, t)), 0.2, t),
        (0.3, 0.2),
    ),
    "one probability": (lambda s, x, t: drop(s.down(torch.tanh(s.up(x))), 0.4, t), (0.0, 0.4)),
    "in place": (lambda s, x, _: s.down(s.up(x).relu_()), (0.0, 0.0)),
    "unpacked shape": (
        lambda s, x, _: (lambda b, t, w: s.down(relu(s.up(x))).view(b, t, w))(*x.shape), (0.0, 0.0),
    ),
    # copies
    "dropout of the input": (lambda s, x, t: s.down(relu(s.up(drop(x, 0.5, t)))), None),
    "dropout before": (lambda s, x, t: s.down(torch.tanh(drop(s.up(x), 0.5, t))), None),
    "two dropouts": (lambda s, x, t: drop(drop(s.down(relu(s.up(x))), 0.5, t), 0.5, t), None),
    "dropout in evaluation": (lambda s, x, _: drop(s.down(relu(s.up(x))), 0.5), None),
    "noise": (lambda s, x, t: s.down(relu(s.up(x))) + t * torch.randn_like(x), None),
    "unused noise": (lambda s, x, t: (s.down(relu(s.up(x))), torch.rand(1))[0], None),
    "detach": (lambda s, x, _: s.down(relu(s.up(x)).detach()), None),
    "gradients halved": (lambda s, x, _: s.down(relu(s.up(x)) / 2 + relu(s.up(x)).detach() / 2),
                         None),
    "no gradients": (lambda s, x, _: torch.no_grad()(lambda: s.down(relu(s.up(x))))(), None),
    "relu6": (lambda s, x, _: s.down(functional.relu6(s.up(x))), None),
    "clamp at 20": (lambda s, x, _: s.down(relu(s.up(x)).clamp(max=20)), None),
    "leaky": (lambda s, x, _: s.down(functional.leaky_relu(s.up(x), 1e-3)), None),
    "a tied last layer": (
        lambda s, x, _: s.down(relu(s.up(x))) + functional.linear(s.up(x), s.up.weight.t()), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("forward, dropout", BLOCKS.values(), ids=BLOCKS)
def test_what_differs_in_training_becomes_copies(forward, dropout):
    layer = replaced(two(forward))
    assert kind_of(layer) == ("ExpertList" if dropout is None else "Experts")
    if dropout is not None:
        assert (layer.experts.activation_dropout, layer.experts.dropout) == dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_limit_that_only_the_blocks_own_weights_reach(dtype):
    block = two(lambda s, x, _: s.down(torch.relu(s.up(x)).clamp(max=1e4))).to(dtype)
    assert kind_of(replaced(block)) == "Experts"
    block.up.weight.data *= 1e3
    assert kind_of(replaced(block)) == "ExpertList"


def drop_path(s, x, t):
    keep = x.new_empty((len(x), *[1] * (x.dim() - 1))).bernoulli_(0.9) if t else 1
    return s.down(torch.relu(s.up(x))) * keep


def mixing(shift):
    def forward(s, x, t):
        y = torch.zeros_like(x) if x.dim() < 3 else x.roll(1, 1)
        return s.down(torch.relu(s.up(x))) + shift(y, t)

    return forward


ROWS = r"an expert gets rows \[n, M\], but in {}"
REFUSED = {
    "DropPath": (drop_path, ROWS.format(r"training .* \(DropPath\)")),
    "unpacks": (
        lambda s, x, _: (lambda b, t, w: s.down(mish(s.up(x))).view(b, t, w))(*x.shape),
        ROWS.format("evaluation .*: TypeError: .* missing 1 required"),
    ),
    "squeezes": (lambda s, x, _: s.down(mish(s.up(x))).squeeze(), ROWS.format("evaluation")),
    "positions": (
        lambda s, x, _: s.down(mish(s.up(x))) + torch.arange(x.shape[-2])[:, None],
        ROWS.format("evaluation .* the results differ"),
    ),
    "in place": (lambda s, x, _: s.down(relu(s.up(x.mul_(2)))), "its input in place"),
    "in place in training": (
        lambda s, x, t: s.down(relu(s.up(x.mul_(1 + t)))), "its input in place",
    ),
    "token before": (mixing(lambda y, t: y), "on other tokens in evaluation"),
    "only in training": (mixing(lambda y, t: y * t), "on other tokens in training"),
    "detached": (mixing(lambda y, t: y.detach()), "on other tokens in evaluation"),
    "zeros hide it": (
        lambda s, x, _: s.down(relu(s.up(x - x.mean(-2, keepdim=True)))), "on other tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("forward, words", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_an_expert_is_refused(forward, words):
    block = two(forward)
    nn.init.zeros_(block.down.weight)
    state = torch.manual_seed(1).get_state()
    with pytest.raises(ValueError, match=words):
        replaced(block)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's random numbers


def plain(**options):
    return two(ACTIVE["relu"], **options)


@pytest.mark.parametrize("frozen", [("up", "down"), ("up",), ("down",)])
def test_frozen_weights_stay_frozen(frozen):
    block, names = plain(), ("up", "up", "down", "down")
    for name in frozen:
        getattr(block, name).requires_grad_(False)
    flags = [p.requires_grad for p in replaced(block).experts.parameters()]
    assert flags == [name not in frozen for name in names]
    assert all(p.requires_grad for p in replaced(block, copy_weights=False).parameters())
    experts = replaced(plain(bias=False)).experts
    for bias in (experts.fc1_bias, experts.fc2_bias):
        assert not bias.any() and not bias.requires_grad


def test_gate_and_up_of_which_one_is_frozen_are_not_merged():
    block = Block(GATED["swiglu"])
    block.gate.requires_grad_(False)
    expert = replaced(block).experts[0]
    assert not expert.gate.weight.requires_grad and expert.up.weight.requires_grad
    block.up.requires_grad_(False)
    assert kind_of(replaced(block)) == "SwiGLUExperts"


HOOKS = {
    "forward": lambda block: block.up.register_forward_hook(lambda *_: None),
    "own": lambda block: block.register_forward_pre_hook(lambda *_: None),
    "backward": lambda block: block.down.register_full_backward_hook(lambda *_: None),
    "weight": lambda block: block.up.weight.register_hook(lambda grad: 2 * grad),
    "pruned": lambda block: prune.l1_unstructured(block.up, "weight", 0.5),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_hooks_are_refused_and_do_not_fire(register):
    block = plain()
    register(block)
    with pytest.raises(ValueError, match=r"^0(\.\w+)*: experts do not take over hooks"):
        replaced(block)


def test_parametrized_layers_become_copies():
    block = plain()
    parametrizations.weight_norm(block.up)
    want = copy.deepcopy(block)
    layer = replaced(block)
    assert kind_of(layer) == "ExpertList"
    assert_like(layer, want)


def holds_the_original(block):
    original = block.forward
    block.forward = lambda x: 2 * original(x)


CHANGES = {
    "dtypes": (lambda block: block.down.bfloat16(),
               r"0 has .* \(up.weight is torch.float32 on cpu, down.weight is"),
    "original": (holds_the_original, "a copy does not use its own weights"),
    "leaky": (lambda block: setattr(block, "compute", BLOCKS["leaky"][0]),
              "0: leave out dropout: no built-in experts compute"),
}  # fmt: skip


@pytest.mark.parametrize("change, words", CHANGES.values(), ids=CHANGES)
def test_changed_blocks_are_refused(change, words):
    assert replaced(plain(), dropout=0.1).experts.dropout == 0.1
    block = plain()
    change(block)
    with pytest.raises(ValueError, match=words):
        replaced(block, dropout=0.1)


@pytest.mark.parametrize("mish", [False, True])
def test_in_any_context_of_the_caller(mish):
    forward = (lambda s, x, _: s.down(functional.mish(s.up(x)))) if mish else ACTIVE["relu"]
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    for context in (autocast, torch.no_grad, torch.inference_mode):
        block = two(forward)
        with context():
            layer = replaced(block)
        assert kind_of(layer) == ("ExpertList" if mish else "Experts")
        assert {param.dtype for param in layer.parameters()} == {torch.float32}
        assert_like(layer, block)


# layers whose feed-forward network is no module of its own


class Layer(nn.TransformerEncoderLayer):
    """With something between its linear layers."""

    def __init__(self, between):
        super().__init__(M, 2, F, batch_first=True)
        self.between = between

    def _ff_block(self, x):
        hidden = self.between(self.activation(self.linear1(x)))
        return self.dropout2(self.linear2(self.dropout(hidden)))


@pytest.mark.parametrize("between, words", [
    (nn.LayerNorm(F), r"0: Layer computes something else .*--scale-fc of fairseq"),
    (nn.Dropout(0.5), r"0: Layer computes something else between linear1, activation"),
    (nn.Identity(), ""),
])  # fmt: skip
def test_a_layer_that_computes_more_between_its_parts_is_refused(between, words):
    model = nn.Sequential(Layer(between))
    if not words:
        assert list(replace_ffn(model, "0$", 4, **COPIED)) == ["0.linear1"]
        return
    with pytest.raises(ValueError, match=words):
        replace_ffn(model, "0$", 4, **COPIED)
    assert isinstance(model[0].linear1, nn.Linear)
