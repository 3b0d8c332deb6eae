"""Feed-forward blocks of models that exist become MoE layers."""

import copy

import pytest
import torch
from test_recognized_blocks import GATED
from test_recognized_blocks import Block as Linears
from torch import nn

from fairseq_tutel.config import ExpertConfig
from fairseq_tutel.moe import MoELayer, every_other, replace_ffn
from fairseq_tutel.moe.experts import SwiGLUExperts

M, F = 8, 12
DROPLESS = {"capacity_factor": 0.0}


class Mlp(nn.Module):
    """As timm's."""

    def __init__(self, act=nn.GELU, drop=0.0, norm=nn.Identity, bias=True):
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(M, F), act(), nn.Dropout(drop)
        self.norm = norm()
        self.fc2, self.drop2 = nn.Linear(F, M, bias=bias), nn.Dropout(drop / 2)

    def forward(self, x):
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


class Conv1D(nn.Module):
    """As GPT-2's of transformers."""

    def __init__(self, nx, nf):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(0.1 * torch.randn(nx, nf)),
            nn.Parameter(torch.randn(nf)),
        )

    def forward(self, x):
        return x @ self.weight + self.bias


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.scale = Mlp(), nn.Parameter(torch.rand(M))

    def forward(self, x):
        return self.scale * self.mlp(x)


