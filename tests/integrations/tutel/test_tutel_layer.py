"""Tutel's interface in one process, beside loops in fp64."""

import copy
import importlib
import itertools
import sys
from types import ModuleType

import pytest
import torch
from helpers import tutel_loop
from torch import nn
from torch.nn import functional

from fairseq_tutel.integrations import tutel
from fairseq_tutel.integrations.tutel import __main__ as command
from fairseq_tutel.integrations.tutel import moe, system

M, F, E, T = 6, 8, 4, 13
CAPACITIES = (1.25, 1.0, 0.5, 0.0, -1.0, -0.5)
FFN = {"type": "ffn", "num_experts_per_device": E, "hidden_size_per_expert": F}
# options of the layer, and of the loop
EACH = {
    "plain": ({}, {}), "priority": ({"batch_prioritized_routing": True}, {"priority": True}),
    "raw weights": ({"normalize_gate": False}, {"normalize": False}),
    "scores before": ({"is_postscore": False}, {"postscore": False}),
    "overlap": ({"a2a_ffn_overlap_degree": 3}, {"alignment": 3}),
    "r = 0": ({"parallel_type": "adaptive:0"}, {}),
}  # fmt: skip


def make(gate=None, experts=None, dtype=torch.float64, **options):
    gate = {"type": "top", "k": 2} | (gate or {}) if not isinstance(gate, list) else gate
    options = {"model_dim": M, "seeds": (1, 2, 3), **options}
    return moe.moe_layer(gate, experts=FFN | (experts or {}), **options).to(dtype)


def compare(layer, x, expert, call, *, in_loop, tolerance=1e-10):
    """Output, balance loss and all gradients are those of the loop."""
    gate, found = layer.gates[0], {}
    for name in ("layer", "loop"):
        x = x.detach().clone().requires_grad_()
        layer.zero_grad()
        if name == "layer":
            y = layer(x, **call)
            loss = y.l_aux
            assert loss is layer.l_aux
        else:
            options = {"top_k": 2, "factor": 1.0} | in_loop
            y, loss = tutel_loop.layer(x, gate(x), expert, **options)
        (y.square().sum() + loss).backward()
        found[name] = [y, loss, x.grad, *(param.grad for param in layer.parameters())]
    torch.testing.assert_close(found["layer"], found["loop"], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", EACH)
def test_layer_is_a_loop_over_tokens(kind):
    options, in_loop = EACH[kind]
    layer = make(**options)
    expert = tutel_loop.ffn(dict(layer.experts.named_parameters()))
    for number, factor in enumerate(CAPACITIES, list(EACH).index(kind)):
        top_k = 1 + number % 4  # a kind has each once at least, and so has a factor
        call = {"top_k": top_k, "capacity_factor": factor}
        in_loop = {**in_loop, "top_k": top_k, "factor": factor}
        compare(layer, torch.randn(T, M).double(), expert, call, in_loop=in_loop)


@pytest.mark.parametrize("dtype, autocast", [(torch.bfloat16, False), (torch.float32, True)])
def test_other_dtypes_round_the_same_layer(dtype, autocast):
    exact = make({"fp32_gate": True, "capacity_factor": 0.0})
    layer, x = copy.deepcopy(exact).to(dtype), torch.randn(T, M).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact(x.double()), atol=0.1, rtol=0.1)


class Experts(nn.Module):
    """As a user may write: a bias that is not the width of the tokens."""

    def __init__(self, model_dim, num_experts_per_device, sharded_count, width):
        super().__init__()
        self.w = nn.Parameter(torch.randn(num_experts_per_device, model_dim, width))

    def forward(self, x, ctx):
        assert (ctx.sharded_count, ctx.num_global_experts, ctx.adaptive_degree) == (1, E, 1)
        return x.flatten(2) @ self.w


class OldExperts(Experts):
    def __init__(self, model_dim, local_experts, sharded_count, width):
        super().__init__(model_dim, local_experts, sharded_count, width)


