"""Arguments of the launchers: any strides give the same, what is wrong is refused by name."""

import pytest
import torch
from helpers.inputs import random_rows

from fairseq_tutel.backends import triton as kernels
from fairseq_tutel.backends.triton import _grouped

LAYOUT = {"capacity": 6, "padded": True, "normalize": True}


def launches(device):
    """Launcher -> its arguments, by position and by name."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device)

    row, pair = (x.to(device) for x in random_rows(9, 2, 3, 7, "spread"))
    expert = torch.randint(0, 3, (9, 2), generator=generator, dtype=torch.int32).to(device)
    position, num_routed = kernels.assign_slots(expert, 3)
    biases = draw(3, 24), expert.clamp(min=0)
    weight, offsets = draw(9, 2).abs(), torch.tensor([3, 9], dtype=torch.int32, device=device)
    act = {"activation": "gelu", "offsets": offsets, "dropout_p": 0.0}
    return {
        kernels.dispatch_fwd: ((draw(9, 24), row, pair), {}),
        kernels.dispatch_bwd: ((draw(21, 24), row), {}),
        kernels.combine_fwd: ((draw(21, 24), row, weight, *biases), {}),
        kernels.combine_bwd: ((draw(9, 24), draw(21, 24), row, pair, weight, *biases), {}),
        kernels.topk_gating_fwd: ((draw(9, 3), 2), {"noise_TE": draw(9, 3)}),
        kernels.assign_slots: ((expert, 3), {"priority_T": draw(9)}),
        kernels.assign_rows_fwd: ((expert, position, weight, num_routed), LAYOUT),
        kernels.assign_rows_bwd: ((draw(9, 2), weight, row), {"normalize": True}),
        kernels.bias_act_fwd: ((draw(9, 7), draw(2, 7)), act),
        kernels.bias_act_bwd: ((draw(9, 8), draw(9, 8), draw(2, 8)), act),
        kernels.encode_rows: ((draw(9, 8), "e5m2"), {}),
        _grouped.rows_product: ((draw(9, 8), draw(2, 8, 5), offsets), {}),
        _grouped.weight_gradient: ((draw(9, 8), draw(9, 5), offsets), {}),
    }


def strided(value):
    """The same numbers with others between them."""
    if not torch.is_tensor(value):
        return value
    return value.repeat_interleave(2, -1)[..., ::2]


def test_any_strides(device):
    for launcher, (args, options) in launches(device).items():
        want = launcher(*args, **options)
        given = {name: strided(value) for name, value in options.items()}
        got = launcher(*map(strided, args), **given)
        if torch.is_tensor(want):
            got, want = (got,), (want,)
        assert all(map(torch.equal, got, want)), launcher
    # the gradient of a sum is an expanded scalar
    dy, *rest = launches(device)[kernels.combine_bwd][0]
    one = torch.ones((), device=device).expand(dy.shape)
    want = kernels.combine_bwd(one.contiguous(), *rest)
    assert all(map(torch.equal, kernels.combine_bwd(one, *rest), want))


REFUSED = [
    (kernels.dispatch_fwd, 0, torch.Tensor.double, "tokens must be one of.*got torch.float64"),
    (kernels.dispatch_fwd, 0, lambda x: x[:, :0], "at least 1, got 0 and 2"),
    (kernels.combine_bwd, 1, lambda x: x[:7], r"rows must have shape \(21, 24\), got \(7, 24\)"),
    (kernels.topk_gating_fwd, 0, torch.Tensor.half, "logits must be one of torch.float32, got"),
    (kernels.topk_gating_fwd, "noise_TE", lambda x: x[:, :2], r"noise must have shape \(9, 3\)"),
    (kernels.assign_slots, 0, torch.Tensor.long, "expert must be one of torch.int32"),
    (kernels.assign_rows_fwd, 2, torch.Tensor.double, "gate must be one of.*got torch.float64"),
    (kernels.assign_rows_fwd, 3, lambda x: x[:1], r"num_routed must have shape \(2, 3\), got"),
    (kernels.bias_act_fwd, 0, torch.Tensor.double, "h must be one of.*got torch.float64"),
    (kernels.bias_act_fwd, 1, lambda x: x[:1], r"bias must have shape \(2, 7\), got \(1, 7\)"),
    (kernels.bias_act_fwd, "dropout_p", lambda p: 0.5, "dropout needs a seed"),
    (kernels.bias_act_fwd, "activation", lambda x: "swiglu", "a gate and a value for each unit"),
    (kernels.bias_act_bwd, 0, lambda x: x[:, :3], r"h must have shape \(9, 3\), got \(9, 8\)"),
    (kernels.bias_act_bwd, 1, lambda x: None, "gelu needs h"),
    (_grouped.rows_product, 1, lambda x: x[:, :7], r"weight must have shape \(2, 8, 5\)"),
    (_grouped.rows_product, 1, torch.Tensor.half, "weight must be one of torch.float32"),
    (_grouped.weight_gradient, 2, torch.Tensor.long, "offsets must be one of torch.int32"),
]


@pytest.mark.parametrize(("launcher", "place", "change", "message"), REFUSED)
def test_wrong_arguments_are_named(launcher, place, change, message, device):
    args, options = launches(device)[launcher]
    given = options = dict(options)
    if isinstance(place, int):
        given = args = list(args)
    given[place] = change(given[place])
    with pytest.raises(ValueError, match=message):
        launcher(*args, **options)
