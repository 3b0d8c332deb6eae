"""``--optimizer adam --fp16-adam-stats`` on stock fairseq, without apex and without a GPU."""

import copy

import pytest
import torch
from fairseq.optim.adam import Adam, FairseqAdam
from fairseq.optim.fp16_optimizer import MemoryEfficientFP16Optimizer
from helpers.training import make_config
from omegaconf import OmegaConf

from fairseq_tutel.training.adam16 import Adam16


def config(**overrides):
    adam = {
        "adam_betas": (0.9, 0.98), "adam_eps": 1e-8, "weight_decay": 0.0, "use_old_adam": False,
        "fp16_adam_stats": True, "tpu": False, "lr": [0.01],
    }  # fmt: skip
    return OmegaConf.create(adam | overrides)


def test_only_fp16_stats_changes_the_optimizer():
    params = [torch.nn.Parameter(torch.ones(3))]
    assert type(FairseqAdam(config(), params).optimizer) is Adam16
    assert type(FairseqAdam(config(fp16_adam_stats=False), params).optimizer) is Adam
    with pytest.raises(NotImplementedError):
        FairseqAdam(config(use_old_adam=True), params)
    with pytest.raises(ValueError, match="bmuf"):
        FairseqAdam(config(), params).average_params()


def test_tpu_is_left_to_fairseq_where_there_may_be_one(monkeypatch):
    """fairseq-train --bf16 sets tpu, whatever the machine."""
    params = [torch.nn.Parameter(torch.ones(3))]
    assert type(FairseqAdam(config(tpu=True), params).optimizer) is Adam16
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "torch_xla" or None)
    with pytest.raises(NotImplementedError):
        FairseqAdam(config(tpu=True), params)


def memory_efficient(param, stats):
    words = "--memory-efficient-fp16 --fp16 --fp16-init-scale 4 --adam-betas (0.9,0.98)"
    cfg = make_config(*words.split(), *["--fp16-adam-stats"] * stats)
    return MemoryEfficientFP16Optimizer.build_optimizer(cfg, [param])


def train(optimizer, param, steps):
    target = torch.linspace(-1, 1, param.numel(), dtype=param.dtype).view_as(param)
    for _ in range(steps):
        optimizer.zero_grad()
        optimizer.backward((param - target).float().square().sum())
        optimizer.clip_grad_norm(0.5)
        optimizer.step()


@pytest.mark.parametrize("from_stats", [True, False])
@pytest.mark.parametrize("to_stats", [True, False])
def test_memory_efficient_fp16_resumes_with_either_kind_of_state(from_stats, to_stats):
    """The wrapper's own copying of optimizer state must not undo a conversion."""
    first = torch.nn.Parameter(torch.zeros(40).half())
    optimizer = memory_efficient(first, from_stats)
    train(optimizer, first, 10)
    saved, weights = copy.deepcopy(optimizer.state_dict()), first.detach().clone()
    train(optimizer, first, 10)

    second = torch.nn.Parameter(weights.clone())
    resumed = memory_efficient(second, to_stats)
    resumed.load_state_dict(saved, {"lr": 0.01})
    state = resumed.optimizer.state[second]
    assert state["step"] == 10
    assert state["exp_avg"].dtype == (torch.float16 if to_stats else torch.float32)
    assert ("exp_avg_scale" in state) == to_stats
    train(resumed, second, 10)
    assert type(resumed.optimizer) is (Adam16 if to_stats else Adam)
    moved = (first - weights).float()
    assert moved.abs().mean() > 0.02
    error = (second - first).detach().float().square().mean().sqrt()
    assert error < (1e-6 if from_stats == to_stats else 0.02 * moved.square().mean().sqrt())
