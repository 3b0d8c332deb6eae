"""fairseq's optimizers over slices of experts; the state of their slices: test_sliced_state.py."""

import pytest
import torch
from fairseq import optim
from fairseq.optim.fused_adam import FusedAdamV1
from helpers.training import make_config

from fairseq_tutel.distributed import ExpertParallelGroups, copies_of, is_expert
from fairseq_tutel.integrations.fairseq.trainer.parallel import fit_to_slices
from fairseq_tutel.moe import Experts

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
