"""What this room refuses, as words of the error and the call; the error that memory ran out."""

import re

import pytest
import torch
from helpers.sets import names_in, set_names
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.training import explain_out_of_memory
from fairseq_tutel.training.adam16 import Adam16, quantize_state
from fairseq_tutel.training.out_of_memory import is_out_of_memory, memory_held

DIM = 8


def make(experts=2, hidden=16):
    return nn.Sequential(MoELayer(DIM, experts, hidden, seed=1))


def optimizers(model, make=torch.optim.SGD):
    """Two, of the experts' matrices one by one and of the others."""
    matrices, others = training.matrix_parameters(model, leave_out="gate")
    return make(matrices, lr=0.0), torch.optim.AdamW(others, lr=0.0)


def load(saved, model, *given, by=()):
    """Load what was saved of another model."""

    def call(path):
        training.save_checkpoint(path, saved, *given)
        training.load_checkpoint(path, model, *by)

    return call


def changed(change):
    """Load a whole state that was changed."""

    def call(path):
        state = dict(training.full_state_dict(make()))
        change(state)
        training.load_full_state_dict(make(), state)

    return call


def collected(x=None, **options):
    def call(path):
        model = make()
        with training.collect_aux(model, **options) as aux:
            _ = aux.loss if x is None else model(x)

    return call


def replayed(path):
    model, chosen = nn.ModuleDict({"a": make(), "b": make()}), torch.tensor([[0, 1]] * 5)
    with training.replay_choices(model, {"a.0": chosen, "b.0": chosen}):
        model["a"](torch.randn(5, DIM))


def two_of_one(path):
    model = make()
    training.save_checkpoint(path, model, [optimizers(model)[0]] * 2)


def fewer_groups(path):
    model = make()
    one, other = optimizers(model)
    load(model, model, [one, other], by=[other])(path)


def converted(path):
    matrices, _ = optimizers(model := make())
    model.double()
    matrices.step()


def in_slices(path):
    model = make()
    model[0].experts.hidden_slice = (0, 2)
    training.matrix_parameters(model)


def sparse(path):
    param = nn.Parameter(torch.randn(4))
    param.grad = torch.randn(4).to_sparse()
    Adam16([param]).step()


def statistics(size, scales=0):
    state = {"step": 1, "exp_avg": torch.zeros(size).half(), "exp_avg_sq": torch.zeros(size).half()}
    state |= {f"{n}_scale": torch.ones(scales) for n in ("exp_avg", "exp_avg_sq") if scales}
    return lambda path: quantize_state(state, nn.Parameter(torch.randn(4)))


DENSE, PARAM = nn.Linear(2, 2), nn.Parameter(torch.randn(4))
TWO_SIZES = nn.Sequential(MoELayer(DIM, 4), MoELayer(DIM, 8))
OWN_NAME = nn.ModuleDict({"moe": MoELayer(DIM, 4), "experts": nn.ModuleList([DENSE])})
MASK = r"bool or integers \[batch, tokens\], 0 for padding"
ALIEN = torch.optim.SGD(DENSE.parameters(), lr=1)
REFUSED = {
    "x.pt: no such checkpoint": lambda path: training.load_checkpoint(path, make()),
    "x.pt holds no optimizer state": load(make(), make(), by=[ALIEN]),
    r"shape \(2, 2\) .* none of the modules that are saved": load(make(), make(), ALIEN),
    "has 2 experts .* has 8: build .* num_experts=2": load(make(), make(8)),
    "does not fit this model": load(make(), make(hidden=8)),
    "one num_experts, but 0 has 4 and 1 has 8": load(TWO_SIZES, TWO_SIZES),
    "experts.0.weight: .*give the module another name": load(OWN_NAME, OWN_NAME),
    "x.pt has experts, and this model has no MoELayer": load(make(), DENSE),
    "x.pt is dense, .*2 experts.* upcycle": load(DENSE, make()),
    "lacks 0.experts.1.fc1.bias": changed(lambda state: state.pop("0.experts.1.fc1.bias")),
    "0.experts.2.b, which": changed(lambda state: state.update({"0.experts.2.b": 0})),
    "does not fit .*gate.wg.w": changed(lambda s: s.update({"0.gate.wg.weight": torch.ones(1)})),
    "RuntimeError: no MoELayer was called": collected(),
    "combine='mean': choose one of sum, average": collected(combine="mean"),
    f"ValueError: .*{MASK}": collected(attention_mask=torch.ones(2, 6)),
    MASK: collected(attention_mask=torch.ones(2, 1, 6, 6, dtype=torch.bool)),
    r"no MoE layer gets tokens \[2, 5\]": collected(
        torch.randn(2, 6, DIM), attention_mask=torch.ones(2, 5).long()
    ),
    r"RuntimeError: .*layers \['b.0'\], which were not called": replayed,
    "'mean' is unknown; .*world_size, sqrt_world_size": lambda path: training.reduce_expert_grads(
        [], build_groups(4), "mean"
    ),
    "1.5": lambda path: Adam16([PARAM], betas=(0.9, 1.5)),
    "-1": lambda path: Adam16([PARAM], lr=-1),
    r"\(5,\).*\(4,\)": statistics(5),
    r"\(3,\)": statistics(4, scales=3),
    "sparse": sparse,
    "two optimizers hold .*experts.0.fc1.weight": two_of_one,
    "has 2 parameter groups, this one has 1": fewer_groups,
    "moved or converted after matrix_parameters": converted,
    "0.experts: each rank holds a slice.*replicated": in_slices,
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused(words, tmp_path):
    kinds = RuntimeError if words.startswith("RuntimeError") else (ValueError, FileNotFoundError)
    with pytest.raises(kinds) as caught:
        REFUSED[words](str(tmp_path / "x.pt"))
    assert re.search(f"(?s){words}", f"{caught.type.__name__}: {caught.value}"), caught.value


def test_a_dense_file_and_a_set_replace_each_other(tmp_path):
    path = str(tmp_path / "last.pt")
    for model in (make(), DENSE, make()):
        training.save_checkpoint(path, model)
        training.load_checkpoint(path, model)
        assert names_in(tmp_path) == ({"last.pt"} if model is DENSE else set_names("last", 1))


def test_the_error_names_consumers_and_what_helps():
    model = torch.nn.Sequential(MoELayer(64, 4, hidden_dim=512, seed=1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    weights = sum(param.nbytes for param in model.parameters())
    held = memory_held(model.parameters(), optimizer)
    assert held["weights"] == held["gradients"] == weights
    assert 2 * weights < held["optimizer state"] < 2 * weights + 100
    message = (
        r"out of memory \(it tried to allocate 4,194,304\.0 GiB\): the largest are optimizer state "
        r"2\.0 MiB, weights 1\.0 MiB, gradients 1\.0 MiB; what helps: "
        r".*checkpoint.*; .*='lean'.*; .*slices .*; .*shard"
    )
    explained = explain_out_of_memory(model, optimizer)
    with pytest.raises(torch.OutOfMemoryError, match=message) as raised, explained:
        torch.empty(2**52, dtype=torch.uint8)
    assert "\n" not in str(raised.value) and "allocator" in str(raised.value.__cause__).lower()


def test_copies_that_an_optimizer_steps_are_counted():
    model = torch.nn.Linear(4, 4, bias=False).half()
    optimizer = torch.optim.SGD([torch.nn.Parameter(model.weight.detach().float())], lr=0.1)
    assert memory_held(model.parameters(), optimizer) == {"weights": 32, "fp32 copies": 64}


def test_other_errors_pass():
    explained = explain_out_of_memory(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), explained:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(ValueError("out of memory"))
