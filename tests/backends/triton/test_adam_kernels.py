"""Adam's kernels against the torch twin (test_compile.py compiles them for every target)."""

import pytest
import torch
from helpers.gpu import no_waiting

from fairseq_tutel.backends.torch import adam as torch_adam
from fairseq_tutel.backends.triton import adam as kernels
from fairseq_tutel.distributed import mark_expert
from fairseq_tutel.training.adam16 import Adam16

OPTIONS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1}


def random_state(shape, scale_shape, dtype, grad_dtype, device):
    """[param, grad, exp_avg, exp_avg_sq, scales] with sizes spread over many powers of two."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.exp(4 * torch.randn(shape, generator=generator))
    grad = (spread * torch.randn(shape, generator=generator)).clamp(-6e4, 6e4)
    param = torch.randn(shape, generator=generator).to(dtype)
    avg = (100 * torch.randn(shape, generator=generator)).half()
    sq = (1000 * torch.rand(shape, generator=generator)).half()
    scales = [torch.full(scale_shape, value) for value in (2.0**-5, 2.0**-9)]
    return [x.to(device) for x in (param, grad.to(grad_dtype), avg, sq, *scales)]


def step_both(state, several=False):
    """[param, exp_avg, exp_avg_sq, scales] after a step of (kernel, twin) on copies."""
    results = []
    for module in (kernels, torch_adam):
        param, grad, avg, sq, *scales = given = [x.clone() for x in state]
        options = {
            "step": 3,
            "grad_multiplier": torch.tensor(0.125, device=param.device),
            **OPTIONS,
        }
        if several:  # updates the scales, too
            module.adam16_steps_([given], **options)
        else:
            scales = module.adam16_step_(*given, **options)
        results.append([param, avg, sq, *scales])
    return results


def check_step(new, ref, before):
    """Products fused with additions may round to the neighbouring fp16 value, rarely.

    The interpreter cuts bf16 off instead of rounding it, hence one unit and not half of one.
    """
    assert all(map(torch.equal, new[3:], ref[3:])) and new[3].shape == before[4].shape
    for a, b in zip(new[1:3], ref[1:3], strict=True):
        apart = (a.view(torch.int16).int() - b.view(torch.int16).int()).abs()
        assert apart.max() <= 1 and (apart != 0).float().mean() < 2e-3
    found, want, old = new[0].float(), ref[0].float(), before[0].float()
    unit = torch.finfo(new[0].dtype).eps if new[0].dtype != FP32 else 2.0**-21
    assert bool(((found - want).abs() <= unit * (want.abs() + (want - old).abs())).all())
    assert not torch.equal(new[1], before[2]) and not torch.equal(new[0], before[0])


FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [(FP32, FP32), (FP16, FP16), (BF16, BF16), (FP32, FP16)]
SHAPES = [
    ((3, 50, 41), ()),  # several blocks, the last one partly filled
    ((3, 50, 41), (3,)),  # a slice is no multiple of the block
    ((2, 2048), (2,)),  # a slice is one block
    ((1,), ()),
    ((), ()),
]


@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
@pytest.mark.parametrize(("shape", "scale_shape"), SHAPES)
def test_kernel_equals_twin(shape, scale_shape, dtype, grad_dtype, device):
    """Also that of small parameters, which makes the whole step."""
    state = random_state(shape, scale_shape, dtype, grad_dtype, device)
    for several in (False, True):
        check_step(*step_both(state, several), state)


def test_small_parameters_in_one_launch_equal_their_own(device):
    states = [random_state(*each, BF16, BF16, device) for each in SHAPES[1:]]
    together = [[x.clone() for x in state] for state in states]
    options = {"step": 3, "grad_multiplier": torch.tensor(0.125, device=device), **OPTIONS}
    kernels.adam16_steps_(together, **options)
    for state, found in zip(states, together, strict=True):
        kernels.adam16_steps_([state], **options)
        assert all(map(torch.equal, state, found))


def test_parts_with_the_maxima_of_the_whole_are_the_whole(device):
    """Bit for bit, and the maxima are the twin's but for their rounding."""
    shape = (2, 30, 100)
    state = random_state(shape, (2,), FP32, FP32, device)
    state[1][0, 29, 99] = 1e6  # what decides a scale is in one part only
    whole, _ = step_both(state)
    cuts = ((0, 12), (12, 30))
    parts = [[x[:, a:b].contiguous() if x.dim() == 3 else x for x in state] for a, b in cuts]
    multiplier = torch.tensor(0.125, device=device)
    betas = {key: OPTIONS[key] for key in ("beta1", "beta2")}
    maxima = [
        [module.adam16_maxima(*part, grad_multiplier=multiplier, **betas) for part in parts]
        for module in (kernels, torch_adam)
    ]
    torch.testing.assert_close(*maxima, rtol=1e-6, atol=0)
    assert not torch.equal(*maxima[0])
    common = torch.maximum(*maxima[0])
    for part in parts:
        part[4:] = kernels.adam16_step_(
            *part, step=3, grad_multiplier=multiplier, maxima=common, **OPTIONS
        )
    for number, index in enumerate((0, 2, 3, 4, 5)):
        ours = [part[index] for part in parts]
        joined = torch.cat(ours, 1) if ours[0].dim() == 3 else ours[0]
        assert torch.equal(joined, whole[number]), number
        assert ours[0].dim() == 3 or torch.equal(*ours)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_an_update_does_not_wait_for_the_gpu(dtype):
    params = [torch.nn.Parameter(torch.randn(n, 2048, device="cuda", dtype=dtype)) for n in (1, 4)]
    mark_expert(params[1])
    optimizer = Adam16(params, lr=0.01)

    def update():
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step(scale=128.0)
        optimizer.step(scale=torch.full((), 128.0, device="cuda"))

    update()  # compiles the kernels
    with no_waiting():
        update()


