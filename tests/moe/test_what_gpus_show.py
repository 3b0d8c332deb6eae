"""What only a GPU can show of a whole layer; what needs none of it runs on a CPU too."""

import importlib

import pytest
import torch
import torch.distributed as dist
from helpers.assertions import assert_tensors_close, rms_ratio
from helpers.distributed import run_ranks
from helpers.inputs import poison_fresh_memory
from helpers.layers import run

from fairseq_tutel.distributed import build_groups
from fairseq_tutel.distributed.exchanges.algorithm import Direction
from fairseq_tutel.moe import MoELayer

M, E = 64, 8
DROPLESS = {"top_k": 2, "capacity_factor": 0.0}
ANY_DEVICE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WAYS = [  # interpreted kernels take long
    ("cpu", "torch", "ffn", M),
    ("cpu", "torch", "swiglu", M),
    pytest.param("cpu", "triton", "ffn", 4, marks=pytest.mark.interpreted),
    *(pytest.param("cuda", "triton", each, M, marks=pytest.mark.gpu) for each in ("ffn", "swiglu")),
]


def make(device, experts=E, width=M, **options):
    layer = MoELayer(width, experts, 2 * width, seed=1, **DROPLESS, **options)
    return layer.to(device)


@pytest.mark.parametrize("device", ANY_DEVICE)
def test_twenty_steps_twice_are_the_same_bits(device, monkeypatch):
    monkeypatch.setenv("FAIRSEQ_TUTEL_AUTOTUNE", "0")

    def trained():
        torch.manual_seed(3)
        layer = make(device, dropout=0.1, activation_dropout=0.1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(20):
            y = layer(torch.randn(48, M, device=device))
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach().clone() for param in layer.parameters()]

    assert all(map(torch.equal, trained(), trained()))


@pytest.mark.parametrize(("device", "way", "network", "width"), WAYS)
@pytest.mark.parametrize("rows", ["gathered", "written"])
def test_no_result_depends_on_what_lay_in_memory(
    device, way, network, width, rows, backend, monkeypatch
):
    """Fresh memory is NaN: all outputs and gradients are as before. Padding leaves unused rows."""
    backend(way)
    if rows == "written":
        operator = importlib.import_module("fairseq_tutel.ops.expert_ffn")
        monkeypatch.setattr(operator, "gathers_tokens", lambda *given: False)
    layer = make(device, width=width, expert_network=network)
    x = torch.randn(20 if width == M else 6, width, device=device)
    pad_mask = torch.arange(len(x), device=device) % 5 == 0
    want = run(layer, x, x, pad_mask=pad_mask)
    poison_fresh_memory(monkeypatch)
    got = run(layer, x, x, pad_mask=pad_mask)
    monkeypatch.undo()
    assert all(value.isfinite().all() for value in got.values())
    assert_tensors_close(got, want, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [0.0, 1.0], ids=["dropless", "padded"])
def test_compiled_by_inductor(factor):
    layer = MoELayer(M, E, 2 * M, seed=1, top_k=2, capacity_factor=factor).cuda()
    x = torch.randn(48, M, device="cuda")
    want = run(layer, x, x)
    layer.compile()
    assert_tensors_close(run(layer, x, x), want, 1e-5)
    torch._dynamo.reset()


@pytest.mark.gpu
def test_nccl_in_a_world_of_one():
    """The collective itself, which a layer on one rank leaves out."""
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        layer = make("cuda")
        rows = torch.randn(64, M, device="cuda")
        arrived = torch.empty_like(rows)
        for direction in Direction:
            layer.exchange.algorithm.move(rows, arrived.zero_(), direction, None)
            assert torch.equal(arrived, rows)
        assert layer(rows).isfinite().all()
    finally:
        dist.destroy_process_group()


@pytest.mark.multi_gpu
@pytest.mark.gpu
def test_the_second_gpu_while_the_first_is_current():
    """Kernels are launched on the GPU of their tensors."""
    torch.cuda.set_device(0)
    x = torch.randn(48, M)
    for options in ({}, {"expert_network": "swiglu"}):
        want, got = (
            run(make(gpu, **options), x.to(gpu), x.to(gpu)) for gpu in ("cuda:0", "cuda:1")
        )
        assert torch.cuda.current_device() == 0
        assert all(value.device.index == 1 for value in got.values())
        assert_tensors_close(got, want, 1e-5)


def _on_two_gpus(factor):
    """Two ranks, each with half of the experts and of the tokens, against one with all."""
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    dist.destroy_process_group()
    dist.init_process_group("nccl", init_method="env://", rank=rank, world_size=2)
    whole = MoELayer(M, E, 2 * M, seed=1, top_k=2, capacity_factor=factor,
                     groups=build_groups(E, expert_parallel_size=1)).cuda()  # fmt: skip
    mine = MoELayer(M, E, 2 * M, seed=1, top_k=2, capacity_factor=factor).cuda()
    mine.gate.load_state_dict(whole.gate.state_dict())
    x = torch.randn(2, 48, M, generator=torch.Generator().manual_seed(2))[rank].cuda()
    got, want = run(mine, x, x), run(whole, x, x)
    for name in ("y", "x"):
        assert rms_ratio(got[name], want[name]) <= 1e-4, name


@pytest.mark.multi_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("factor", [0.0, 1.0], ids=["dropless", "padded"])
def test_two_gpus_over_nccl(factor, port, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    run_ranks(_on_two_gpus, 2, factor, timeout=120)


@pytest.mark.parametrize("device", ANY_DEVICE)
@pytest.mark.parametrize("network", ["ffn", "swiglu"])
def test_most_tokens_to_one_of_64_experts(device, network):
    """Against fp64: one expert has thousands of rows, many have none."""
    layer = make(device, experts=64, expert_network=network)
    x = torch.randn(2048 if device == "cuda" else 96, M, device=device)
    with torch.no_grad():
        x[: len(x) * 3 // 4] = x[0] + 0.01 * x[: len(x) * 3 // 4]
    exact = make("cpu", experts=64, expert_network=network).double()
    exact.load_state_dict(layer.state_dict())
    _, aux = layer(x, return_aux=True)
    assert aux.load_E.max() > len(x) // 2 and (aux.load_E == 0).any()
    assert_tensors_close(run(layer, x, x), run(exact, x.cpu().double(), x.cpu()), 1e-3)