class Block(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(M), mlp

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def of(*blocks):
    return nn.Sequential(*(Block(each) for each in blocks))


BLOCKS = {
    "gelu": (Mlp, "ffn", "gelu"),
    "tanh gelu": (lambda: Mlp(lambda: nn.GELU("tanh")), "ffn", "gelu_accurate"),
    "relu without a bias": (lambda: Mlp(nn.ReLU, bias=False), "ffn", "relu"),
    "sequential": (
        lambda: nn.Sequential(nn.Linear(M, F), nn.SiLU(), nn.Linear(F, M)), "ffn", "silu",
    ),
    "conv1d": (lambda: nn.Sequential(Conv1D(M, F), nn.ReLU(), Conv1D(F, M)), "ffn", "relu"),
    "swiglu": (lambda: Linears(GATED["swiglu"], bias=False), "swiglu", None),
    "geglu": (
        lambda: Linears(lambda s, x, _: s.down(nn.functional.gelu(s.gate(x)) * s.up(x))),
        "geglu", None,
    ),
    "normed": (lambda: Mlp(norm=lambda: nn.LayerNorm(F)), "list", None),
    "scaled": (Scaled, "list", None),
    "unknown activation": (lambda: Mlp(nn.Mish), "list", None),
}  # fmt: skip


@pytest.mark.parametrize("top_k", [2, 3])
@pytest.mark.parametrize("make, kind, activation", BLOCKS.values(), ids=BLOCKS)
def test_every_expert_starts_as_the_block_that_was_there(make, kind, activation, top_k):
    torch.manual_seed(0)
    model = of(make(), make(), make(), make())
    dense, x = copy.deepcopy(model), torch.randn(2, 7, M)
    state = torch.get_rng_state()
    assert every_other(model, r"\.mlp$", start=0) == ["0.mlp", "2.mlp"]
    were = replace_ffn(
        model, every_other(model, r"\.mlp$"), 4, copy_weights=True, top_k=top_k, seed=0, **DROPLESS
    )
    assert list(were) == ["1.mlp", "3.mlp"] and type(were["3.mlp"]) is type(dense[3].mlp)
    layer = model[1].mlp
    assert isinstance(layer, MoELayer) and not isinstance(model[0].mlp, MoELayer)
    names = {"list": "ExpertList", "ffn": "Experts"}
    network = names.get(kind, {"swiglu": "SwiGLUExperts", "geglu": "GeGLUExperts"}.get(kind))
    assert type(layer.experts).__name__ == network
    assert activation is None or layer.experts.activation == activation
    torch.testing.assert_close(model(x), dense(x), rtol=1e-6, atol=1e-6)
    assert not torch.equal(state, torch.get_rng_state())  # gates are drawn, blocks are not run on


@pytest.mark.parametrize("kind", ["gelu", "swiglu", "normed"])
def test_without_copies_experts_are_drawn_anew(kind):
    block = BLOCKS[kind][0]()
    model = of(block)
    replace_ffn(model, lambda name, module: module is block, 4, seed=3)
    experts = model[0].mlp.experts
    weights = [v for n, v in model.state_dict().items() if n.endswith(".fc1.weight")]
    assert len(weights) == 4 and not any(torch.equal(w, weights[0]) for w in weights[1:])
    if kind == "normed":
        assert all(bool((expert.norm.weight == 1).all()) for expert in experts)
        own, theirs = weights[0].std(), block.fc1.weight.std()
        assert 0.7 < own / theirs < 1.4


def test_dropout_mode_dtype_and_sizes_are_the_blocks():
    model = of(Mlp(drop=0.4)).bfloat16().eval()
    replace_ffn(model, ["0.mlp"], 4, top_k=1, router="cosine")
    layer = model[0].mlp
    assert (layer.experts.activation_dropout, layer.experts.dropout) == (0.4, 0.2)
    assert not layer.training and layer.experts.fc1_weight.dtype is torch.bfloat16
    assert layer.experts.hidden_dim == F and layer.config.router == "cosine"
    given = {"hidden_dim": 5, "expert_network": "swiglu", "activation": "gelu"}
    swiglu = {"experts": ExpertConfig(expert_network="swiglu", dropout=0.3)}
    for options, width in ((given, 5), (swiglu, F)):
        replace_ffn(model := of(Mlp(drop=0.6)), "mlp", 4, **options)
        experts = model[0].mlp.experts
        assert (type(experts), experts.hidden_dim, experts.dropout) == (SwiGLUExperts, width, 0.3)
    replace_ffn(model := of(Mlp()), "mlp", 4, experts=Mlp)
    assert {type(expert) for expert in model[0].mlp.experts} == {Mlp}
    with pytest.raises(ValueError, match="copy_weights .* leave out hidden_dim"):
        replace_ffn(of(Mlp()), "mlp", 4, hidden_dim=5, copy_weights=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ["relu", nn.functional.gelu], ids=["relu", "gelu"])
def test_layers_of_torchs_transformer(activation, training):
    """In evaluation the encoder's fused layers take nested tensors, which no other module does."""
    sizes = {"activation": activation, "dropout": 0.0, "batch_first": True}
    mask, x, h = (
        torch.arange(5) >= torch.tensor([[5], [2]]),
        torch.randn(2, 5, M),
        torch.randn(3, M),
    )
    for layer, kind, *memory in (
        (nn.TransformerEncoderLayer(M, 2, F, **sizes), nn.TransformerEncoder),
        (nn.TransformerDecoderLayer(M, 2, F, **sizes), nn.TransformerDecoder, x),
    ):
        model = kind(layer, 3).train(training)
        for each in model.parameters():
            nn.init.normal_(each, std=0.3)
        padding = {("tgt" if memory else "src") + "_key_padding_mask": mask}
        with torch.no_grad():
            want = model(x, *memory, **padding)
            were = replace_ffn(model, r"layers\.[02]$", 4, copy_weights=True, **DROPLESS)
            found = model(x, *memory, **padding)
        assert list(were) == ["layers.0.linear1", "layers.2.linear1"]
        assert isinstance(model.layers[0].linear1, MoELayer)
        torch.testing.assert_close(found[~mask], want[~mask], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(were["layers.0.linear1"](h), model.layers[0].linear1(h))


def tied():
    model = of(Mlp(), Mlp())
    model[1].mlp.fc1.weight = model[0].mlp.fc1.weight
    return model


def wide():
    return nn.Sequential(nn.Sequential(nn.Linear(M, F), nn.GELU(), nn.Linear(F, 2 * M)))


shared = Mlp()
REFUSED = {
    "tied": (tied, "mlp", r"0\.mlp shares weights with 1\.mlp\.fc1\.weight"),
    "one block twice": (lambda: of(shared, shared), "mlp", r"0\.mlp shares weights with 1\.mlp\."),
    "width": (wide, "0$", r"0 \(Sequential\) is no .*it maps \[2, 3, 8\] to \[2, 3, 16\]"),
    "half of it": (lambda: of(Mlp()), "fc1", "layers are in .* of their own, put both"),
    "convolution": (lambda: of(nn.Conv2d(M, M, 1)), "mlp", r"0\.mlp is a convolution"),
    "tokens": (lambda: of(nn.LSTM(M, M)), "mlp", r"0\.mlp \(LSTM\) is no .*to tuple"),
    "no match": (lambda: of(Mlp()), "ffn", "matches 'ffn'; linear layers in it: 0.mlp.fc1, "),
    "no name": (lambda: of(Mlp()), ["0.mlp", "1.mlp"], r"has no modules \['1\.mlp'\]"),
    "no weights": (lambda: of(nn.GELU()), "mlp", r"0\.mlp has no weights"),
    "experts": (lambda: of(MoELayer(M, 4, F)), "mlp", r"0\.mlp has experts already"),
}  # fmt: skip


@pytest.mark.parametrize("make, match, words", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_replaced_is_refused_by_name(make, match, words):
    model = make()
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=words):
        replace_ffn(model, match, 4)
    assert [type(module) for module in model.modules()] == before