class Gate(nn.Module):
    def __init__(self, model_dim, num_global_experts, scale):
        super().__init__()
        self.top_k, self.wg = 2, nn.Linear(model_dim, num_global_experts)
        self.scale, self.capacity_factor = scale, 0.0

    def forward(self, x):
        return self.wg(x) * self.scale


@pytest.mark.parametrize("module", [Experts, OldExperts])
def test_gates_and_experts_of_ones_own(module):
    own = {"type": "custom", "module": module, "num_experts_per_device": E, "width": 10}
    gate = {"type": "custom", "module": Gate, "scale": 2.0}
    layer = moe.moe_layer(gate, M, own).double()
    x = torch.randn(T, M).double()
    w = layer.experts.w
    compare(layer, x, lambda e, row: row @ w[e], {}, in_loop={"factor": 0.0})
    by_two = layer(x.view(T, 2, 3), reserve_dims=2)
    torch.testing.assert_close(by_two, layer(x))
    assert layer(x[:1].view(1, 1, M)).shape == (1, 1, 10)
    with pytest.raises(ValueError, match=r"tokens \[12\] do not have model_dim=6 numbers"):
        layer(torch.zeros(2, 2 * M))


def test_activations_outputs_and_biases():
    layer = make(experts={"activation_fn": functional.silu, "output_dim": 3, "has_fc1_bias": False})
    params = {"batched_fc1_bias": torch.zeros(E, F), **dict(layer.experts.named_parameters())}
    x = torch.randn(T, M).double()
    compare(layer, x, tutel_loop.ffn(params, functional.silu), {}, in_loop={})
    other = make(experts={"activation_fn_with_self": lambda h, bank: h * len(bank.batched_fc1_w)})
    params = dict(other.experts.named_parameters())
    compare(other, x, tutel_loop.ffn(params, lambda h: h * E), {}, in_loop={})


def test_several_gates_and_results():
    gates = [{"type": "top", "k": 1}, {"type": "cosine_top", "k": 2, "proj_dim": 3}]
    layer = make(gates, result_func=lambda y: (y, y.l_aux))
    x = torch.randn(2, T, M).double()
    layer.eval()
    for index, top_k in ((0, 1), (1, 2)):
        y, loss = layer(x, gate_index=index, capacity_factor=0)
        logits = layer.gates[index](x.view(-1, M))
        expert = tutel_loop.ffn(dict(layer.experts.named_parameters()))
        wanted, wanted_loss = tutel_loop.layer(x.view(-1, M), logits, expert, top_k, 0)
        torch.testing.assert_close((y.view(-1, M), loss), (wanted, wanted_loss))
    point = functional.normalize(layer.gates[1].cosine_projector(x.view(-1, M)), dim=1)
    cosine = point @ functional.normalize(layer.gates[1].sim_matrix, dim=0)
    torch.testing.assert_close(logits, cosine / 0.5)


def test_load_loss_and_noise_are_those_of_the_definition(monkeypatch):
    layer = make({"gate_noise": 2.0, "k": 2}, is_gshard_loss=False)
    x = torch.randn(T, M).double()
    torch.manual_seed(4)
    found = layer(x).l_aux
    torch.manual_seed(4)
    logits = layer.gates[0](x)
    std = 2.0 / E
    noisy = logits + std * torch.randn_like(logits)
    scores = logits.softmax(1)
    last = noisy.sort(1, descending=True).values[:, 1:2]
    load = torch.distributions.Normal(0.0, std).cdf(scores - last).sum(0)
    terms = [values.var() / values.mean() ** 2 for values in (scores.sum(0), load)]
    torch.testing.assert_close(found, sum(terms) / 2)
    with pytest.raises(ValueError, match="gate_noise above 0"):
        make(is_gshard_loss=False)(x)
    monkeypatch.setenv("SKIP_MOE", "1")
    with pytest.raises(ValueError, match="SKIP_MOE is not offered: it leaves the layer out"):
        layer(x)


