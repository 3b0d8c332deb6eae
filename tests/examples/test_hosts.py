"""The recipes of scripts/examples/hosts train on any number of ranks as one process of torch's own.

Two experts on four ranks have replicas. In one step of every run the gradient of the last rank's
expert overflows: all ranks must skip it.
"""

import functools
import importlib.util
import os
import shutil

import pytest
import torch
from helpers import distributed
from helpers.assertions import assert_same_state
from helpers.distributed import run_ranks
from helpers.examples import EXAMPLES, example
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.distributed import full_tensor, process_world
from fairseq_tutel.moe.model import moe_layers

pytestmark = pytest.mark.extras

# recipe -> the library that it needs, and options of its `train`
HOSTS = {
    "accelerate": ("accelerate", {}), "fabric": ("lightning_fabric", {}),
    "lightning": ("pytorch_lightning", {}), "fsdp2": ("torch", {}),
    "compile": ("torch", {"backend": "aot_eager"}), "transformers": ("transformers", {}),
    "deepspeed": ("deepspeed", {}),
}  # fmt: skip
EXPERTS, STEPS, OVERFLOW = 2, 5, 1


@pytest.fixture(scope="module", autouse=True)
def imported_once():
    """In the process that ranks are forked from, if it has not started yet."""
    names = {"transformers.trainer", "torch._inductor.compile_fx", *(n for n, _ in HOSTS.values())}
    distributed._PRELOAD += [n for n in names if importlib.util.find_spec(n.split(".")[0])]


def recipe(host):
    return example(f"with_{host}", EXAMPLES / "hosts")


def toy():
    return example("toy", EXAMPLES / "hosts")


def build_of(host):
    return toy().llama if host == "transformers" else toy().Model


def overflowing(build):
    """The model, in one of whose steps the gradient of the last rank's last expert is infinite."""
    model, calls = build(EXPERTS), []
    rank, world_size = process_world()

    def spoil(grad):
        calls.append(None)
        if (len(calls) - 1) // toy().ACCUMULATE % STEPS != OVERFLOW or rank < world_size - 1:
            return grad
        grad = grad.clone()
        grad[-1].view(-1)[0] = float("inf")
        return grad

    (layer,) = moe_layers(model).values()
    list(layer.experts.parameters())[-1].register_hook(spoil)
    return model


@functools.cache
def reference(llama):
    """The weights of one process after each half of the steps, by torch's own means."""
    model = overflowing(toy().llama if llama else toy().Model)
    decay = {"weight_decay": 0} if llama else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=toy().RATE, **decay)
    rows = torch.stack([sample["labels"] for sample in toy().samples(2 * STEPS)])
    rows = rows.unflatten(0, (2 * STEPS, toy().ACCUMULATE, -1))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    states, norms = [], []
    for step in range(2 * STEPS):
        for x in rows[step] if llama else toy().batches(step):
            with training.collect_aux(model) as aux:
                loss = model(x, labels=x).loss if llama else toy().task_loss(model(x), x)
            loss = (loss + toy().AUX_WEIGHT * aux.loss) / toy().ACCUMULATE
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), toy().MAX_NORM))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    skipped = [step for step in range(2 * STEPS) if not norms[step].isfinite()]
    assert skipped == [OVERFLOW, STEPS + OVERFLOW]
    assert min(norms) > toy().MAX_NORM  # clipping was active in every step
    for step in skipped:
        assert all(torch.equal(states[step][n], states[step - 1][n]) for n in states[step])
    return states[STEPS - 1], states[-1]


def environment(host):
    """What torchrun tells a host."""
    rank, world_size = process_world()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size), GROUP_RANK="0", MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0", CUDA_VISIBLE_DEVICES="",
        DS_ACCELERATOR="cpu",
    )  # fmt: skip
    if host == "deepspeed":  # whose collectives in shared memory are compiled for a minute
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if world_size > 1:
        os.environ["TORCHELASTIC_RUN_ID"] = "hosts"
    elif host != "deepspeed":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]


def states(model):
    """The full state, and this rank's dense weights."""
    dense = ((n, p) for n, p in model.named_parameters() if ".experts." not in n)
    return training.full_state_dict(model), {n: full_tensor(p.detach()) for n, p in dense}


def run(host, path, steps):
    """States after ``steps`` steps."""
    environment(host)
    data = toy().samples(2 * STEPS) if host == "transformers" else toy().batches
    scaler = training.grad_scaler("cpu", init_scale=8.0)
    build = functools.partial(overflowing, build_of(host))
    module = recipe(host)
    if host == "fabric":  # which would hand the model half inputs, whose autocast is for GPUs

        class MixedPrecision(module.MixedPrecision):
            convert_input = staticmethod(lambda data: data)

        module.MixedPrecision = MixedPrecision
    return states(module.train(build, data, steps, path, scaler, **HOSTS[host][1]))


def assert_like_one(results, want):
    state, dense = results[0]
    assert state.keys() == want.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, want[name], atol=1e-6, rtol=1e-6, msg=name)
    for _, other in results[1:]:
        assert all(torch.equal(value, other[name]) for name, value in dense.items())


@pytest.mark.parametrize("host", HOSTS)
def test_trains_saves_and_resumes_on_any_ranks_as_one_process(host, tmp_path):
    pytest.importorskip(HOSTS[host][0])
    llama = host == "transformers"
    file = "" if llama else "set.pt"
    two = run_ranks(run, 2, host, str(tmp_path / "2" / file), STEPS)
    assert_like_one(two, reference(llama)[0])
    if llama:  # what save_model wrote for from_pretrained
        saved = tmp_path / "2" / f"checkpoint-{STEPS}" / "model.safetensors"
        safetensors = pytest.importorskip("safetensors.torch")
        assert_same_state(safetensors.load_file(saved), two[0][0])
    for ranks in (1, 4):
        shutil.copytree(tmp_path / "2", tmp_path / str(ranks))
        results = run_ranks(run, ranks, host, str(tmp_path / str(ranks) / file), 2 * STEPS)
        assert_like_one(results, reference(llama)[1])
