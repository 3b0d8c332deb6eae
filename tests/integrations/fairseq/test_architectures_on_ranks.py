"""``--arch NAME_moe`` in programs and on ranks: all classes, options of layers, dense models."""

import json
import os
import sys

import pytest
import torch
from helpers import architectures
from helpers.architectures import ROWS
from helpers.commands import ROOT, run
from helpers.distributed import run_ranks
from helpers.training import named, save

from fairseq_tutel.distributed import process_world

UPDATES = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    architectures.make_data(path)
    yield str(path)
    architectures.take_back()


def _train(configs, sets):
    """Return weights and gradients of gates by name; on one rank also the weights resumed."""
    architectures.stand_in()
    found = {}
    for name, cfg in configs.items():
        trainer = architectures.trainer_of(cfg)
        for samples in architectures.batches(trainer, UPDATES):
            trainer.train_step(samples)
        weights, path = named(trainer), f"{sets}/{name}.pt"
        gates = {
            key: float(param.grad.abs().max())
            for key, param in trainer.model.named_parameters()
            if "gate.wg" in key and param.grad is not None
        }
        if process_world()[1] > 1:
            save(trainer, path, UPDATES)
            found[name] = weights, gates
        else:
            trainer.load_checkpoint(path)
            found[name] = weights, gates, named(trainer)
    return found


@pytest.mark.long
def test_all_train_on_two_ranks_as_on_one(folder, tmp_path):
    names = os.environ.get("ARCHITECTURES", " ".join(ROWS)).split()
    configs = {name: architectures.make_config(ROWS[name], folder) for name in names}
    problems, gates_by_name = _compared(configs, str(tmp_path))
    for name, gates in gates_by_name.items():
        for stack in ROWS[name].stacks:
            mine = [size for key, size in gates.items() if key.startswith(f"{stack}.")]
            if not mine or min(mine) == 0:
                problems.append(f"{name}: gates of {stack} have no gradient: {gates}")
    assert not problems, "\n".join(problems)


OPTIONS = {
    "lora": "--moe-lora-rank 2",
    "copies": "--moe-copy-blocks",
    "load bias": "--moe-load-bias sign",
    "slices": "--moe-expert-count 1 --moe-expert-placement sliced",
}


@pytest.mark.long
def test_options_of_layers_work_in_any_class(folder, tmp_path):
    """On two ranks as on one, saved and resumed: an encoder, and an encoder with a decoder."""
    configs = {
        f"{name} {key}": architectures.make_config(ROWS[name], folder, *options.split())
        for name in ("roberta", "bart")
        for key, options in OPTIONS.items()
    }
    problems, _ = _compared(configs, str(tmp_path))
    assert not problems, "\n".join(problems)


def _compared(configs, folder):
    """Return how two ranks and a resumed run differ from one rank, and gradients of gates."""
    by_rank, (alone,) = (run_ranks(_train, n, configs, folder, timeout=900) for n in (2, 1))
    problems = []
    for name in configs:
        parts = [by_rank[rank][name][0] for rank in (0, 1)]
        two = {key: _joined(key, parts, alone[name][0]) for key in parts[0] | parts[1]}
        one, _, resumed = alone[name]
        assert two.keys() == one.keys() == resumed.keys(), name
        for key, value in two.items():
            if not torch.equal(value, resumed[key]):
                problems.append(f"{name}: {key} is not what was saved")
            if not torch.allclose(value, one[key], rtol=1e-5, atol=1e-5):
                distance = float((value - one[key]).abs().max())
                problems.append(f"{name}: {key} differs by {distance:.1g}")
    return problems, {name: found[1] for name, found in alone.items()}


def _joined(key, parts, whole):
    """Return a weight of two ranks; slices of an expert become the expert."""
    mine = [part[key] for part in parts if key in part]
    pairs = enumerate(zip(mine[0].shape, whole[key].shape, strict=True))
    dims = [dim for dim, (size, of) in pairs if size != of]
    return torch.cat(mine, dims[0]) if dims else mine[0]


PROGRAM = """
import json, sys
from fairseq_cli.train import cli_main
for words in json.loads(sys.argv[1]):
    sys.argv = ["fairseq-train", *words]
    cli_main()
assert ("fairseq_tutel" in sys.modules) == ("--user-dir" in words)
"""


@pytest.mark.long
def test_dense_models_beside_the_plugin_have_the_same_bits(folder, tmp_path):
    """Weights and optimizer of three tasks after three updates, and without the user dir."""
    names = "transformer_lm", "transformer_align", "s2t_transformer"
    how = "--cpu --seed 3 --optimizer adam --lr 0.01 --batch-size 2 --max-update 3 --num-workers 0 "
    how += "--disable-validation --no-epoch-checkpoints --save-dir"
    states = []
    for more in ([], ["--user-dir", str(ROOT / "fairseq_tutel")]):
        saves, commands = tmp_path / f"runs-{len(more)}", []
        for name in names:
            row, save_dir = ROWS[name], str(saves / name)
            words = [*row.options.format(folder=folder).split(), "--arch", row.arch]
            commands.append([f"{folder}/{row.data}", *words, *how.split(), save_dir, *more])
        run([sys.executable, "-c", PROGRAM, json.dumps(commands)])
        files = (saves / name / "checkpoint_last.pt" for name in names)
        states.append([torch.load(file, weights_only=False) for file in files])
    for name, stock, beside in zip(names, *states, strict=True):
        for part in ("model", "last_optimizer_state"):
            assert _tensors(stock[part])
            torch.testing.assert_close(
                _tensors(beside[part]), _tensors(stock[part]), rtol=0, atol=0, msg=f"{name}: {part}"
            )


def _tensors(state):
    """The tensors of a nested state by path."""
    entries = state.items() if hasattr(state, "items") else enumerate(state)
    found = {}
    for key, value in entries:
        if torch.is_tensor(value):
            found[str(key)] = value
        elif isinstance(value, dict | list):
            found |= {f"{key}.{name}": each for name, each in _tensors(value).items()}
    return found