def test_nonfinite_zero_and_subnormal_values_as_in_twin(device):
    param, grad, avg, sq, *scales = random_state((4, 3000), (4,), FP32, FP32, device)
    grad[0, 5], grad[0, 2999], grad[1, 7] = float("inf"), float("nan"), 1e30
    grad[2], avg[2], sq[2] = 0, 0, 0
    grad[3] *= 1e-18
    avg[3], sq[3] = 0, 0
    new, ref = step_both([param, grad, avg, sq, *scales])
    assert new[3].tolist() == ref[3].tolist() and new[4].tolist() == ref[4].tolist()
    assert new[3][2] == 1 and new[4][2] == 1 and bool(torch.isfinite(torch.stack(new[3:])).all())
    torch.testing.assert_close(new[0], ref[0], rtol=1e-6, atol=1e-8, equal_nan=True)
    torch.testing.assert_close(new[1:3], ref[1:3], rtol=2.0**-10, atol=2.0**-24, equal_nan=True)
    assert new[0].isnan().sum() == 2
    assert not bool((new[2][3] == 0)[grad[3].abs() > 1e-20].any())


def test_empty_parameter(device):
    new, ref = step_both(random_state((0, 4), (), FP32, FP32, device))
    assert new[3].tolist() == ref[3].tolist() == 1


BAD_STATES = [
    (1, torch.zeros(3), r"grad must have shape \(4, 6\), got \(3,\)"),
    (2, torch.zeros(4, 6), "exp_avg must be one of torch.float16"),
    (0, torch.zeros(4, 6, dtype=torch.float64), "param must be one of.*float64"),
    (0, torch.zeros(6, 4).t(), "contiguous"),
    (4, torch.ones(6), r"exp_avg_scale must have shape \(4,\), got \(6,\)"),
]


@pytest.mark.parametrize(("index", "replacement", "message"), BAD_STATES)
def test_launcher_refuses(index, replacement, message, device):
    state = random_state((4, 6), (4,), FP32, FP32, device)
    state[index] = replacement.to(device)
    one = torch.tensor(1.0, device=device)
    with pytest.raises(ValueError, match=message):
        kernels.adam16_step_(*state, step=1, grad_multiplier=one, **OPTIONS)
