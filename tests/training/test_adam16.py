"""The torch twin and the optimizer: against Adam in fp64, and their state in checkpoints."""

import copy
import math

import pytest
import torch
from fairseq import utils as fairseq_utils
from fairseq.optim.adam import Adam as FairseqAdam32
from helpers.assertions import assert_same_state, rms_ratio
from helpers.dispatched import spied

from fairseq_tutel import ops
from fairseq_tutel.backends.torch.adam import quantize_, scale_of_max
from fairseq_tutel.distributed import mark_expert
from fairseq_tutel.training import adam16
from fairseq_tutel.training.adam16 import Adam16, dequantize_state, quantize_state

BETAS = (0.9, 0.98)


def gradients(shape, steps, *, seed=0, spread=2.0):
    """Noisy gradients whose elements differ in size by powers of e**spread."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(spread * torch.randn(shape, generator=generator, dtype=torch.float64))
    for _ in range(steps):
        yield size * (0.3 + torch.randn(shape, generator=generator, dtype=torch.float64))


def store_error(values, largest, *, upwards):
    """Documented error of storing ``values`` once (backends/torch/adam.py), elementwise."""
    small = values.abs() < 2.0**-28 * largest
    absolute = largest * (2.0**-38 if upwards else 2.0**-39)
    return torch.where(small, absolute, values.abs() * 2.0**-11)


def test_statistics_stay_within_the_documented_bound_of_fp64_adam():
    param = torch.nn.Parameter(torch.randn(4000))
    exact = dict.fromkeys(("exp_avg", "exp_avg_sq"), 0.0)
    optimizer = Adam16([param], lr=1e-3, betas=BETAS, weight_decay=0.1)
    bounds = {"exp_avg": 0.0, "exp_avg_sq": 0.0}
    # e**(6 * 3.5 * 2) covers more than fp16's range: small second moments become subnormal
    for grad in gradients(param.shape, 200, spread=6.0):
        param.grad = grad.float()
        optimizer.step()
        state = dequantize_state(optimizer.state[param])
        for power, (name, beta) in enumerate(zip(exact, BETAS, strict=True), start=1):
            exact[name] = beta * exact[name] + (1 - beta) * grad.float().double() ** power
            values, true = state[name].double(), exact[name]
            stored = store_error(values, values.abs().max(), upwards=name == "exp_avg_sq")
            bounds[name] = beta * bounds[name] + stored
            error = (values - true).abs()
            assert bool((error <= 1.001 * bounds[name] + 1e-5 * true.abs()).all()), name
            # the bound would be no proof if the error were never near it
            assert (error / bounds[name]).max() > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_parameters_are_updated_as_fairseqs_adam_updates_them(dtype):
    params = [torch.nn.Parameter(torch.randn(1000).to(dtype))]
    params.append(torch.nn.Parameter(params[0].detach().clone()))
    options = {"lr": 0.01, "betas": BETAS, "weight_decay": 0.1, "eps": 1e-3}
    pair = Adam16(params[:1], **options), FairseqAdam32(params[1:], **options)
    for number, grad in enumerate(gradients(params[0].shape, 5)):
        for param, optimizer in zip(params, pair, strict=True):
            param.grad = grad.to(dtype)
            optimizer.step()
        if not number and dtype == torch.float32:
            torch.testing.assert_close(*params, rtol=1e-6, atol=1e-7)
    ours, theirs = params
    # 5e-4 of an update of 0.01 rarely changes the rounding of a weight of size 1
    near = max(torch.finfo(dtype).eps, 1e-3)
    far = (ours - theirs).abs() > near * theirs.abs()
    assert far.float().mean() < 0.02 and ours.dtype == dtype
    assert pair[0].state[ours]["exp_avg"].dtype == torch.float16


def stepped(*grads, start=None, scale=1.0, **options):
    """(parameter, its state) after a step by each gradient; by default from ones."""
    start = torch.ones_like(grads[0]) if start is None else start
    param = torch.nn.Parameter(start.clone(memory_format=torch.preserve_format))
    optimizer = Adam16([param], **{"lr": 0.1, **options})
    for grad in grads:
        param.grad = grad
        optimizer.step(scale=scale)
    return param, optimizer.state[param]


@pytest.mark.parametrize("scale", [8.0, torch.tensor(8.0), torch.tensor([8.0])])
def test_scale_divides_gradients(scale, monkeypatch):
    # on a GPU these two copy from pageable memory, which waits
    monkeypatch.setattr(torch, "tensor", None)
    monkeypatch.setattr(torch, "as_tensor", None)
    grad = torch.randn(64)
    param, _ = stepped(8 * grad, scale=scale)
    assert torch.equal(param, stepped(grad)[0]) and torch.equal(param.grad, 8 * grad)


@pytest.mark.parametrize("scale", [2.0**-60, 1.0, 3.7, 2.0**60])
def test_rounding_error_of_one_store(scale):
    values = scale * torch.logspace(-14, 0, 4001, dtype=torch.float64).float()
    out = torch.empty(1, 4001, dtype=torch.float16)
    for round_up in (False, True):
        used = quantize_(out, values.clone().view(1, -1), round_up=round_up)
        assert 2.0**14 <= values.max() / used < 2.0**15 and math.log2(used.item()) % 1 == 0
        restored = out[0].double() * used.double()
        error = (restored - values.double()).abs()
        allowed = store_error(values.double(), values.max().double(), upwards=round_up)
        assert bool((error <= allowed).all())
        if round_up:
            subnormal = values.double() < 2.0**-29 * values.max()
            assert subnormal.sum() > 1000
            assert bool((restored >= values.double())[subnormal].all())


def test_scale_of_zero_subnormal_and_largest_maximum():
    largest = torch.finfo(torch.float32).max
    scale = scale_of_max(torch.tensor([0.0, 1e-44, 1.0, 1.9999999, 2.0, largest]))
    expected = [1.0, 2.0**-126, 2.0**-14, 2.0**-14, 2.0**-13, 2.0**113]
    assert scale.tolist() == expected


def test_nonfinite_gradients_spoil_their_own_elements_only():
    param, state = stepped(torch.tensor([1.0, math.inf, 2.0, math.nan, 1e30, 3.0]))
    other, clean_state = stepped(torch.tensor([1.0, 0.0, 2.0, 0.0, 0.0, 3.0]))
    clean = torch.tensor([0, 2, 5])
    assert torch.equal(param[clean], other[clean])
    assert param.isnan().tolist() == [False, True, False, True, False, False]
    # 1e30 squared overflows fp32: as in fp32 Adam, the element then stands still
    assert param[4] == 1.0
    assert torch.equal(state["exp_avg_sq"][clean], clean_state["exp_avg_sq"][clean])


def parameter(value, expert=True):
    param = torch.nn.Parameter(value)
    return mark_expert(param) if expert else param


def test_state_of_stacked_experts_equals_that_of_each_expert_alone():
    stacked = parameter(torch.randn(3, 8, 5))
    before, optimizer = stacked.detach().clone(), Adam16([stacked], lr=0.01)
    loudness = torch.tensor([1e-4, 1.0, 1e3]).view(3, 1, 1)
    grads = [grad.float() * loudness for grad in gradients(stacked.shape, 6)]
    for stacked.grad in grads:
        optimizer.step()
    state = optimizer.state[stacked]
    assert state["exp_avg_scale"].shape == (3,) and state["exp_avg_sq_scale"].shape == (3,)
    assert state["exp_avg_scale"].unique().numel() == 3
    for index in range(3):
        expert, own = stepped(*(grad[index] for grad in grads), start=before[index], lr=0.01)
        torch.testing.assert_close(stacked[index], expert)
        for name in ("exp_avg", "exp_avg_sq"):  # fp16
            assert rms_ratio(state[name][index], own[name]) < 1e-3, name
            assert torch.equal(state[f"{name}_scale"][index], own[f"{name}_scale"]), name
            assert own[f"{name}_scale"].shape == ()


def test_parts_of_fp32_statistics_take_the_scales_of_the_whole():
    """As ranks do that hold half of an expert each; steps of parts: test_sliced_state.py."""
    state = {"step": 5, "exp_avg": torch.randn(1, 16, 32), "exp_avg_sq": torch.rand(1, 16, 32)}
    state["exp_avg"][:, 8:] *= 1e4  # of another magnitude in one half
    maxima = []
    whole, half = (parameter(torch.randn(1, units, 32)) for units in (16, 8))
    wanted = quantize_state(state, whole, lambda tensor: maxima.append(tensor.clone()))
    for number in range(2):
        known = iter(maxima)
        part = {k: v.chunk(2, 1)[number] if torch.is_tensor(v) else v for k, v in state.items()}
        found = quantize_state(part, half, lambda t, k=known: t.copy_(next(k)))
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found[name], wanted[name].chunk(2, 1)[number]), name
            assert torch.equal(found[f"{name}_scale"], wanted[f"{name}_scale"]), name


@pytest.mark.parametrize(
    ("dtype", "through_fp32", "expert"),
    [(torch.float32, False, True), (torch.float16, True, False), (torch.bfloat16, True, True)],
    ids=str,
)
def test_state_dict_round_trip_is_exact_and_training_goes_on(dtype, expert, through_fp32, tmp_path):
    param = parameter(torch.randn(4, 30).to(dtype), expert)
    optimizer = Adam16([param], lr=0.01)
    grads = [grad.to(dtype) for grad in gradients(param.shape, 6)]
    for param.grad in grads[:3]:
        optimizer.step()
    saved = {"optimizer": optimizer.state_dict(), "param": param.data}
    if through_fp32:
        saved["optimizer"] = fairseq_utils.move_to_cpu(saved["optimizer"])
        assert saved["optimizer"]["state"][0]["exp_avg"].dtype == torch.float32
    torch.save(saved, tmp_path / "x.pt")

    saved = torch.load(tmp_path / "x.pt", weights_only=True)
    other = parameter(saved["param"], expert)
    restored = Adam16([other], lr=0.5)
    restored.load_state_dict(saved["optimizer"])
    before = copy.deepcopy(saved["optimizer"]["state"][0])
    assert_same_state(restored.state[other], optimizer.state[param])
    for grad in grads[3:]:
        param.grad, other.grad = grad, grad.clone()
        optimizer.step()
        restored.step()
    assert torch.equal(param, other)
    # no memory is shared with the checkpoint
    assert_same_state(saved["optimizer"]["state"][0], before)


@pytest.mark.parametrize("expert", [False, True])
def test_conversion_from_and_to_fp32_adam(expert):
    theirs = torch.nn.Parameter(torch.randn(3, 50))
    adam32 = FairseqAdam32([theirs], lr=0.01, betas=BETAS)
    for grad in gradients(theirs.shape, 4):
        theirs.grad = grad.float()
        adam32.step()
    param = parameter(theirs.detach().clone(), expert)
    ours = Adam16([param], lr=0.01, betas=BETAS)
    ours.load_state_dict(adam32.state_dict())
    state = ours.state[param]
    assert state["step"] == 4 and state["exp_avg"].dtype == torch.float16
    assert state["exp_avg_scale"].shape == ((3,) if expert else ())
    back = dequantize_state(state)
    for name in ("exp_avg", "exp_avg_sq"):
        true = adam32.state[theirs][name]
        assert back[name].dtype == torch.float32
        largest = true.abs().amax(1, keepdim=True) if expert else true.abs().amax()
        allowed = store_error(true, largest, upwards=name == "exp_avg_sq")
        assert bool(((back[name] - true).abs() <= allowed).all())
    assert not any(key.endswith("_scale") for key in back)
    # fp16 -> fp32 -> fp16 loses nothing
    again = quantize_state(back, param)
    assert all(torch.equal(again[key], state[key]) for key in ("exp_avg", "exp_avg_scale"))


def test_state_of_apexs_optimizer_with_number_scales_is_kept_bit_for_bit():
    param = parameter(torch.randn(2, 6))
    apex = {"step": 7, "exp_avg": torch.randn(2, 6).half(), "exp_avg_sq": torch.rand(2, 6).half(),
            "exp_avg_scale": 0.003, "exp_avg_sq_scale": torch.tensor(1e-8 + 3e-7)}  # fmt: skip
    state = quantize_state(apex, param)
    assert torch.equal(state["exp_avg"], apex["exp_avg"]) and state["step"] == 7
    assert state["exp_avg_scale"].tolist() == pytest.approx([0.003, 0.003])
    param.grad = torch.randn(2, 6)
    optimizer = Adam16([param], lr=0.1)
    optimizer.state[param].update(state)
    optimizer.step()
    moved = dequantize_state(optimizer.state[param])["exp_avg"]
    expected = 0.9 * 0.003 * apex["exp_avg"].float() + 0.1 * param.grad
    assert rms_ratio(moved, expected) < 2.0**-11


def test_parameters_without_contiguous_memory_or_without_elements():
    start, grad = torch.randn(6, 4).t(), torch.randn(6, 4).t()
    param, _ = stepped(grad, start=start)
    same, _ = stepped(grad.contiguous(), start=start.contiguous())
    torch.testing.assert_close(param, same, check_stride=False)
    assert not param.is_contiguous() and same.is_contiguous()
    stepped(torch.zeros(0, 3))


def test_small_parameters_are_stepped_together_as_alone(monkeypatch):
    def results(smallest):
        torch.manual_seed(0)
        monkeypatch.setattr(adam16, "_SMALL", smallest)
        params = [torch.nn.Parameter(torch.randn(size)) for size in (3, 40, 7, 200)]
        params.append(torch.nn.Parameter(torch.randn(5).half()))
        optimizer = Adam16(params, lr=0.1)
        calls = spied(monkeypatch, ops, "adam16_steps_")
        for _ in range(2):
            for param in params:
                param.grad = torch.randn(param.shape).to(param.dtype)
            optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [*params, *map(torch.as_tensor, states)], len(calls)

    (many, calls), (each, others) = results(100), results(0)
    assert (calls, others) == (4, 0) and all(map(torch.equal, many, each))
