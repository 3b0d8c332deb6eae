"""``--arch NAME_moe`` in programs and on ranks: all classes, options of layers, dense models,
``auto`` exchanges: one choice for a pass, on all ranks and in recomputations."""

import json
import os
import sys

import pytest
import torch
from helpers import architectures
from helpers.architectures import ROWS
from helpers.commands import ROOT, run
from helpers.distributed import on_ranks, run_ranks
from helpers.training import named, save

from fairseq_tutel.distributed import gather_texts, is_expert, process_world
from fairseq_tutel.moe.model import moe_layers
from fairseq_tutel.moe.recomputation import is_recomputing
from fairseq_tutel.tuning import exchange_tuner
from fairseq_tutel.tuning.timer import RegionTimer

UPDATES = 5
TIMES = {1: 4000, 2: 3000, 4: 2000, 8: 5000}  # microseconds by overlap degree
AUTO = "--moe-overlap-degree auto --moe-tune-max-loss 1 --moe-tune-steps 3 --moe-freq 1"


def _train(configs, sets):
    """Return weights and gradients of gates by name; on one rank also the weights resumed."""
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
def test_all_train_on_two_ranks_as_on_one(data, tmp_path):
    names = os.environ.get("ARCHITECTURES", " ".join(ROWS)).split()
    configs = {name: architectures.make_config(ROWS[name], data) for name in names}
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
def test_options_of_layers_work_in_any_class(data, tmp_path):
    """On two ranks as on one, saved and resumed: an encoder, and an encoder with a decoder."""
    configs = {
        f"{name} {key}": architectures.make_config(ROWS[name], data, *options.split())
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
def test_dense_models_beside_the_plugin_have_the_same_bits(data, tmp_path):
    """Weights and optimizer of three tasks after three updates, and without the user dir."""
    names = "transformer_lm", "transformer_align", "s2t_transformer"
    how = "--cpu --seed 3 --optimizer adam --lr 0.01 --batch-size 2 --max-update 3 --num-workers 0 "
    how += "--disable-validation --no-epoch-checkpoints --save-dir"
    states = []
    for more in ([], ["--user-dir", str(ROOT / "fairseq_tutel")]):
        saves, commands = tmp_path / f"runs-{len(more)}", []
        for name in names:
            row, save_dir = ROWS[name], str(saves / name)
            words = [*row.options.format(folder=data).split(), "--arch", row.arch]
            commands.append([f"{data}/{row.data}", *words, *how.split(), save_dir, *more])
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


class _TableTimer(RegionTimer):
    """Real hooks, and times of a table."""

    exchange = None

    @property
    def microseconds(self):
        if super().microseconds is None or self.exchange is None:
            return None
        return TIMES[self.exchange.overlap_degree] + process_world()[0]


def _watched(trainer):
    """What each call of a layer used: its number, overlap degree, and whether it came again."""
    calls = []

    def note(layer, args, kwargs):
        step = kwargs["step"]
        if layer.training:
            if step.timer is not None:
                step.timer.exchange = step.exchange
            calls.append((layer.layer_index, step.exchange.overlap_degree, is_recomputing()))

    for layer in moe_layers(trainer.model).values():
        layer.register_forward_pre_hook(note, with_kwargs=True)
    return calls


def _tuned_updates(trainer, updates=12):
    for samples in architectures.batches(trainer, updates, total=4):
        trainer.train_step(samples)
    return named(trainer)


@on_ranks(2)
def test_a_pass_has_one_choice_and_the_fastest_wins(data, tmp_path):
    """Of an encoder and a decoder with other token counts, recomputed; weights as without."""
    exchange_tuner.RegionTimer = _TableTimer
    more = ["--moe-freq", "1", "--checkpoint-activations"]

    cfg = architectures.make_config(ROWS["bart"], data, *AUTO.split(), *more)
    cfg.checkpoint.save_dir, cfg.checkpoint.no_save = str(tmp_path), False
    trainer = architectures.trainer_of(cfg)
    calls, tuner, asked = _watched(trainer), trainer.get_model().exchange_tuner, []
    agree = tuner.agree
    tuner.agree = lambda *args: asked.append(args) or agree(*args)
    found = _tuned_updates(trainer)
    passes = [calls[i : i + 8] for i in range(0, len(calls), 8)]  # 4 layers, each twice
    assert len(passes) == len(asked) == 2 * 12
    for each in passes:
        assert [number for number, _, again in each if not again] == [0, 1, 2, 3]
        assert len({degree for _, degree, _ in each}) == 1
    assert {degree for _, degree, _ in calls} == set(TIMES)
    assert len(set(gather_texts(str(calls)))) == 1
    assert {degree for _, degree, _ in passes[-1]} == {4}
    # validation keeps the layers' own exchange
    ((sample, *_),) = architectures.batches(trainer, 1, total=4)
    sample.pop("seed")
    with torch.no_grad():
        trainer.valid_step(sample)

    fixed = architectures.make_config(ROWS["bart"], data, *more)
    want = _tuned_updates(architectures.trainer_of(fixed))
    for name, value in found.items():
        torch.testing.assert_close(value, want[name], rtol=1e-4, atol=1e-5)


UNEVEN = {
    "roberta": "--encoder-layerdrop 0.5",
    "wav2vec2": "--encoder-layerdrop 0.5",
    "levenshtein_transformer": "",  # its decoder runs three times
}


@on_ranks(2)
def test_ranks_skip_the_same_layers_and_uneven_passes_stay_together(data):
    """Both kinds of layer drop in fairseq; ranks that part would hang, or differ afterwards."""
    for name, options in UNEVEN.items():
        # a load bias, which passes without a layer do not move
        flags = [*AUTO.split(), "--moe-load-bias", "sign", *options.split()]
        trainer = architectures.trainer_of(architectures.make_config(ROWS[name], data, *flags))
        calls = _watched(trainer)
        _tuned_updates(trainer, 6)
        assert calls and gather_texts(str(calls)) == [str(calls)] * 2
        assert len({degree for _, degree, _ in calls}) > 1
        if options:
            assert len(calls) < 24 and {layer for layer, _, _ in calls} == {0, 1}
        dense = [p for p in trainer.model.parameters() if not is_expert(p)]
        sums = gather_texts(str([float(p.double().sum()) for p in dense]))
        assert sums[0] == sums[1]


def test_one_rank_has_nothing_to_choose(data):
    trainer = architectures.make_trainer(ROWS["bart"], data, *AUTO.split())
    assert trainer.model.exchange_tuner is None
    trainer.train_step(next(architectures.batches(trainer, 1)))
