"""fairseq's optimizers over experts and slices of them; ``--fp16-adam-stats`` without apex."""

import copy

import pytest
import torch
from fairseq import optim
from fairseq.optim.adam import Adam, FairseqAdam
from fairseq.optim.fused_adam import FusedAdamV1
from helpers.dispatched import spied
from helpers.training import make_config
from omegaconf import OmegaConf

from fairseq_tutel.distributed import ExpertParallelGroups, copies_of, is_expert
from fairseq_tutel.integrations.fairseq import optim as ours
from fairseq_tutel.integrations.fairseq.trainer.parallel import fit_to_slices
from fairseq_tutel.moe import Experts
from fairseq_tutel.training.adam16 import Adam16

GROUPS = ExpertParallelGroups(
    2, rank=2, world_size=4, ep_size=2, num_replicas=2, placement="sliced"
)


def build(*options, dtype=torch.float32):
    """The optimizer that the trainer builds of the options, over a dense layer and an expert."""
    cfg = make_config(*options)
    experts = Experts([0], 4, 8, seed=1, hidden_slice=(1, 2), num_holders=2)
    params = [torch.nn.Parameter(torch.ones(3)), *experts.parameters()]
    params = [param for param in torch.nn.ParameterList(params).to(dtype)]
    name = cfg.optimizer._name
    if "--memory-efficient-fp16" in options:
        return name, optim.MemoryEfficientFP16Optimizer.build_optimizer(cfg, params)
    if "--fp16" in options:
        return name, optim.FP16Optimizer.build_optimizer(cfg, params)
    return name, optim.build_optimizer(cfg.optimizer, params)


@pytest.mark.parametrize(
    "options", [(), ("--fp16", "--fp16-no-flatten-grads"), ("--memory-efficient-fp16", "--fp16")]
)
def test_what_is_stepped_is_known_as_slices(options):
    """fairseq's fp32 copies lose the number of copies that there are of a parameter."""
    half = torch.float16 if options else torch.float32
    name, optimizer = build("--fp16-adam-stats", *options, dtype=half)
    fit_to_slices(optimizer, name, GROUPS)
    params = optimizer.params
    experts = [param for param in params if is_expert(param)]
    assert [copies_of(param, GROUPS) for param in experts] == [1, 1, 1, 2]  # fc2's bias is whole
    assert optimizer.optimizer._parts == {id(param) for param in experts[:3]}


def test_optimizers_that_mix_weights_are_refused_by_name():
    for option in ("nag", "sgd", "adagrad", "adadelta", "adamax"):
        name, optimizer = build("--optimizer", option)
        fit_to_slices(optimizer, name, GROUPS)
    name, optimizer = build("--optimizer", "adafactor")
    fit_to_slices(optimizer, name, ExpertParallelGroups(2))
    with pytest.raises(ValueError, match="--optimizer adafactor .* sliced .* 1/2 of them: use --m"):
        fit_to_slices(optimizer, name, GROUPS)
    name, optimizer = build()
    apex = optimizer._optimizer = FusedAdamV1.__new__(FusedAdamV1)  # apex is not installed
    apex.use_fp16_stats = True
    with pytest.raises(ValueError, match="--fp16-adam-stats with apex's .* a scale per rank"):
        fit_to_slices(optimizer, name, GROUPS)


def config(**overrides):
    adam = {
        "adam_betas": (0.9, 0.98), "adam_eps": 1e-8, "weight_decay": 0.0, "use_old_adam": False,
        "fp16_adam_stats": True, "tpu": False, "lr": [0.01],
    }  # fmt: skip
    return OmegaConf.create(adam | overrides)


def test_only_fp16_stats_changes_the_optimizer(monkeypatch):
    """fairseq-train --bf16 sets tpu, whatever the machine."""
    params = [torch.nn.Parameter(torch.ones(3))]
    for given, kind in (({}, Adam16), ({"fp16_adam_stats": False}, Adam), ({"tpu": True}, Adam16)):
        assert isinstance(FairseqAdam(config(**given), params).optimizer, kind)
    with pytest.raises(NotImplementedError):
        FairseqAdam(config(use_old_adam=True), params)
    with pytest.raises(ValueError, match="bmuf"):
        FairseqAdam(config(), params).average_params()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "torch_xla" or None)
    with pytest.raises(NotImplementedError):
        FairseqAdam(config(tpu=True), params)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_experts_are_updated_as_by_fairseqs_own_lines(decay, monkeypatch):
    """Also a weight that gets no gradient at first; without experts those lines run."""
    calls = spied(monkeypatch, ours, "adamw")

    def train(kind, experts):
        generator = torch.Generator().manual_seed(0)
        shapes = [(4, 8, 6), (4, 6), (16, 8), (5,)]
        params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        params[0].expert = experts
        groups = [{"params": params[:2], "lr": 0.02}, {"params": params[2:]}]
        optimizer = kind(groups, lr=0.01, betas=(0.9, 0.98), weight_decay=decay)
        for number in range(5):
            for index, param in enumerate(params):
                late = index == 1 and number < 2
                param.grad = None if late else torch.randn(param.shape, generator=generator)
            optimizer.step()
            if number == 2:  # as a checkpoint does
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return params, [optimizer.state[param] for param in params]

    for experts in (True, False):
        calls.clear()
        got, states = train(ours.OnePassAdam, experts)
        want, wanted = train(Adam, experts)
        assert bool(calls) is experts
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(states, wanted, rtol=1e-5, atol=1e-6)
