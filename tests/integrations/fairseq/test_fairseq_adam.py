"""``--optimizer adam --fp16-adam-stats`` on stock fairseq, without apex and without a GPU.

Runs that resume with and without it: test_resume.py.
"""

import pytest
import torch
from fairseq.optim.adam import Adam, FairseqAdam
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
