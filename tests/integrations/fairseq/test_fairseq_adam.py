"""``--optimizer adam --fp16-adam-stats`` on stock fairseq, without apex and without a GPU.

Runs that resume with and without it: test_resume.py.
"""

import copy

import pytest
import torch
from fairseq.optim.adam import Adam, FairseqAdam
from helpers.dispatched import spied
from omegaconf import OmegaConf

from fairseq_tutel.integrations.fairseq import optim
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
    assert isinstance(FairseqAdam(config(fp16_adam_stats=False), params).optimizer, Adam)
    with pytest.raises(NotImplementedError):
        FairseqAdam(config(use_old_adam=True), params)
    with pytest.raises(ValueError, match="bmuf"):
        FairseqAdam(config(), params).average_params()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_experts_are_updated_as_by_fairseqs_own_lines(decay, monkeypatch):
    """Also a weight that gets no gradient at first; without experts those lines run."""
    calls = spied(monkeypatch, optim, "adamw")

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
        got, states = train(optim.OnePassAdam, experts)
        want, wanted = train(Adam, experts)
        assert bool(calls) is experts
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(states, wanted, rtol=1e-5, atol=1e-6)


def test_tpu_is_left_to_fairseq_where_there_may_be_one(monkeypatch):
    """fairseq-train --bf16 sets tpu, whatever the machine."""
    params = [torch.nn.Parameter(torch.ones(3))]
    assert type(FairseqAdam(config(tpu=True), params).optimizer) is Adam16
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "torch_xla" or None)
    with pytest.raises(NotImplementedError):
        FairseqAdam(config(tpu=True), params)