def test_weights_follow_the_seeds_draw_by_draw():
    found = {}
    gates = [{"type": "top", "k": 1}, {"type": "cosine_top", "k": 1, "proj_dim": 5}]
    layer = make(gates, dtype=torch.float32, scan_expert_func=lambda *each: found.update([each]))
    after = torch.rand(1)
    torch.manual_seed(2)
    drawn = [(nn.Linear(M, F), nn.Linear(F, M)) for _ in range(E)]
    wanted = {
        "batched_fc1_w": torch.stack([fc1.weight for fc1, _ in drawn]),
        "batched_fc2_w": torch.stack([fc2.weight.t() for _, fc2 in drawn]),
        "batched_fc1_bias": torch.stack([fc1.bias for fc1, _ in drawn]),
        "batched_fc2_bias": torch.stack([fc2.bias for _, fc2 in drawn]),
    }
    assert list(wanted) == list(found)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, check_stride=False)
    torch.manual_seed(1)
    assert torch.equal(layer.gates[0].wg.weight, nn.Linear(M, E, bias=False).weight)
    torch.manual_seed(2)
    assert torch.equal(layer.gates[1].cosine_projector.weight, nn.Linear(M, 5).weight)
    torch.randn(5, E)
    assert torch.equal(layer.gates[1].sim_matrix, torch.empty(5, E).normal_(0, 0.01))
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))
    assert [name for name, _ in layer.get_parameter_iterator("local_experts")] == list(wanted)
    assert next(layer.get_parameter_iterator("gate"))[0] == "0.wg.weight"


def test_state_dicts_have_tutels_names_and_older_files_load():
    layer, other = make(), make(seeds=(7, 8, 9))
    shapes = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    assert shapes == {
        "_num_global_experts": (), "gates.0.wg.weight": (E, M),
        "experts.batched_fc1_w": (E, F, M), "experts.batched_fc2_w": (E, F, M),
        "experts.batched_fc1_bias": (E, F), "experts.batched_fc2_bias": (E, M),
    }  # fmt: skip
    old = dict(layer.state_dict())
    old["experts.batched_fc1_bias"] = old["experts.batched_fc1_bias"][:, None]
    del old["_num_global_experts"]
    other.load_state_dict(old)
    torch.testing.assert_close(other.state_dict(), layer.state_dict())
    with pytest.raises(ValueError, match="8 experts in the file, and 4 in the layer"):
        other.load_state_dict({"_num_global_experts": torch.tensor(8)}, strict=False)


def test_rows_by_hand():
    """Layers from scratch: encode and decode, of tokens in a given plan."""
    for top_k, factor, postscore in itertools.product((1, 2, 3), CAPACITIES, (True, False)):
        scores = torch.randn(T, E).double().softmax(1)
        x = torch.randn(T, M).double()
        crit, loss = moe.top_k_routing(scores, top_k, capacity_factor=factor)
        chosen, slot_TK, weight, capacity = tutel_loop.slots(scores, top_k, factor)
        rows, ids = torch.zeros(E, capacity, M).double(), torch.full((2, E, capacity), -1)
        for t, k in itertools.product(range(T), range(top_k)):
            if slot_TK[t][k] < capacity:
                place = chosen[t, k], slot_TK[t][k]
                rows[place] = x[t] if postscore else weight[t, k] * x[t]
                ids[(0, *place)], ids[(1, *place)] = t, k
        torch.testing.assert_close(moe.fast_encode(x, crit, postscore), rows)
        wanted, _ = tutel_loop.layer(x, scores.log(), lambda e, row: row, top_k, factor)
        torch.testing.assert_close(moe.fast_decode(rows, crit, postscore), wanted)
        for number, kind in enumerate(("sample_id", "top_id")):
            assert torch.equal(moe.get_reversed_sample_ids(crit, kind).long(), ids[number])
        found, counts = moe.get_topk_selection(crit)
        assert torch.equal(found.long(), chosen)
        assert counts.tolist() == chosen.flatten().bincount(minlength=E).tolist()
        dispatcher = moe.fast_dispatcher(E, 1, M, torch.float64)
        dispatcher.update(crit.indices, crit.locations, crit.gates, capacity, postscore)
        torch.testing.assert_close(dispatcher.encode(x), rows.flatten(0, 1))
        torch.testing.assert_close(dispatcher.decode(rows.flatten(0, 1)), wanted)
    mask = torch.randint(2, (T, E))
    assert torch.equal(moe.fast_cumsum_sub_one(mask), mask.cumsum(0) - 1)


