"""Plans of NLLB-200, and of ``NAME_moe`` against models that are really built."""

import copy
import re

import pytest
import torch
from fairseq import tasks
from helpers import architectures
from helpers.architectures import ROWS
from plan_helpers import A100, pairs

from fairseq_tutel.distributed import is_expert
from fairseq_tutel.moe.model import moe_layers
from fairseq_tutel.plan.any_model import memory_of_model, plan_model
from fairseq_tutel.plan.cli import main
from fairseq_tutel.plan.compose import load_command
from fairseq_tutel.plan.planner import make_plan
from fairseq_tutel.plan.settings import read_settings

# of NLLB-200's published command (arXiv 2207.04672; branch nllb, sweep_mmt.py)
NLLB = """fairseq-train data-bin --user-dir fairseq_tutel --arch transformer_moe_nllb_54b
    --task translation_multi_simple_epoch --langs de,en --lang-pairs de-en --encoder-langtok src
    --decoder-langtok --criterion moe_label_smoothed_cross_entropy --optimizer adam --fp16
    --memory-efficient-fp16 --fp16-adam-stats --max-tokens 4096 --moe-eom 0.2 --use-moe-pad-mask
    --checkpoint-activations --ddp-backend fully_sharded"""


@pytest.mark.parametrize("gpus", [8, 256])
def test_nllb_200_as_published(gpus, capsys):
    if gpus == 8:
        assert main(["gpus=8", "vocabulary=256206", "--", *NLLB.split()]) == 0
        out = capsys.readouterr().out
        assert "54,500,569,088 (5.45e+10)" in out and "12 layers x 128 x 33,564,672" in out
        assert "24 encoder layers of 2048 + 24 decoder layers of 2048" in out
    plan = make_plan(
        read_settings(load_command(NLLB.split())[1], "nllb", gpus=gpus, vocabulary=256206), A100
    )
    assert plan.fits and plan.parameters.total == pytest.approx(54.5e9, rel=1e-3)
    assert plan.parameters.local_experts == max(1, 128 // gpus)
    held = plan.parameters.dense + 12 * plan.parameters.local_experts * 33_564_672
    assert plan.parameters.per_gpu == held and plan.memory.weights == 2 * held
    # 8 sentences of 512 tokens: top-2 of 128 experts, 4096 rows of 2048 halves and a capacity of 64
    assert (plan.work.capacity, plan.work.exchange_bytes) == (64, 2 * 4096 * 2048 * 2)
    assert plan.work.replicas == max(1, gpus // 128)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpus=8", "--", *NLLB.split()],
         "size of a translation's dictionary is unknown: give vocabulary=N"),
        (["gpus=8", "vocabulary=9", "sentence=999", "--", *NLLB.split()],
         "sentence=999: the run takes sentences of at most 512"),
        (["gpus=8", "sentence=9", "--config-name", "meta_1.1t"], "sentence=N is for encoder-deco"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_in_a_line(capsys, words, message):
    assert main(words) == 1
    assert message in capsys.readouterr().err


def test_a_sentence_counts_in_attention_alone():
    long, short = (make_plan(pairs(sentence=n), A100).work.model_flops for n in (32, 16))
    # of 4 encoder layers, and of 4 decoder layers twice
    assert long - short == 3 * 12 * 4 * 16 * 64


@pytest.mark.parametrize("languages", ["-s de -t en", ""])
def test_a_data_bin_tells_its_dictionarys_size(tmp_path, languages):
    for side in ("de", "en"):
        (tmp_path / f"dict.{side}.txt").write_text("a 1\nb 1\n", encoding="utf-8")
        (tmp_path / f"train.de-en.{side}.idx").touch()
    words = ["--task", "translation", str(tmp_path), *languages.split()]
    name, config = load_command(
        ["fairseq-train", *words, "--arch", "transformer_moe", "--moe-expert-count", "4",
         "--optimizer", "adam", "--max-tokens", "600"]
    )  # fmt: skip
    settings = read_settings(config, name)
    assert (settings.vocabulary, settings.tokens_per_sample, settings.batch_size) == (6, 600, 1)


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
    cfg = _config("roberta", folder)
    kinds = plan_model(cfg, "roberta", A100).at_update
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
