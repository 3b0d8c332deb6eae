"""The recipes of scripts/examples/hosts train on any number of ranks as one process of torch's own.

Two experts on four ranks have replicas. In one step of every run the gradient of the last rank's
expert overflows: all ranks must skip it.
"""

import functools
import importlib.util
import os
import re
import shutil
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
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
    "accelerate": ("accelerate", {}),
    "fabric": ("lightning_fabric", {}),
    "lightning": ("pytorch_lightning", {}),
    "fsdp2": ("torch", {}),
    "compile": ("torch", {"backend": "aot_eager"}),
    "transformers": ("transformers", {}),
    "deepspeed": ("deepspeed", {}),
}
EXPERTS, STEPS, OVERFLOW = 2, 5, 1


@pytest.fixture(scope="module", autouse=True)
def imported_once():
    """In the process that ranks are forked from, if it has not started yet."""
    names = [
        "transformers.trainer",
        "torch._inductor.compile_fx",
        *(name for name, _ in HOSTS.values()),
    ]
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
        MASTER_PORT="0", ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES="",
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


def run_half(path):
    """FSDP2 whose products are in bf16: the full state, dense weights; without an overflow."""
    environment("fsdp2")
    build = functools.partial(toy().Model, EXPERTS)
    train = recipe("fsdp2").train
    full, dense = states(train(build, toy().batches, STEPS, path, dtype=torch.bfloat16))
    assert {value.dtype for value in dense.values()} == {torch.float32}
    return full, dense


def test_fsdp2_in_bf16_stays_near_fp32(tmp_path):
    (half, dense), (_, other) = run_ranks(run_half, 2, str(tmp_path / "half.pt"))
    (full, _), *_ = run_ranks(run_half, 1, str(tmp_path / "full.pt"))
    start = toy().Model(EXPERTS).state_dict()
    assert all(torch.equal(value, other[name]) for name, value in dense.items())
    moved = torch.cat([(full[name] - start[name]).flatten() for name in full])
    error = torch.cat([(half[name] - full[name]).flatten() for name in full])
    assert 0 < error.norm() < 0.2 * moved.norm(), error.norm() / moved.norm()


# what a recipe would do without the package's function, by the recipe's own variables
OWN_CLIP = {
    "accelerate": lambda v, norm: v["accelerator"].clip_grad_norm_(v["net"].parameters(), norm),
    "fabric": lambda v, norm: v["fabric"].clip_gradients(v["net"], v["wrapped"], max_norm=norm),
    "lightning": lambda v, norm: v["self"].clip_gradients(v["optimizer"], norm),
    "fsdp2": lambda v, norm: nn.utils.clip_grad_norm_(v["model"].parameters(), norm),
    "compile": lambda v, norm: nn.utils.clip_grad_norm_(v["model"].parameters(), norm),
    "transformers": lambda v, norm: type(v["self"]).__base__._clip_grad_norm(v["self"], v["model"]),
}
OWN_SAVE = {
    "accelerate": lambda v, path: v["accelerator"].save_state(path),
    "fabric": lambda v, path: [
        v["fabric"].save(path, {"model": v["net"]}),
        process_world()[0] > 0 and v["fabric"].load(path, {"model": v["net"]}),
    ],
    "lightning": lambda v, path: v["self"].trainer.save_checkpoint(path),
    "fsdp2": lambda v, path: dcp.save(v["model"].state_dict(), checkpoint_id=path),
    "compile": lambda v, path: dcp.save(v["model"].state_dict(), checkpoint_id=path),
    "transformers": lambda v, path: type(v["self"]).__base__.save_model(v["self"], path),
    "deepspeed": lambda v, path: [
        v["engine"].save_checkpoint(path),
        process_world()[0] > 0 and v["engine"].load_checkpoint(path),
    ],
}


class Saved(Exception):
    """This rank was told nothing; it must not wait for one that was."""


def errors(host, path):
    """What this rank is told of the host's own clipping, and of its own saving."""
    environment(host)
    build = functools.partial(build_of(host), EXPERTS)
    data = toy().samples(2 * STEPS) if host == "transformers" else toy().batches

    def clip(_, norm):
        return OWN_CLIP[host](sys._getframe(1).f_locals, norm)

    def save(*_):
        if host in ("accelerate", "transformers") and process_world()[0] > 0:
            raise Saved  # there rank 0 saves for all
        OWN_SAVE[host](sys._getframe(1).f_locals, f"{path}-own")
        raise Saved

    found = []
    for function, own in (("clip_grad_norm_", clip), ("save_checkpoint", save)):
        if host == "deepspeed" and own is clip:
            found.append("")  # its own clipping it is, by a norm that the recipe gives it
            continue
        right = getattr(training, function)
        setattr(training, function, own)
        try:
            recipe(host).train(build, data, STEPS, path, **HOSTS[host][1])
        except (Exception, dcp.CheckpointException) as error:
            found.append(str(error))
        finally:
            setattr(training, function, right)
        torch.distributed.barrier()
    return found


@pytest.mark.parametrize("host", HOSTS)
def test_the_own_clipping_and_saving_of_a_host_are_refused(host, tmp_path):
    pytest.importorskip(HOSTS[host][0])
    ranks = run_ranks(errors, 2, host, str(tmp_path / "x.pt"))
    for clip, _ in ranks:
        assert host == "deepspeed" or re.search(
            "norms .*use .*training.clip_grad_norm_|mixed torch.Tensor and DTen", clip
        )
    saves = [save for _, save in ranks if save]
    assert saves and all("save_checkpoint" in save for save in saves)
    assert host in ("fsdp2", "compile") or "\n" not in "".join([ranks[0][0], *saves])


def keep_state(path):
    """Accelerate's own files of one process with all experts."""
    from accelerate import Accelerator

    environment("accelerate")
    accelerator = Accelerator()
    model = toy().Model(EXPERTS)
    net, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    net(*toy().batches(0)[:1]).sum().backward()
    optimizer.step()
    want = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.save_state(path)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    accelerator.load_state(path)
    assert_same_state(model.state_dict(), want)


def test_accelerate_keeps_the_state_of_one_process(tmp_path):
    pytest.importorskip("accelerate")
    run_ranks(keep_state, 1, str(tmp_path / "state"))


@pytest.mark.parametrize("host", HOSTS)
def test_a_recipe_is_short(host):
    assert len((EXAMPLES / "hosts" / f"with_{host}.py").read_text().splitlines()) <= 60
