"""The planner's command line, its refusals, and its predictions against published figures."""

import re
import sys

import hydra
import pytest
from helpers import commands
from helpers.commands import logged
from plan_helpers import A100, CONFIGS, SMALL, settings_of

from fairseq_tutel.config import EXCHANGES
from fairseq_tutel.plan.cli import main
from fairseq_tutel.plan.hardware import load_hardware
from fairseq_tutel.plan.planner import flop_matched, largest_batch, make_plan

FEWER = "gpus=512 model.decoder_layers=4 model.moe_expert_count=64"
SLICED = "+model.moe_expert_placement=sliced"


def run(capsys, *arguments):
    """(exit status, standard output, standard error) of the planner on the 1.1T config."""
    status = main(["--config-dir", str(CONFIGS), "--config-name", "meta_1.1t", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_of_the_readme(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the shipped configs are found from anywhere
    assert main(["--config-name", "meta_1.1t", "gpus=512"]) == 0
    out = capsys.readouterr().out
    assert "1.10e+12" in out and "fits" in out and "96 rows" in out and "768.0 KiB" in out
    assert main(["--config-name", "meta_1.1t", "gpus=512", "hardware=h100"]) == 0
    assert "H100" in capsys.readouterr().out
    # what a tuner chooses is planned as where it starts
    words = ("+model.moe_overlap_degree=auto", "+model.moe_parallelism_r=auto")
    assert run(capsys, "gpus=512", *words)[1] == out


def test_what_the_grown_model_needs(capsys):
    """Both columns are those of runs that always had as many experts."""
    status, out, _ = run(capsys, *FEWER.split(), "+model.moe_grow_at=300:512")
    assert status == 0
    grown = out[out.index("after --moe-grow-at 300:512") :]
    plans = []
    for experts in (64, 512):
        words = ["model.decoder_layers=4", f"model.moe_expert_count={experts}"]
        plans.append(make_plan(settings_of(overrides=words, gpus=512), A100))
    for words in (
        r"experts +64 +512",
        r"parameters +{:,} +{:,}".format(*(plan.parameters.total for plan in plans)),
        r"largest batch that fits +{} +{}".format(*map(largest_batch, plans)),
    ):
        assert re.search(words, grown), grown


GPT, VOCABULARY = "transformer_lm_gpt", "gpus=2 vocabulary=100"
TRAIN, META = "-- fairseq-train", f"--config-dir {CONFIGS} --config-name meta_1.1t"
SIZES = f"""{VOCABULARY} {TRAIN} x --task language_modeling --tokens-per-sample 8 --batch-size 2
    --optimizer adam --arch {GPT}_moe --moe-expert-count 4 --decoder-layers 2
    --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2 """
REFUSED = [
    *((f"{META} {words}", message) for words, message in (
        ("gpus=100", "512 experts cannot be spread over 100 ranks"),
        ("gpus=12 model.moe_expert_count=12", "does not fill nodes of 8"),
        ("gpus=512 dataset.batch_size=64", "at the peak on GPUs with 76,294 MiB to fill; lar"),
        ("gpus=0", "gpus=0"),
        ("gpu=512", "did you mean gpus"),
        ("model.moe_topk=1", "did you mean model.moe_top_k"),
        ("optimization.max_updates=1", "did you mean optimization.max_update"),
        ("hardware=abacus", "a100-80g"),
        ("model.decoder_attention_heads=30", "--decoder-attention-heads 30"),
        ("model.moe_freq=40", "--moe-freq 40"),
        ("model._name=transformer_lm", "transformer_lm"),
        ("+model.base_layers=1", "--base-layers 1 cannot be combined with MoE layers"),
        ("dataset.batch_size=null", "dataset.max_tokens"),
        ("optimizer._name=sgd", "sgd"),
        ("task._name=language_modeling ~task.dict_size ~task.dataset_size", "vocabulary=N"),
        ("+model.moe_top1_expert=true +model.moe_top_k=2", "--moe-top-k"),
        ("+model.moe_overlap_degree=3", "--moe-overlap-degree 3 must be one of"),
        ("+model.moe_capacity_factor=.inf", "full_key: moe_capacity_factor"),
        # what fairseq-hydra-train would refuse
        ("nonsense", "nonsense"),
        ("+model.moe_grow_at=300", "--moe-grow-at 300: expected UPDATE:EXPERTS"),
        ("+model.moe_grow_at=300:512", "--moe-grow-at 300:512 makes no more of 512 experts"),
        ("+model.moe_grow_at=300:700", "300:700: 700 experts cannot be spread over 512 ranks"),
        ("model.moe_top_k=1", "To append to your config use +model.moe_top_k=1\n"),
        ("+model.moe_topk=1", "Key 'moe_topk' not in 'TransformerLMGPTMoEConfig'"),
        ("+checkpoint.keep_last_epochs=1", "already at 'checkpoint.keep_last_epochs'"),
        # experts in slices
        (f"{FEWER} +model.moe_parallelism_r=2", "--moe-expert-placement sliced"),
        (f"{FEWER} {SLICED} +model.moe_parallelism_r=3", "choose one of 0, 1, 2, 4, 8"),
    )),
    # commands that would not train
    (f"gpus=8 {TRAIN}", f"fairseq-train: the command has no --arch; the planner supports {GPT}"),
    (f"gpus=8 {TRAIN} x --arch {GPT}_moe", "fairseq-train: the command has no --optimizer"),
    (f"gpus=8 {TRAIN} x --arch {GPT} --optimizer adam", "transformer_moe and NAME_moe only"),
    (f"gpus=8 {TRAIN} x --arch {GPT}_moe --optimizer adam", "; give --task language_modeling"),
    (f"gpu=8 {TRAIN} x --arch {GPT}", "did you mean gpus?"),
    (f"a.b=8 {TRAIN} x --arch {GPT}", "a.b=8: overrides of a command are options of the command"),
    *((SIZES + words, words) for words in (
        "--moe-top-k 9", "--decoder-attention-heads 3", "--moe-freq -1", "--moe-lora-rank 2")),
    *((SIZES + words, f"{words} must be at least 1") for words in (
        "--update-freq 0", "--decoder-embed-dim 0", "--decoder-ffn-embed-dim 0",
        "--batch-size -4", "--max-tokens -1", "--tokens-per-sample -5")),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[row[1] for row in REFUSED])
def test_impossible_plans_are_refused_in_one_line(capsys, words, message):
    assert main(words.split()) == 1
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1 and message in line, line


def test_what_hydra_takes_is_taken(capsys):
    add_or_change = "" if hydra.__version__.startswith("1.0") else "++"  # 1.0 has no ++
    words = ["+model.moe_top_k=1", f"{add_or_change}model.moe_freq=2", "common.empty_cache_freq=1",
             "checkpoint.keep_last_epochs=1", "~task.dataset_size", "hydra.run.dir=.",
             "+criterion.moe_gate_loss_transform=neg_log"]  # fmt: skip
    assert run(capsys, "gpus=512", *words)[::2] == (0, "")


def test_best_says_by_which_flags(capsys):
    words = [*FEWER.split(), "dataset.batch_size=2"]
    status, out, _ = run(capsys, "--best", *words)
    flags = out.split("best of all choices: ")[1].split(",")[0].split()
    chosen = {f"+model.{key[2:].replace('-', '_')}={value}"
              for key, value in zip(flags[::2], flags[1::2], strict=True)}  # fmt: skip
    assert SLICED in chosen
    again = run(capsys, *words, *chosen)[1]
    assert status == 0 and out.endswith(again)


def test_from_which_number_of_gpus_the_hierarchical_exchange_pays():
    """By message size. Tutel's is advised from 256 GPUs on (microsoft/tutel issue 214)."""
    linear, hierarchical = (EXCHANGES.get(name).predict for name in ("linear", "2dh"))

    def pays(mib, gpus):
        return hierarchical(mib << 20, gpus, A100) < linear(mib << 20, gpus, A100)

    gpus = [2**i for i in range(4, 12)]
    first = {mib: next(n for n in gpus if pays(mib, n)) for mib in (1, 32, 128, 256)}
    assert first == {1: 32, 32: 128, 128: 512, 256: 1024}
    # tiny messages: as many times faster as there are fewer messages, less a second start
    gain = linear(1, 2048, A100) / hierarchical(1, 2048, A100)
    assert 0.9 * 2047 / (8 + 256 - 2) < gain < 2047 / (8 + 256 - 2)


@pytest.mark.parametrize("name", sorted(p.stem for p in CONFIGS.glob("hardware/*.yaml")))
def test_every_number_of_a_profile_has_a_source(name):
    hardware = load_hardware(CONFIGS, name)
    assert 0 < hardware.matmul_efficiency <= hardware.product_efficiency <= 1
    assert hardware.reserved < hardware.memory
    assert make_plan(settings_of(gpus=512), hardware).time.total > 0


def test_a_profile_without_a_source_is_refused(tmp_path):
    text = (CONFIGS / "hardware" / "a100-80g.yaml").read_text()
    (tmp_path / "hardware").mkdir()
    for name, change, message in (
        ("a", lambda t: t.replace('source: "assumption"', 'source: ""'), "no source"),
        ("b", lambda t: t.replace("latency:", "delay:"), "delay, latency"),
        ("c", lambda t: t.replace("value: 8", "value: many"), "'many'"),
    ):
        assert change(text) != text
        (tmp_path / "hardware" / f"{name}.yaml").write_text(change(text))
        with pytest.raises(ValueError, match=message):
            load_hardware(tmp_path, name)


COMMAND = """--task language_modeling --arch transformer_lm_gpt_moe --user-dir fairseq_tutel
    --moe-expert-count 8 --moe-freq 2 --moe-gating-use-fp32 --decoder-layers 4
    --decoder-embed-dim 64 --decoder-ffn-embed-dim 256 --decoder-attention-heads 4
    --share-decoder-input-output-embed
    --criterion moe_cross_entropy --optimizer adam --memory-efficient-fp16 --fp16-adam-stats
    --tokens-per-sample 64 --batch-size 4 --lr 0.001 --ddp-backend legacy_ddp"""


def test_a_command_that_works_becomes_a_plan(capsys, tmp_path):
    """With whatever starts it; the same as the config that says the same."""
    (tmp_path / "dict.txt").write_text("".join(f"w{n} 1\n" for n in range(596)))
    words = ["torchrun", "--nproc-per-node=4", "fairseq-train", str(tmp_path), *COMMAND.split()]
    assert main(["gpus=4", "--", *words]) == 0
    ours = capsys.readouterr().out
    same = [*SMALL[:-3], "model.checkpoint_activations=false", "model.dropout=0.1"]
    theirs = run(capsys, "gpus=4", *same)[1]
    flag, key = (
        "--alternate-decoder-ffn-embed-dim 512",
        "+model.alternate_decoder_ffn_embed_dim=512",
    )
    assert ours.replace("(fairseq-train)", "(meta_1.1t)").replace(flag, key) == theirs
    assert flag in ours
    hydra = ["env", "A=1", "fairseq-hydra-train", "--config-dir", str(CONFIGS)]
    assert main(["gpus=512", "--", *hydra, "--config-name", "meta_1.1t"]) == 0
    assert "1.10e+12" in capsys.readouterr().out


def test_the_parts_of_memory_sum_to_the_peak_that_is_named(capsys):
    for words, phase in (
        ([], "in the backward pass"),
        (["dataset.batch_size=1"], "while the weights are updated"),
        (["task.dict_size=800000", "model.moe_expert_count=4096"], "while the loss is computed"),
    ):
        _, out, _ = run(capsys, "gpus=4096", *words)
        lines = out[out.index("memory of a GPU at its peak") :].splitlines()
        assert phase in lines[0], lines
        end = next(n for n, line in enumerate(lines) if "together" in line)
        sizes = [int(line.split()[-2].replace(",", "")) for line in lines[1:end]]
        whole = int(lines[end].split()[1].replace(",", ""))
        assert abs(sum(sizes) - whole) <= len(sizes) / 2 + 1


def test_what_a_plan_says_besides(capsys):
    status, out, _ = run(capsys, "gpus=512", "tokens=1e9", "dataset.batch_size=2")
    assert status == 0 and out.startswith("1.1e+12 parameters (32 layers of 4096, 16 with 512 exp")
    out = " ".join(out.split())
    plan = make_plan(settings_of(overrides=["dataset.batch_size=2"], gpus=512), A100)
    active = plan.parameters.dense + 16 * 2 * plan.parameters.stacks[0].expert
    days = 1e9 / plan.tokens_per_second / 86400
    assert f"active per token {active:,}" in out and f"days for 1e+09 tokens {days:.3g}" in out
    most = largest_batch(plan)
    peaks = [make_plan(plan.settings.replace(batch_size=n), A100).fits for n in (most, most + 1)]
    assert peaks == [True, False] and f"{most} sequences per GPU" in out
    dense = flop_matched(plan)
    gate = 3 * 16 * 2 * 4096 * 512
    assert dense.work.model_flops == pytest.approx(plan.work.model_flops - gate, rel=1e-9)
    assert f"{dense.parameters.total:,}" in out


def test_wrong_words_are_answered_before_torch_is_imported():
    code = """
import contextlib, sys
from fairseq_tutel.plan.cli import main
for words in ([], ["--help"], ["--nosuch"], ["--config-name", "meta_1.1t", "gpus=x"]):
    with contextlib.suppress(SystemExit):
        main(words)
assert not {"torch", "fairseq", "hydra"} & set(sys.modules)
"""
    commands.run([sys.executable, "-c", code], timeout=60)


@pytest.mark.parametrize(
    ("words", "rows", "lines"),
    [
        # (tokens per GPU, GPUs that exchange, experts): 24 x 1024 tokens go to 2 experts each
        ("gpus=512", "49,152", ["advice: with more than 256 experts (512) try groups"]),
        ("gpus=8 model.moe_expert_count=8", "49,152", []),
        ("gpus=8 model.moe_expert_count=512 dataset.batch_size=1 task.tokens_per_sample=256", "8",
         ["warning: 8 rows per expert are fewer than 128", "advice: with more than 256"]),
        ("gpus=64 model.moe_expert_count=512 +model.moe_expert_parallel_size=8", "768", []),
        ("gpus=16 model.moe_expert_count=8", "49,152", []),  # two replicas
    ],
)  # fmt: skip
def test_advice_about_the_number_of_experts(capsys, words, rows, lines):
    _, out, _ = run(capsys, *words.split(), "model.decoder_layers=2", "model.decoder_embed_dim=64",
                    "model.decoder_ffn_embed_dim=64")  # fmt: skip
    assert re.search(rf"rows per expert +{rows} with an even load", out), out
    found = [line for line in out.splitlines() if line.startswith(("warning", "advice"))]
    assert len(found) == len(lines)
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=True))


TINY = [
    "common.cpu=true", "common.log_interval=5", "distributed_training.distributed_world_size=1",
    "model.moe_expert_count=4", "model.decoder_layers=2", "model.decoder_embed_dim=32",
    "model.decoder_ffn_embed_dim=64", "model.decoder_attention_heads=2", "task.dict_size=156",
    "task.tokens_per_sample=32", "task.dataset_size=40", "dataset.batch_size=4",
    "optimization.max_update=20", "optimization.lr=[0.01]", "lr_scheduler.warmup_updates=0",
]  # fmt: skip


def test_hydra_train_runs_it_small(programs, tmp_path):
    done = programs.run(
        ["fairseq-hydra-train", "--config-dir", str(CONFIGS), "--config-name", "meta_1.1t",
         *TINY, f"hydra.run.dir={tmp_path}"],
        cwd=tmp_path, timeout=200,
    )  # fmt: skip
    log = done.text
    assert done.status == 0, log[-3000:]
    assert "Adam with fp16 statistics" in log
    losses = [update["loss"] for update in logged(log, "train_inner")]
    assert len(losses) == 4 and losses[-1] < 0.7 * losses[0], losses
    assert log.count("Saved checkpoint") == 1  # not at the end of each of its two epochs
    assert list(tmp_path.glob("checkpoints/meta_1.1t/checkpoint_last.pt"))
