"""A host that is defined here trains, saves and resumes with the public functions of hosts.

A step has the same micro-batches on any number of ranks, and in the reference: torch's own loop.
"""

import copy
import functools
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.assertions import assert_same_state, rms_ratio
from helpers.distributed import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import training
from fairseq_tutel.distributed import build_groups, is_sharded, process_world
from fairseq_tutel.moe import MoELayer

# of one process
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")

DIM, EXPERTS, MICRO_BATCHES, HALF, MAX_NORM = 8, 2, 4, 3, 0.05
KINDS = (EXPERTS, 0)  # experts of a model; 0: dense
HOWS = ("wrap", "shard_dense")


class Expert(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(DIM) * (1 + number))
        self.register_buffer("number", torch.tensor(float(number)))

    def forward(self, rows):
        return torch.tanh(rows @ self.weight.to(rows.dtype)) * (1 + self.number)


class Model(nn.Module):
    """Two layers, whose aux losses it does not hand on, and a parameter that is not trained."""

    def __init__(self, experts):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.inner = nn.Linear(DIM, DIM)
        if experts:
            options = {"capacity_factor": 0.0, "top_k": 1}
            own = [Expert(number) for number in build_groups(experts).local_experts]
            first = MoELayer(DIM, experts, 2 * DIM, seed=3, **options)
            second = MoELayer(DIM, experts, experts=own, **options)
        else:
            first, second = nn.Linear(DIM, DIM), nn.Sequential(nn.Tanh(), nn.Linear(DIM, DIM))
        self.layers = nn.ModuleList([first, second])

    def forward(self, x):
        x = x + self.layers[0](self.inner(x))
        return self.scale * (x + checkpoint(self.layers[1], x, use_reentrant=False))


def prepared(model):
    """A model in torch's DDP; a copy of its experts has lost marks and hooks."""
    training.prepare_data_parallel(model)
    if training.expert_parameters(model):
        model.layers[0].experts = copy.deepcopy(model.layers[0].experts)
    training.prepare_data_parallel(model)
    return nn.parallel.DistributedDataParallel(model)


def half(model):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return training.shard_dense(model, mp_policy=policy)


WRAP = {"alone": lambda model: model, "wrap": training.wrap_data_parallel, "prepare": prepared,
        "half": half, "shard_dense": training.shard_dense}  # fmt: skip


