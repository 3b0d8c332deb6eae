"""A host that is defined here: it trains, saves and resumes with the public functions of hosts.

A step has the same four micro-batches on any ranks: the reference is one process of torch's own.
"""

import copy
import functools

import pytest
import torch
from helpers.distributed import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import training
from fairseq_tutel.checkpoint import inspect, merge
from fairseq_tutel.distributed import build_groups, process_world
from fairseq_tutel.moe import MoELayer

DIM, EXPERTS, MICRO_BATCHES, HALF, MAX_NORM = 8, 2, 4, 3, 0.05


class Expert(nn.Module):
    """An expert of one's own, with a buffer."""

    def __init__(self, number):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(DIM) * (1 + number))
        self.register_buffer("number", torch.tensor(float(number)))

    def forward(self, rows):
        return torch.tanh(rows @ self.weight) * (1 + self.number)


class Model(nn.Module):
    """Two MoE layers, whose aux losses it does not hand on, and a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        options = {"capacity_factor": 0.0, "top_k": 1}
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.inner = nn.Linear(DIM, DIM)
        self.first = MoELayer(DIM, EXPERTS, 2 * DIM, seed=3, **options)
        own = [Expert(number) for number in build_groups(EXPERTS).local_experts]
        self.second = MoELayer(DIM, EXPERTS, experts=own, **options)

    def forward(self, x):
        x = x + self.first(self.inner(x))
        return self.scale * (x + checkpoint(self.second, x, use_reentrant=False))


class ToyTrainer:
    """The loop, the optimizer, the schedule and the files of a host."""

    def __init__(self, model, how):
        self.model = self.net = model
        if how == "wrap":
            self.net = training.wrap_data_parallel(model)
        elif how == "prepare":
            training.prepare_data_parallel(model)
            model.first.experts = copy.deepcopy(model.first.experts)  # has lost marks and hooks
            training.prepare_data_parallel(model)
            self.net = nn.parallel.DistributedDataParallel(model)
        elif how == "fsdp":
            from torch.distributed.fsdp import fully_shard  # torch 2.6

            training.prepare_data_parallel(model)
            mesh = init_device_mesh("cpu", (process_world()[1],))
            fully_shard(model, mesh=mesh, ignored_params=set(training.expert_parameters(model)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.step = 0

    def update(self, batches):
        for x in batches:
            with training.collect_aux(self.model) as aux:
                loss = (self.net(x) - x.roll(1, -1)).square().mean()
            assert [name for name, _ in aux.layers] == ["first", "second"]
            ((loss + 0.1 * aux.loss) / len(batches)).backward()
        norm = training.clip_grad_norm_(self.net, MAX_NORM)
        assert norm > MAX_NORM
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1

    def save(self, path):
        extra = {"step": self.step, "schedule": self.schedule.state_dict()}
        training.save_checkpoint(path, self.net, self.optimizer, extra)

    def resume(self, path):
        extra = training.load_checkpoint(path, self.net, self.optimizer)
        self.step = extra["step"]
        self.schedule.load_state_dict(extra["schedule"])


def micro_batches(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(MICRO_BATCHES, 6, DIM, generator=generator)


def run(how, path, stop, resume=False):
    """The whole model after updates up to ``stop``; saved there, or resumed before."""
    rank, world_size = process_world()
    trainer = ToyTrainer(Model(), how if world_size > 1 else "alone")
    if resume:
        with torch.no_grad():
            for param in trainer.model.parameters():
                param.zero_()  # everything comes from the checkpoint
        trainer.resume(path)
    share = MICRO_BATCHES // world_size
    while trainer.step < stop:
        trainer.update(micro_batches(trainer.step)[rank * share : (rank + 1) * share])
    if not resume:
        trainer.save(path)
    return training.full_state_dict(trainer.net)


@functools.cache
def reference():
    """The states of one process after each half, by torch's own clip and the layers' own aux."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    states = []
    for step in range(2 * HALF):
        for x in micro_batches(step):
            y, aux = model.first(model.inner(x), return_aux=True)
            z, more_aux = model.second(x + y, return_aux=True)
            loss = (x + y + z - x.roll(1, -1)).square().mean() + 0.1 * (aux.loss + more_aux.loss)
            (loss / MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        states.append({key: value.clone() for key, value in model.state_dict().items()})
    return states[HALF - 1], states[-1]


def assert_same(state, want):
    assert sorted(state) == sorted(want)
    for name, value in state.items():
        torch.testing.assert_close(value, want[name], atol=2e-6, rtol=1e-5, msg=name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of two ranks by what wrapped the model."""
    folder = tmp_path_factory.mktemp("toy")
    paths = {how: str(folder / how / "checkpoint_last.pt") for how in ("wrap", "fsdp")}
    for how, path in paths.items():
        states = run_ranks(run, 2, how, path, HALF)
        assert_same(states[0], reference()[0])
        assert states[1] == {}
    return paths


@pytest.mark.parametrize(
    ("saved_by", "ranks", "how"),
    [
        ("wrap", 1, ""),
        ("wrap", 4, "prepare"),
        ("wrap", 4, "fsdp"),
        ("fsdp", 1, ""),
        ("fsdp", 2, "prepare"),
        ("fsdp", 4, "wrap"),
    ],
)
def test_resumes_on_any_number_of_ranks_as_one_process(saved, saved_by, ranks, how):
    states = run_ranks(run, ranks, how, saved[saved_by], 2 * HALF, True)
    assert_same(states[0], reference()[1])


def test_a_host_without_ranks_saves_the_same_files(saved, tmp_path):
    """One process writes one rank file; its set resumes on two ranks."""
    path = str(tmp_path / "alone.pt")
    assert_same(run("", path, HALF), reference()[0])
    assert {p.name for p in tmp_path.iterdir()} == {"alone-shared.pt", "alone-rank-0.pt"}
    found = inspect(path, verify=True)
    assert found["consistent"], found["problems"]
    assert (found["num_experts"], found["optimizer_state"]) == (EXPERTS, "by name")
    merged, model = str(tmp_path / "merged" / "alone.pt"), Model()
    merge(path, merged)
    assert training.load_checkpoint(merged, model)["step"] == HALF
    assert_same(model.state_dict(), reference()[0])
    states = run_ranks(run, 2, "wrap", path, 2 * HALF, True)
    assert_same(states[0], reference()[1])


def _load_full(state):
    model = Model()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    training.load_full_state_dict(model, state)
    return training.full_state_dict(model)


def test_a_full_state_is_spread_over_ranks():
    state = reference()[1]
    assert_same(run_ranks(_load_full, 2, state)[0], state)
    for change, message in (
        (lambda s: s.pop("first.experts.1.fc1.bias"), "lacks first.experts.1.fc1.bias"),
        (lambda s: s.update({"second.experts.2.weight": 0}), "second.experts.2.weight, which"),
        (lambda s: s.update({"inner.bias": torch.ones(1)}), "does not fit .*inner.bias"),
    ):
        changed = dict(state)
        change(changed)
        with pytest.raises(ValueError, match="(?s)" + message):
            training.load_full_state_dict(Model(), changed)


def test_refusals(tmp_path):
    path, model = str(tmp_path / "x.pt"), Model()
    with pytest.raises(FileNotFoundError, match="x.pt: no such checkpoint"):
        training.load_checkpoint(path, model)
    training.save_checkpoint(path, model)
    with pytest.raises(ValueError, match="x.pt holds no optimizer state"):
        training.load_checkpoint(path, model, torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(ValueError, match=r"shape \(2, 2\) .* none of the modules that are saved"):
        alien = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1)
        training.save_checkpoint(path, model, alien)
    with pytest.raises(ValueError, match="has 2 experts .* has 8: build .* num_experts=2"):
        training.load_checkpoint(path, nn.Sequential(MoELayer(DIM, 8)))
    with pytest.raises(ValueError, match="does not fit this model"):
        training.load_checkpoint(path, nn.Sequential(MoELayer(DIM, 2)))
    with pytest.raises(ValueError, match="one num_experts, but 0 has 4 and 1 has 8"):
        training.save_checkpoint(path, nn.Sequential(MoELayer(DIM, 4), MoELayer(DIM, 8)))
    dense = nn.ModuleDict({"moe": MoELayer(DIM, 4), "experts": nn.ModuleList([nn.Linear(2, 2)])})
    with pytest.raises(ValueError, match="experts.0.weight: .*give the module another name"):
        training.save_checkpoint(path, dense)
    with (
        pytest.raises(RuntimeError, match="no MoELayer was called"),
        training.collect_aux(model) as aux,
    ):
        _ = aux.loss


def test_collecting_changes_nothing_for_the_caller():
    layer, x = MoELayer(DIM, EXPERTS), torch.randn(5, DIM)
    layer.eval()
    y, aux = layer(x, return_aux=True)
    with training.collect_aux(layer) as found:
        again, own = layer(x, return_aux=True)
        assert torch.equal(layer(x), y) and torch.equal(again, y)
    assert [name for name, _ in found.layers] == ["", ""] and found.layers[0][1] is own
    assert torch.equal(found.loss, 2 * aux.loss)
    assert not layer._forward_hooks and not layer._forward_pre_hooks
