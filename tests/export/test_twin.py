"""Models and layers in core operators: the numbers of fairseq's models and of the layer."""

import pytest
import torch
from exported_models import CASES, logits_of, make, sentences
from torch import nn

from fairseq_tutel.export import ExportError, ModelSource, layer_twin
from fairseq_tutel.export.twin import InferenceModel
from fairseq_tutel.moe import MoELayer


def twin_of(path):
    source = ModelSource(path)
    twin = InferenceModel(source.config)
    twin.load_state_dict(source.tensors(source.shapes), assign=True)
    return twin.eval()


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_logits_are_those_of_fairseq(options, tmp_path):
    saved, tokens = make(tmp_path, options), sentences()
    tokens[1, 5:] = 1  # padding behind
    twin, is_token = twin_of(saved.path), tokens != 1
    want = logits_of(saved.model, tokens)
    before = torch.cat([torch.ones(len(tokens), 3, dtype=torch.int64), tokens], 1)
    with torch.no_grad():
        for got in (twin(tokens), twin(before)[:, 3:]):
            torch.testing.assert_close(got[is_token], want[is_token], rtol=1e-5, atol=1e-5)


CLAMPED = {"expert_network": "clamped_swiglu", "expert_options": {"limit": 0.4, "bias": True}}
LAYERS = {
    "top-2": {}, "top-1": {"top_k": 1}, "swiglu": {"expert_network": "swiglu"},
    "geglu with biases": {"expert_network": "geglu", "expert_options": {"bias": True}},
    "clamped swiglu": CLAMPED,
    "relu, shared expert": {"activation": "relu", "shared_expert_dim": 6},
    "groups": {"num_experts": 6, "num_expert_groups": 3, "top_groups": 1, "group_score": "max"},
    "gated shared expert": {"shared_expert_dim": 6, "shared_expert_gate": True},
    "sigmoid, scaled": {"score_function": "sigmoid", "route_scale": 2.0, "top_k": 3},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_a_layer_computes_the_same(options, dtype):
    torch.manual_seed(0)
    layer = MoELayer(16, hidden_dim=24, seed=1, **{"num_experts": 5, **options}).eval().to(dtype)
    x = torch.randn(3, 7, 16, dtype=dtype)
    with torch.no_grad():
        want, got = layer(x), layer_twin(layer)(x)
    # half numbers: sums of K in another precision
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.03}
    torch.testing.assert_close(got, want, **close)
    assert want.abs().max() > 0.05


def test_what_is_compiled_has_core_operators_alone_and_any_number_of_tokens():
    torch.manual_seed(0)
    twin = layer_twin(MoELayer(16, 3, 24, seed=1, shared_expert_dim=6).eval().bfloat16())
    x = torch.randn(9, 16, dtype=torch.bfloat16)
    with torch.no_grad():
        dims = ({0: torch.export.Dim("tokens", max=100)},)
        program = torch.export.export(twin, (x,), dynamic_shapes=dims)
        calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
        operators = [str(call) for call in calls if isinstance(call, torch._ops.OpOverload)]
        assert len(operators) > 20 and all(name.startswith("aten.") for name in operators)
        # one product per projection, not one per expert
        assert len([name for name in operators if "grouped_mm" in name]) == 2
        for count in (1, 2, 9):
            torch.testing.assert_close(program.module()(x[:count]), twin(x[:count]))


class OwnGate(nn.Linear):
    pass


REFUSED = {
    "cosine router": {"router": "cosine"}, "--moe-null-experts 2": {"null_experts": 2},
    r"gate of your own \(OwnGate\)": {"gate": OwnGate(16, 4, bias=False)},
    r"no built-in stacked ones \(ExpertList\)": {"expert_fn": lambda: nn.Linear(16, 16)},
}  # fmt: skip


@pytest.mark.parametrize("named", REFUSED)
def test_a_layer_that_has_no_twin_is_refused_by_name(named):
    with pytest.raises(ExportError, match=named):
        layer_twin(MoELayer(16, 4, **REFUSED[named]))