class ToyTrainer:
    """The loop, the optimizer, the schedule and the files of a host."""

    def __init__(self, experts, how):
        rank, world_size = process_world()
        how = how if world_size > 1 else "alone"
        self.model, self.experts = Model(experts), experts
        with torch.no_grad():
            self.model.inner.weight.add_(rank)  # rank 0's count
        self.net = WRAP[how](self.model)
        for name, param in self.model.named_parameters():
            sharded = how in ("half", "shard_dense") and ".experts." not in name
            assert is_sharded(param) == sharded and param.dtype == torch.float32, name
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, weight_decay=0.1)
        if how == "wrap":
            training.shard_optimizer(self.optimizer)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        run = training.DistributedState(self.net, self.optimizer)
        self.stateful = {"run": run, "schedule": self.schedule}

    @property
    def step(self):
        return self.schedule.last_epoch

    def update(self, batches):
        for number, x in enumerate(batches, 1):
            if hasattr(self.net, "set_requires_gradient_sync"):  # of fully_shard
                self.net.set_requires_gradient_sync(number == len(batches))
            with training.collect_aux(self.model) as aux:
                loss = (self.net(x) - x.roll(1, -1)).square().mean()
            found = [name for name, _ in aux.layers]
            assert found == (["layers.0", "layers.1"] if self.experts else [])
            ((loss + 0.1 * aux.loss) / len(batches)).backward()
        norm = training.clip_grad_norm_(self.net, MAX_NORM)
        assert norm > MAX_NORM
        self.optimizer.step()
        if not self.experts:
            assert aux.loss == 0 and not (aux.load or aux.metrics_dict() or aux.utilisation())
            training.update_load_bias(self.net, [aux])
        self.schedule.step()
        self.optimizer.zero_grad()
        return norm.item()

    def half(self):
        """Norms of half of the updates."""
        rank, world_size = process_world()
        share = slice(rank * MICRO_BATCHES // world_size, (rank + 1) * MICRO_BATCHES // world_size)
        return [self.update(micro_batches(self.step)[share]) for _ in range(HALF)]

    def save(self, path):
        extra = {"step": self.step, "schedule": self.schedule.state_dict()}
        training.save_checkpoint(path, self.net, self.optimizer, extra)
        dcp.save(self.stateful, checkpoint_id=f"{path}.dcp")

    def resume(self, path, files):
        with torch.no_grad():
            for param in self.model.parameters():
                param.zero_()  # everything comes from the checkpoint
        if files == "dcp":
            dcp.load(self.stateful, checkpoint_id=f"{path}.dcp")
            return
        extra = training.load_checkpoint(path, self.net, self.optimizer)
        self.schedule.load_state_dict(extra["schedule"])
        assert self.step == extra["step"]


def micro_batches(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(MICRO_BATCHES, 6, DIM, generator=generator)


def start(experts, how, path=None):
    """(whole model after half of the updates, norms); saved there."""
    trainer = ToyTrainer(experts, how)
    norms = trainer.half()
    if path:
        trainer.save(path)
    return training.full_state_dict(trainer.net), norms


def go_on(experts, how, path, files="set"):
    """Whole models as loaded and after the other half of the updates."""
    trainer = ToyTrainer(experts, how)
    trainer.resume(path, files)
    trained = [param for param in trainer.model.parameters() if param.requires_grad]
    assert (len(trainer.optimizer.state) < len(trained)) == (how == "wrap")  # a part of it
    loaded = training.full_state_dict(trainer.net)
    trainer.half()
    return loaded, training.full_state_dict(trainer.net)


def on_each(function, calls):
    return [function(*call) for call in calls]


@functools.cache
def reference(experts):
    """States of one process after each half, by torch's own clip and the layers' own aux; norms."""
    model = Model(experts)
    first, second = model.layers
    options = {"return_aux": True} if experts else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    states, norms = [], []
    for step in range(2 * HALF):
        for x in micro_batches(step):
            y, aux = first(model.inner(x), **options), 0.0
            y, aux = (y[0], y[1].loss) if experts else (y, aux)
            z = second(x + y, **options)
            z, aux = (z[0], aux + z[1].loss) if experts else (z, aux)
            loss = (x + y + z - x.roll(1, -1)).square().mean() + 0.1 * aux
            (loss / MICRO_BATCHES).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        states.append({key: value.clone() for key, value in model.state_dict().items()})
    return states[HALF - 1], states[-1], norms[:HALF]


def assert_same(state, want):
    torch.testing.assert_close(state, want, atol=2e-6, rtol=1e-5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What two ranks saved: (experts, what wrapped the model) -> (path, whole model)."""
    folder = tmp_path_factory.mktemp("toy")
    cases = {(experts, how): f"{folder}/{experts}/{how}.pt" for experts in KINDS for how in HOWS}
    ranks = run_ranks(on_each, 2, start, [(*case, path) for case, path in cases.items()])
    found = {}
    for number, ((experts, how), path) in enumerate(cases.items()):
        state, norms = ranks[0][number]
        assert ranks[1][number] == ({}, norms)
        assert_same(state, reference(experts)[0])
        assert norms == pytest.approx(reference(experts)[2], rel=1e-5)
        found[experts, how] = path, state
    assert_same_state(torch.load(found[0, "wrap"][0])["model"], found[0, "wrap"][1])  # a plain file
    names = [f"{how}{end}" for how in HOWS for end in (".pt", ".pt.dcp")]
    assert sorted(os.listdir(folder / "0")) == sorted(names)
    return found


RESUMED = {
    # ranks: (experts, saved by, wrapped by, files)
    1: [(e, how, "", files) for e in KINDS for how in HOWS for files in ("set", "dcp")],
    2: [(EXPERTS, "shard_dense", "prepare", "set"), (EXPERTS, "wrap", "shard_dense", "dcp")],
    4: [
        (EXPERTS, "wrap", "prepare", "set"),
        *((e, *hows, "set") for e in KINDS for hows in (HOWS, HOWS[::-1])),
        *((0, *hows, "dcp") for hows in (HOWS, HOWS[::-1])),
    ],
}


@pytest.mark.parametrize("ranks", RESUMED)
def test_resumes_on_any_number_of_ranks_as_one_process(saved, ranks):
    calls = [(e, how, saved[e, by][0], files) for e, by, how, files in RESUMED[ranks]]
    found = run_ranks(on_each, ranks, go_on, calls)[0]
    for (experts, by, *_), (loaded, state) in zip(RESUMED[ranks], found, strict=True):
        assert_same_state(loaded, saved[experts, by][1])
        assert_same(state, reference(experts)[1])


def test_half_precision_inside():
    state, _, norms = reference(EXPERTS)
    for own, (first, *rest) in run_ranks(start, 2, EXPERTS, "half"):
        assert 1e-5 < abs(first / norms[0] - 1) < 0.05
        assert rest == pytest.approx(norms[1:], rel=0.25)  # rounding grows from step to step
        assert all(rms_ratio(value, state[name]) < 0.15 for name, value in own.items())


def _wrong_blocks():
    model, x = Model(EXPERTS), torch.randn(5, DIM)
    with pytest.raises(ValueError, match="a Linear is not a module of the model"):
        training.shard_dense(model, [nn.Linear(2, 2)])
    model = training.shard_dense(Model(EXPERTS), [])  # all at once
    model(x).square().mean().backward()
    with pytest.raises(ValueError, match="the model is sharded already"):
        training.shard_dense(model)


def test_wrong_blocks_and_a_second_call_are_refused():
    run_ranks(_wrong_blocks, 2)
