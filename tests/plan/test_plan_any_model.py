"""Plans of ``NAME_moe`` against models that are really built."""

import copy
import re

import pytest
import torch
from fairseq import tasks
from helpers import architectures
from helpers.architectures import ROWS
from plan_helpers import A100

from fairseq_tutel.distributed import is_expert
from fairseq_tutel.moe.model import moe_layers
from fairseq_tutel.plan.any_model import memory_of_model, plan_model
from fairseq_tutel.plan.cli import main

ROWS_COUNTED = [(name, "") for name in ("wav2vec_seq2seq", "s2t_transformer", "cmlm_transformer")]
ROWS_COUNTED += [(name, options) for name in ("s2t_conformer", "roberta") for options in (
    "",
    "--moe-expert-network swiglu --moe-expert-ffn-dim 20",
    "--moe-freq 1 --moe-shared-expert-ffn-dim 8 --moe-router cosine",
    "--moe-expert-count 1 --moe-expert-placement sliced",
)]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    architectures.stand_in()
    architectures.make_data(path)
    yield str(path)
    architectures.take_back()


def _config(name, folder, *options):
    return architectures.make_config(ROWS[name], folder, "--optimizer", "adam", *options)


def _built(cfg, gpus=1):
    """The model that a rank of a run trains."""
    cfg = copy.deepcopy(cfg)
    cfg.model.moe_benchmark = f"simulate_world_size={gpus}" if gpus > 1 else None
    return tasks.setup_task(cfg.task).build_model(cfg.model)


@pytest.mark.parametrize(("name", "options"), ROWS_COUNTED)
def test_counts_are_those_of_the_built_model(name, options, folder):
    cfg = _config(name, folder, *options.split())
    before = torch.get_rng_state()
    plans = {gpus: plan_model(cfg, name, A100, gpus).parameters for gpus in (1, 2)}
    assert torch.equal(torch.get_rng_state(), before)
    for gpus, counted in plans.items():  # on 2 ranks each has half of the experts, or their halves
        model = _built(cfg, gpus)
        params, layers = list(model.parameters()), moe_layers(model)
        assert counted.per_gpu == sum(param.numel() for param in params)
        assert counted.dense == sum(param.numel() for param in params if not is_expert(param))
        assert counted.total == plans[1].per_gpu >= counted.per_gpu
        assert counted.moe_layers == len(layers) > 0
        if gpus == 1:
            held = sum(p.numel() for p in next(iter(layers.values())).experts.parameters())
            assert counted.stacks[0].expert * cfg.model.moe_expert_count == held
    assert plans[2].per_gpu < plans[2].total


def test_the_memory_is_that_of_weights_and_their_update(folder):
    """On one rank; the estimate of a run builds the model with the run's own task."""
    cfg = _config("bart", folder)
    kinds = plan_model(cfg, "bart", A100).at_update
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model)
    assert kinds == memory_of_model(cfg, 1, task)
    params = list(model.parameters())
    number = sum(param.numel() for param in params)
    optimizer = torch.optim.Adam(params, foreach=False)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    states = [s for each in optimizer.state.values() for s in each.values() if s.dim()]
    assert kinds["weights"] == kinds["gradients"] == 4 * number and not kinds["fp32 copies"]
    assert kinds["optimizer statistics"] == sum(state.nbytes for state in states)


def _command(name, folder, *options):
    row = ROWS[name]
    words = [f"{folder}/{row.data}", *row.options.format(folder=folder).split()]
    words += ["--user-dir", "fairseq_tutel", "--arch", f"{row.arch}_moe", "--optimizer", "adam"]
    return ["--", "fairseq-train", *words, "--moe-expert-count", "4", *options]


def test_the_command_line_says_what_it_does_not_know(folder, capsys):
    assert main(["gpus=2", *_command("s2t_transformer", folder, "--moe-grow-at", "9:8")]) == 0
    out = capsys.readouterr().out
    counted = plan_model(_config("s2t_transformer", folder), "", A100, gpus=2).parameters
    assert f"{counted.total:,}" in out and f"{counted.per_gpu:,}" in out
    assert "not known: activations, logits, operations, traffic and time" in out
    assert "tokens/s" not in out and "FLOPs" not in out and "fits" not in out
    assert "after --moe-grow-at 9:8" in out
    grown = plan_model(_config("s2t_transformer", folder, "--moe-expert-count", "8"), "", A100)
    assert f"{grown.parameters.total:,}" in out


@pytest.mark.parametrize("arguments, data, options, message", [
    (["--best"], "speech", [], "--best: the planner predicts no activations and no time of s2t_"),
    (["tokens=9"], "speech", [], "tokens=9: the planner predicts no act"),
    ([], "nowhere", [], "speech_to_text cannot be set up here .*: give vocabulary=N"),
    ([], "speech", ["--moe-lora-rank", "2"], "--moe-lora-rank 2: the planner counts training"),
    ([], "speech", ["--moe-blocks", "conv"], "conv"),
    (["gpus=12"], "speech", ["--moe-expert-count", "12"], "gpus=12 does not fill nodes of 8"),
])  # fmt: skip
def test_what_it_cannot_say_is_refused(arguments, data, options, message, folder, capsys):
    words = [w.replace(f"{folder}/speech", f"{folder}/{data}") for w in
             _command("s2t_transformer", folder, *options)]  # fmt: skip
    assert main([*arguments, *words]) == 1
    error = capsys.readouterr().err
    assert re.search(message, error), error


def test_without_data_the_dictionaries_have_the_given_size(folder, capsys):
    words = [w.replace(f"{folder}/speech", f"{folder}/nowhere") for w in
             _command("s2t_transformer", folder)]  # fmt: skip
    totals = []
    for number in (30, 31):
        assert main([f"vocabulary={number}", *words]) == 0
        out = capsys.readouterr().out
        assert f"taken for granted: all dictionaries have {number} symbols" in out
        totals.append(int(out.split("parameters ")[2].split()[0].replace(",", "")))
    assert totals[1] - totals[0] == 2 * 16  # embedding and output, 16 wide
