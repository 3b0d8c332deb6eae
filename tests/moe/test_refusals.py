"""What a layer refuses, and with which words: arguments of its constructor and of its calls.

Refusals of combinations: test_product.py, test_combinations.py.
"""

import pytest
import torch
from torch import nn

from fairseq_tutel.config import ExpertConfig
from fairseq_tutel.distributed import ExpertParallelGroups
from fairseq_tutel.moe import ExpertBank, MoELayer

M, E, T = 6, 4, 23


def network():
    return nn.Sequential(nn.Linear(M, 10), nn.ReLU(), nn.Linear(10, M, bias=False))


ONE = network()
LEAN = {"activation_memory": "lean"}
SAID = "experts= says what the experts are, and not "
BUILT = [
    ({"expert_fn": 3}, "expert_fn must be a function that makes an expert, got 3"),
    ({"expert_fn": ONE}, "(?s)must be a function that makes an expert, got Sequential"),
    ({"expert_fn": network, "hidden_dim": 8}, "and not hidden_dim=8"),
    ({"expert_network": "geglu", "activation": "relu"}, "activation='relu'.*'geglu' has its"),
    ({"expert_fn": lambda: None}, "function of experts must make modules, but made None"),
    ({"expert_fn": lambda: ONE}, "the same module twice"),
    ({"experts": lambda: ONE}, "the same module twice"),
    ({"expert_fn": network, "experts": [ONE] * E}, "expert_fn and experts both"),
    ({"experts": [nn.Identity()] * E, "hidden_dim": 8}, f"{SAID}hidden_dim=8"),
    ({"experts": [nn.Identity()] * 3}, "3 expert modules given.*holds 4 of 4"),
    ({"experts": ONE[0]}, "experts must be a list of modules, got Linear"),
    # given, and not only different from the default
    ({"expert_fn": network, "expert_network": "ffn"}, "and not expert_network='ffn'"),
    ({"experts": network, "dropout": 0.0}, f"{SAID}dropout=0.0"),
    ({"experts": network, "activation": "relu"}, f"{SAID}activation='relu'"),
    ({"experts": ExpertConfig(), "activation": "gelu"}, "beside it: {'activation': 'gelu'}"),
    ({"experts": ExpertConfig(), "expert_fn": network}, "expert_fn and experts both"),
    ({"gate": "cosine"}, "gate must be a module, got 'cosine'; router='cosine'"),
    ({"top_k": 1.5}, "top_k=1.5 must be a whole number"),
    ({"groups": ExpertParallelGroups(8)}, "groups were built for 8 experts, the layer has 4"),
    ({"hidden_dim": 0}, "hidden_dim=0"),
    ({"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
    ({"activation": "softplus"}, "unknown activation 'softplus'"),
    ({"shared_expert_dim": -1}, "shared_expert_dim=-1"),
    ({"shared_expert_gate": True}, "=True needs shared_expert_dim"),
    ({"load_bias": "sign", "gate": ONE}, "load_bias='sign' needs a router"),
    ({"expert_network": "glu"}, "expert_network='glu' is unknown.*ffn, geglu"),
    (
        {"expert_network": "swiglu", "expert_options": {"biases": True}},
        "expert_network='swiglu' has no option 'biases'",
    ),
    ({"activation_memory": "least"}, "'least' is unknown; choose one of fast, lean, minimal"),
    ({"activation_storage": "fp8"}, "'fp8' needs activation_memory='lean'"),
    ({"activation_memory": "minimal", "activation_storage": "fp8"}, "needs .*='lean'"),
    ({**LEAN, "activation_storage": "bf16"}, "'bf16' .*one of same, fp8"),
    ({"expert_compute": "fp4"}, "fp4"),
    ({"expert_compute": "fp8", "hidden_dim": 24}, "multiples of 16, not model_dim=6 and 24"),
    ({"expert_storage": "fp8"}, "expert_storage='fp8' is unknown; choose one of"),
    # without a width
    ({"model_dim": None, "expert_fn": nn.Identity}, "Identity has no linear .*give model_dim="),
    ({"model_dim": None, "expert_fn": lambda: nn.LazyLinear(M)}, "LazyLinear has no linear layer"),
]


@pytest.mark.parametrize(("options", "words"), BUILT)
def test_wrong_arguments_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        MoELayer(**{"model_dim": M, "num_experts": E, **options})


NAMES = {
    "capacity": "capacity_factor", "hiden_dim": "hidden_dim", "topk": "top_k", "xyzzy": None,
    "activation_mem": "activation_memory", "expert_func": "expert_fn",
}  # fmt: skip
NO_OPTIONS = [
    *(
        ({name: 1.25}, f"no option {name}=1.25{f'; did you mean {near}.' if near else ''}$")
        for name, near in NAMES.items()
    ),
    ({"model_dim": None}, "needs model_dim, or expert_fn= or experts="),
    ({"model_dim": None, "experts": ExpertBank()}, "needs model_dim, or expert_fn= or experts="),
    ({"optimizer": "adamw"}, r"(?s)optimizer='adamw'.*AdamW\(model"),
]


@pytest.mark.parametrize(("options", "words"), NO_OPTIONS)
def test_what_is_no_option_and_what_is_missing(options, words):
    with pytest.raises(TypeError, match=words):
        MoELayer(**{"model_dim": M, "num_experts": E, **options})


PAIRS = torch.tensor([[0, 1]] * T)
PAD = torch.zeros(T).bool()
CALLS = [
    ({"x": torch.randn(T, 5)}, "model_dim=6, the input has 5"),
    ({"top_k": 5}, "top_k=5 must be at most 4"),
    *(
        ({"pad_mask": wrong}, rf"pad_mask must be bool \({T},\), True for padding")
        for wrong in (PAD.float(), PAD.long(), PAD[None])
    ),
    ({"choices": torch.zeros(T, 2)}, "choices must be integers"),
    ({"choices": PAIRS[1:]}, "got torch.int64 .22, 2"),
    ({"choices": torch.tensor([[0, E]] * T)}, f"has expert {E}, the layer has {E}"),
    # numbers that a cast to int32 would turn into experts
    ({"choices": torch.tensor([[0, 2**32 + 1]] * T)}, f"has expert {2**32 + 1}, the layer has"),
    ({"choices": torch.tensor([[0, 3 - 2**32]] * T)}, f"has expert {2**32 - 5}, the layer has"),
    ({"choices": torch.tensor([[0, 2**64 - 3]] * T, dtype=torch.uint64)}, "got torch.uint64"),
    ({"choices": torch.tensor([[0, 1]] * 4 + [[2, 2]] * 19)}, "token 4 an expert twice"),
    ({"choices": PAIRS, "top_k": 1}, "top_k=1"),
    ({"weights": torch.ones(T, 2)}, "belongs to choices="),
    ({"choices": PAIRS, "weights": torch.ones(T, 1)}, "weights must be"),
]


@pytest.mark.parametrize(("call", "words"), CALLS)
def test_arguments_of_a_call_that_do_not_fit(call, words):
    with pytest.raises(ValueError, match=words):
        MoELayer(M, E, 8)(**{"x": torch.randn(T, M), **call})


@pytest.mark.parametrize(("nulls", "words"), [(0, ""), (3, " and 3 null experts")])
def test_logits_for_another_number_of_experts_are_refused(nulls, words):
    layer = MoELayer(M, E, 8, null_experts=nulls, gate=nn.Linear(M, 2))
    with pytest.raises(ValueError, match=f"logits for 2 experts, the layer has 4{words}$"):
        layer(torch.randn(T, M))


@pytest.mark.parametrize("sizes", [(M + 2, M), (M, M + 2)])
@pytest.mark.parametrize("factor", [0.0, 2.0])
def test_experts_of_a_wrong_width_are_named(sizes, factor):
    layer = MoELayer(M, E, expert_fn=lambda: nn.Linear(*sizes), capacity_factor=factor)
    with pytest.raises(ValueError, match=rf"an expert maps \[n, {M}\] to .*; Linear got"):
        layer(torch.randn(9, M))


STATES = [
    ("experts.1.fc1.bias", None, r'Missing key.*"experts.1.fc1.bias"'),
    ("experts.4.fc1.bias", torch.zeros(8), r'Unexpected key.*"experts.4.fc1.bias"'),
    ("experts.1.fc2.bias", torch.zeros(3), r"size mismatch for experts.1.fc2.bias.*3.*6"),
]


@pytest.mark.parametrize(("key", "value", "words"), STATES)
def test_wrong_state_dicts_are_refused_by_name(key, value, words):
    layer = MoELayer(M, E, 8)
    state = {k: v for k, v in {**layer.state_dict(), key: value}.items() if v is not None}
    with pytest.raises(RuntimeError, match=f"(?s){words}"):
        layer.load_state_dict(state)