REFUSED = [
    ({"megablocks_size": 4}, ValueError, "megablocks_size is not offered"),
    ({"pad_samples": False}, ValueError, "pad_samples is not offered: it is deprecated"),
    ({"gate_type": "Top2Gate"}, ValueError, "gate_type is not offered"),
    ({"experts": FFN | {"fused_custom_fn": id}}, ValueError, "fused_custom_fn"),
    ({"experts": FFN | {"type": "sparse"}}, ValueError, "type='sparse' is not one of custom, ffn"),
    ({"gate_type": {"type": "x"}}, ValueError, "type='x' is not one of custom, top, cosine_top"),
    ({"parallel_type": "adaptive:-1"}, ValueError, "adaptive:-1"),
    ({"experts": FFN | {"num_experts_per_device": -2}}, ValueError, "must divide the 1 ranks"),
    ({"gate_type": {"type": "top", "capacity": 1}}, TypeError, "capacity"),
    ({"overlap": 2}, TypeError, "no argument overlap"),
]


@pytest.mark.parametrize("options, error, message", REFUSED)
def test_what_is_not_offered_is_refused_by_name(options, error, message):
    given = {"gate_type": {"type": "top", "k": 1}, "model_dim": M, "experts": FFN}
    with pytest.raises(error, match=message):
        moe.moe_layer(**{**given, **options})


def test_names_of_files_and_the_session(tmp_path):
    path = system.apply_rank_size_from_pattern(f"{tmp_path}/a/{{rank}}-of-{{size}}.pt", 1, 2)
    assert path == f"{tmp_path}/a/1-of-2.pt" and (tmp_path / "a").is_dir()
    session = system.init_data_model_parallel(backend="gloo")
    assert system.get_local_session() is session and system.record_time() > 0
    assert (session.global_size, session.model_rank, session.model_group) == (1, 0, None)
    assert session.local_device == torch.device("cpu")


# programs that import tutel, unmodified
PROGRAM = """
import sys
import torch
import beside
from tutel import moe, system
from tutel.net import simple_all_reduce

layer = moe.moe_layer({"type": "top", "k": 2}, 4, {"type": "ffn", "hidden_size_per_expert": 8})
beside.found.append(([*sys.argv], __name__, layer(torch.ones(3, 4)).shape))
"""


@pytest.fixture
def no_tutel(monkeypatch):
    """Nothing is left of an installed module."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = ["tutel", "beside", *(f"tutel.{name}" for name in ("moe", "net", "system"))]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("words", [["{folder}/of_tutel.py"], ["-m", "of_tutel"]])
def test_a_program_runs_as_it_is(no_tutel, tmp_path, monkeypatch, words):
    (tmp_path / "of_tutel.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("found = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = [word.format(folder=tmp_path) for word in words]
    monkeypatch.setattr(sys, "argv", ["command", *words, "--flag", "1"])
    command.main()
    ((arguments, name, shape),) = sys.modules["beside"].found
    assert (arguments[1:], name, shape) == (["--flag", "1"], "__main__", (3, 4))
    assert str(tmp_path / "of_tutel.py") == arguments[0]
    monkeypatch.setattr(sys, "argv", ["command"])
    with pytest.raises(SystemExit, match="usage: python -m fairseq_tutel.integrations.tutel"):
        command.main()


def test_tutel_itself_is_not_replaced_unless_asked_for(no_tutel, monkeypatch):
    monkeypatch.setitem(sys.modules, "tutel", ModuleType("tutel"))
    with pytest.raises(ImportError, match="Tutel is installed"):
        tutel.install()
    tutel.install(force=True)
    tutel.install()  # a second time changes nothing
    assert importlib.import_module("tutel.moe") is sys.modules["tutel"].moe is tutel.moe
    with pytest.raises(ImportError, match="tutel.jit is not offered, only moe, net, system"):
        exec("from tutel import jit")
