"""The command line: help, conflicts of the options, and the named sizes."""

import dataclasses
import re
from pathlib import Path

import pytest
from fairseq import options
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterionConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from helpers.training import convert

import fairseq_tutel
from fairseq_tutel.__main__ import main
from fairseq_tutel.config.options import flag_name
from fairseq_tutel.integrations.fairseq.criterions import CRITERIONS
from fairseq_tutel.integrations.fairseq.models import ARCHITECTURES, TransformerLMGPTMoEConfig
from fairseq_tutel.integrations.fairseq.models.transformer_fields import FlatTransformerConfig
from fairseq_tutel.integrations.fairseq.options import help
from fairseq_tutel.integrations.fairseq.options.benchmark import Benchmark, FormerFlags
from fairseq_tutel.integrations.fairseq.options.bundles import members
from fairseq_tutel.integrations.fairseq.options.fields import CONFIGS
from fairseq_tutel.integrations.fairseq.options.options import moe_config, run_options

ARCH = "transformer_lm_gpt_moe"
CRITERION = "moe_cross_entropy"
# fairseq's README.moe.md, "4.1B" on one node, but for the arch; and the same with 32 layers
README = """
    --ddp-backend fully_sharded --memory-efficient-fp16 --checkpoint-activations
    --task dummy_lm --tokens-per-sample 1024 --dict-size 51200
    --share-decoder-input-output-embed
    --decoder-layers 24 --decoder-embed-dim 2048 --decoder-ffn-embed-dim 8192
    --decoder-attention-heads 32
    --moe-expert-count 8 --moe-freq 2 --moe-gating-use-fp32 --moe-second-expert-policy all
    --moe-normalize-expert-grad sqrt_world_size --moe-eval-capacity-token-fraction -1.0
    --max-sentences-valid 1 --num-workers-valid 0
    --criterion moe_cross_entropy --moe-gate-loss-wt 0.01 --moe-gate-loss-combine-method sum
    --optimizer adam --fp16-adam-stats --adam-betas (0.9,0.98) --clip-norm 0.0
    --lr 0.0005 --warmup-updates 750 --lr-scheduler inverse_sqrt
    --dropout 0.1 --attention-dropout 0.1 --batch-size 4 --update-freq 1 --max-update 250
    --disable-validation --log-format json --log-interval 10
"""


def parse(*words, arch=ARCH):
    parser = options.get_training_parser()
    base = ["--task", "dummy_lm", "--arch", arch, "--criterion", CRITERION]
    return options.parse_args_and_arch(parser, input_args=[*base, *words])


def config(*words, **kwargs):
    return convert(parse(*words, **kwargs))


def test_every_option_stands_in_one_group_with_a_help_text():
    fields = [field for group in help.own_options().values() for field in group]
    fields += [help.every_option()[name] for name in members()]
    stock = (TransformerLanguageModelConfig, FlatTransformerConfig)
    stock += (LabelSmoothedCrossEntropyCriterionConfig,)
    configs = [row.schema for row in ARCHITECTURES.values()]
    configs += [row.config for row in CRITERIONS.values()]
    names = ({name for config in these for name in config.__dataclass_fields__}
             for these in (configs, stock))  # fmt: skip
    own = next(names) - next(names) - {"moe_a2a", "moe_top1_expert"}
    own -= {field.name for field in dataclasses.fields(FormerFlags)}
    assert sorted(field.name for field in fields) == sorted(own)
    assert all(field.metadata["help"] for field in fields)


def test_the_help_begins_with_what_matters_and_the_page_has_its_tables(capsys, programs):
    assert main([]) == 0
    text = capsys.readouterr().out
    programs_of = Path(fairseq_tutel.__file__).parent.glob("*/__main__.py")
    named = re.findall(r"^  python -m fairseq_tutel\.(\w+)  ", text, re.MULTILINE)
    assert {path.parent.name for path in programs_of} | {"picture"} == set(named)
    first = re.findall(r"^  (--[\w-]+) .*\(default", text, re.MULTILINE)
    assert first[0] == "--moe-preset" and len(first) == 14
    assert help.plain_text().startswith(text.partition("all options:")[0])
    stated = "(default: sampling; MoELayer's: all; --moe-preset balanced: all)"
    assert stated in " ".join(help.plain_text().split())
    # in a process of its own: other tests have registered names of their own in this one
    done = programs.run(["-m", "fairseq_tutel", "table"])
    folder = Path(help.__file__).parent
    table, page = ((folder / name).read_text("utf-8") for name in ("TABLE.md", "../README.md"))
    assert done.stdout == table, "write the page: python -m fairseq_tutel table > TABLE.md"
    assert len(re.findall("^[|] `--", table, re.MULTILINE)) <= 64, "an option needs no own row"
    (preset,) = re.findall(r"^  (--moe-second-expert-policy all .*)$", text, re.MULTILINE)
    assert f"`{preset}`" in page and "--moe-preset balanced" in page


def test_options_are_found_by_a_word(capsys):
    def found(*words):
        assert main(["options", *words]) == 0
        return capsys.readouterr().out

    every = re.findall(r"^  (--[\w-]+)", help.plain_text(), re.MULTILINE)
    for word in ("overlap", "CAPACITY", "moe_a2a"):
        blocks = re.split(r"^(?=  --)", found(word), flags=re.MULTILINE)[1:]
        wanted = word.lower().replace("_", "-")
        assert blocks and all(wanted in block.lower().replace("_", "-") for block in blocks)
        named = {re.match("  (--[a-z0-9-]+)", block)[1] for block in blocks}
        assert {flag for flag in every if wanted in flag} <= named < set(every)
    assert "of Meta's branches is refused: nothing is uploaded" in found("--s3-upload-path")
    both = re.findall(r"^  (--[\w-]+)", found("load", "BIAS"), re.MULTILINE)
    assert "--moe-load-bias" in both and len(both) < 10
    assert found() == help.plain_text()
    assert main(["options", "nosuch"]) == 1 and "'nosuch'" in capsys.readouterr().err
    assert main(["option"]) == 2


def test_the_end_of_fairseqs_help_says_how_to_find_them(programs):
    done = programs.run(["fairseq-train", "--user-dir", "fairseq_tutel", "--help"])
    assert done.stdout.splitlines()[-1].endswith("python -m fairseq_tutel options [WORD ...]")


def test_default_sizes_are_those_of_transformer_lm_gpt():
    model = config().model
    sizes = [model[f"decoder_{n}"] for n in ("embed_dim", "ffn_embed_dim", "layers")]
    assert sizes == [768, 3072, 12] and model.decoder_attention_heads == 12
    assert model.dropout == model.attention_dropout == 0.1 and str(model.activation_fn) == "gelu"


def test_published_command_parses(caplog):
    cfg = convert_namespace_to_omegaconf(parse(*README.split()))
    assert cfg.distributed_training.ddp_backend == "legacy_ddp"  # of fully_sharded
    assert "(legacy_ddp); --zero-sharding os shards their optimizer statistics" in caplog.text
    sharded = convert_namespace_to_omegaconf(parse(*README.split(), "--zero-sharding", "os"))
    assert sharded.distributed_training.zero_sharding == "os"
    said = "(legacy_ddp); their optimizer statistics are sharded (--zero-sharding os)"
    assert said in caplog.text
    assert cfg.model._name == ARCH and cfg.model.moe_expert_count == 8
    assert cfg.common.memory_efficient_fp16 and cfg.model.checkpoint_activations
    assert cfg.optimizer.fp16_adam_stats and cfg.criterion.moe_gate_loss_wt == 0.01
    assert cfg.dataset.batch_size_valid == 1
    routing = moe_config(cfg.model, 8)
    assert (routing.top_k, routing.capacity_factor, routing.second_expert_policy) == (2, 1.0, "all")
    assert routing.eval_capacity_factor == 1.0  # fraction -1: the training formula
    assert routing.gating_fp32


@pytest.mark.parametrize(
    "words, want",
    [
        ("", {"top_k": 2, "capacity_factor": 1.0, "eval_capacity_factor": 0.0,
              "gating_fp32": True, "second_expert_policy": "sampling"}),
        ("--moe-gating-use-model-dtype", {"gating_fp32": False}),
        ("--moe-top1-expert", {"top_k": 1}),
        ("--moe-top1-expert --moe-top-k 1", {"top_k": 1}),
        ("--moe-top-k 4 --moe-capacity-factor 0", {"top_k": 4, "capacity_factor": 0.0}),
        ("--moe-eval-capacity-factor -2", {"eval_capacity_factor": -2.0}),
        ("--moe-eval-capacity-token-fraction 0.25", {"eval_capacity_token_fraction": 0.25}),
        # the 2021 meaning of <= 0: the training formula
        ("--moe-eval-capacity-token-fraction -1",
         {"eval_capacity_token_fraction": 0.0, "eval_capacity_factor": 1.0}),
        ("--moe-eval-capacity-token-fraction 0 --moe-capacity-factor 1.5",
         {"eval_capacity_token_fraction": 0.0, "eval_capacity_factor": 1.5}),
    ],
)  # fmt: skip
def test_two_vocabularies_for_capacity(words, want):
    routing = moe_config(config(*words.split()).model, 8)
    assert {name: getattr(routing, name) for name in want} == want


# words -> what the line holds (of numbers beyond their range: test_option_tables.py)
CONFLICTS = {
    "--moe-top1-expert --moe-top-k 2": "--moe-top1-expert | --moe-top-k 2",
    "--moe-eval-capacity-token-fraction 0.25 --moe-eval-capacity-factor 1":
    "--moe-eval-capacity-token-fraction 0.25 | --moe-eval-capacity-factor 1.0",
    "--moe-gating-use-fp32 --moe-gating-use-model-dtype":
    "--moe-gating-use-fp32 | --moe-gating-use-model-dtype",
    "--moe-force-load 3,1":
    "--moe-force-load 3,1 only measures speed: give --moe-benchmark force_load=3,1",
    "--moe-benchmark force_load=3,x": "force_load=3,x must be numbers",
    "--moe-benchmark force_load=1,ranks=2": "--moe-benchmark ranks=2: give KEY=VALUE of force_load",
    "--moe-benchmark skip_exchange=2": "--moe-benchmark skip_exchange=2: '2' is not true or false",
    "--moe-router-options noise=1": "noise=1: give KEY=VALUE of gate_noise, input_jitter",
    "--moe-router-options gate_noise": "--moe-router-options gate_noise: give KEY=VALUE",
    "--moe-router-options gate_noise=high": "gate_noise=high: 'high' is not a number",
    "--moe-router-options null_experts=1.5": "'1.5' is not a whole number",
    "--moe-router-options score_function=tanh": "choose one of softmax, sigmoid",
    "--moe-router-options gate_noise=-1": "--moe-gate-noise -1.0 must be at least 0",
    "--moe-tune-options steps=3": "--moe-tune-steps 3 needs --moe-exchange auto",
    "--moe-gate-noise 0.5 --moe-router-options gate_noise=0.1":
    "gate_noise=0.1 and --moe-gate-noise 0.5 contradict each other",
    "--moe-benchmark simulate_world_size=-1": "simulate_world_size=-1 must be at least 0",
    "--moe-benchmark simulate_world_size=8 --moe-simulate-world-size 4":
    "simulate_world_size=8 and --moe-simulate-world-size 4, its former name",
    "--moe-load-bias quantile":
    "--moe-load-bias quantile needs --moe-second-expert-policy all, not 'sampling'",
    "--moe-expert-placement sliced --moe-expert-parallel-size 2":
    "--moe-expert-placement sliced | --moe-expert-parallel-size 2",
    "--moe-parallelism-r 2": "--moe-parallelism-r 2 | --moe-expert-placement sliced",
    "--moe-overlap-degree 3": "--moe-overlap-degree 3 must be one of 1, 2, 4, 8, or auto",
    "--moe-parallelism-r x": "--moe-parallelism-r x must be a whole number, or auto",
    "--moe-parallelism-r -1": "--moe-parallelism-r -1 must be at least 0, or auto",
    "--moe-parallelism-r auto --dummy-a2a":
    "--moe-parallelism-r auto cannot be combined with --moe-benchmark skip_exchange=true",
    "--moe-overlap-degree auto --record-a2a-perf-stats":
    "--moe-overlap-degree auto cannot | record_exchange_time=true, which measures without overlap",
    "--moe-a2a 2dh --moe-exchange auto": "--moe-exchange auto and --moe-a2a 2dh, its former name",
    "--moe-overlap-degree auto --moe-benchmark simulate_world_size=8":
    "cannot be combined with --moe-benchmark simulate_world_size=8",
    "--moe-tune-file plans.json": "--moe-tune-file plans.json: nothing is tuned",
    "--moe-swiglu-bias": "--moe-swiglu-bias True is an option of another expert_network",
    "--base-layers 1": "--base-layers 1 cannot",
    "--scale-fc": "--scale-fc",
    "--character-embeddings": "--character-embeddings True cannot be combined with MoE layers",
}  # fmt: skip


@pytest.mark.parametrize("words", CONFLICTS)
def test_conflicts_end_the_program_before_anything_is_built(words):
    with pytest.raises(SystemExit) as caught:
        parse(*words.split())
    assert str(caught.value).startswith("error: ")
    for fragment in CONFLICTS[words].split(" | "):
        assert fragment in str(caught.value)


@pytest.mark.parametrize("former, present", [
    ("--moe-benchmark", ""),
    ("--moe-benchmark --moe-force-load 3,1", "force_load=3,1"),
    ("--moe-simulate-world-size 8", "simulate_world_size=8,skip_exchange=false"),
    # of Meta's branches
    ("--dummy-a2a --record-a2a-perf-stats", "skip_exchange=true,record_exchange_time=TRUE"),
])  # fmt: skip
def test_former_flags_of_measurements_are_keys_of_one(former, present):
    """Also as a config of an earlier commit has them: moe_benchmark: true."""
    both = [config(*former.split()).model, config("--moe-benchmark", present).model]
    if both[0].moe_benchmark:
        both[0].moe_benchmark = True
    known, want = (run_options(args, TransformerLMGPTMoEConfig) for args in both)
    assert known.benchmark == want.benchmark and known.routing == want.routing
    assert known.routing.force_load == ("3,1" if "3,1" in former else "")
    assert bool(present) == (want.benchmark != Benchmark())


@pytest.mark.parametrize(
    "former, present",
    [
        ("--moe-gate-noise 0.5 --moe-score-function sigmoid --moe-unnormalized-weights",
         "router-options gate_noise=0.5,score-function=sigmoid,unnormalized_weights=TRUE"),
        ("--moe-router cosine --moe-cosine-proj-dim 8 --moe-drop-policy random",
         "router cosine --moe-router-options cosine_proj_dim=8,drop_policy=random"),
        ("--moe-expert-network swiglu --moe-swiglu-bias --moe-gate-loss-scope global",
         "expert-network swiglu --moe-expert-network-options swiglu_bias=true "
         "--moe-gate-loss-options scope=global"),
        ("--moe-wire fp8 --moe-wire-back same --moe-exchange auto --moe-tune-file a,b.json",
         "wire fp8 --moe-wire-options back=same --moe-exchange auto "
         "--moe-tune-options file=a,b.json"),
        ("--moe-balance-ranks --moe-balance-min-rows 4",
         "balance-ranks --moe-balance-options min_rows=4"),
    ],
)  # fmt: skip
def test_options_of_bundles(former, present):
    both = [config(*words.split()).model for words in (former, f"--moe-{present}")]
    known, want = (run_options(args, TransformerLMGPTMoEConfig) for args in both)
    for part in ("routing", "exchange", "experts"):
        assert getattr(known, part) == getattr(want, part)
    assert {**both[0]} == {**both[1]}


# an option that has no effect without another one: some value, and what turns it on
PARENTS = {
    "moe_load_bias_rate": ("0.5", "--moe-load-bias sign --moe-second-expert-policy all"),
    "moe_top_groups": ("2", "--moe-num-expert-groups 2 --moe-second-expert-policy all"),
    "moe_group_score": ("max", "--moe-num-expert-groups 2 --moe-second-expert-policy all"),
    "moe_load_importance_loss": ("", "--moe-gate-noise 1"),
    "moe_activation_storage": ("fp8", "--moe-activation-memory lean"),
    "moe_shared_expert_gate": ("", "--moe-shared-expert-ffn-dim 8"),
    "moe_balance_tolerance": ("2", "--moe-balance-ranks"),
    "moe_balance_min_rows": ("2", "--moe-balance-ranks"),
    "moe_lora_alpha": ("4", "--moe-lora-rank 2"),
    "moe_tune_steps": ("3", "--moe-exchange auto"),
    "moe_tune_max_loss": ("0.5", "--moe-exchange auto"),
    "moe_trace_interval": ("2", "--moe-trace folder"),
    "moe_tune_file": ("x.json", "--moe-exchange auto"),
    "cmr_gate_loss_wt": ("0.1", "--moe-cmr"),
    "cmr_gate_loss_p": ("0.1", "--moe-cmr --cmr-gate-loss-wt 0.1"),
    "moe_cmr_xgpu": ("", "--moe-cmr --cmr-gate-loss-wt 0.1"),
    "cmr_gate_drop": ("0.1", "--moe-cmr"),
}
# These only say which value of another option they do not go with.
NOT_CHILDREN = {
    "moe_gating_use_fp32", "moe_expert_dtype", "moe_num_expert_groups", "moe_load_bias",
}  # fmt: skip
BESIDE_ANOTHER = r"with --moe|for an 'auto'|step of --|[Nn]eeds --moe|^> 0: --|^in training, --"


def test_the_table_has_all_options_that_need_another():
    own = help.every_option().values()
    frozen = [field for config in CONFIGS for field in dataclasses.fields(config)]
    stated = {flag_name(field) for field in frozen if field.metadata["needs"]}
    stated |= {field.name for field in own if field.metadata.get("needs")}
    told = {field.name for field in own if re.search(BESIDE_ANOTHER, field.metadata["help"])}
    assert PARENTS.keys() == stated | told - NOT_CHILDREN


@pytest.mark.parametrize("option", PARENTS)
def test_an_option_without_what_it_needs_is_refused(option):
    value, parent = PARENTS[option]
    flag = f"--{option.replace('_', '-')}"
    words = ["--moe-expert-count", "8", flag, *value.split()]
    given = {"arch": ARCH}
    if "cmr" in option:
        given, words = {"arch": "transformer_moe"}, ["--task", "translation", "data", *words]
    parse(*words, *parent.split(), **given)
    first = parent.split()[-2 if "wt" in parent else 0]
    with pytest.raises(SystemExit, match=f"^error: {flag}.* {first}| nothing is tuned"):
        parse(*words, **given)


@pytest.mark.parametrize("given", ["--decoder-layerdrop 0.1", "--decoder-layers-to-keep 0,1"])
def test_what_moves_layers_is_refused_with_experts(given):
    with pytest.raises(SystemExit, match=f"{given.split()[0]}.* with MoE layers"):
        config(*given.split())
    run_options(config(*given.split(), "--moe-freq", "0").model, TransformerLMGPTMoEConfig)


# name -> (layers, M, heads, experts, parameters in billions)
NAMED = {
    "4_1b": (24, 2048, 32, 8, 4.1), "142b": (32, 4096, 32, 64, 142), "15b": (12, 768, 12, 512, 15),
    "52b": (24, 1024, 16, 512, 52), "207b": (24, 2048, 32, 512, 207),
    "1_1t": (32, 4096, 32, 512, 1104),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_named_arch_has_its_documented_size(name):
    layers, dim, heads, experts, billions = NAMED[name]
    model = config("--dropout", "0.3", arch=f"{ARCH}_{name}").model
    sizes = (model.decoder_layers, model.decoder_embed_dim, model.decoder_ffn_embed_dim)
    assert sizes == (layers, dim, 4 * dim)
    assert (model.decoder_attention_heads, model.moe_expert_count) == (heads, experts)
    assert model.moe_freq == 2 and model.share_decoder_input_output_embed
    assert model.dropout == 0.3  # options win
    # weights and biases, with a vocabulary of 51200
    ffn, attention = 8 * dim**2 + 5 * dim, 4 * (dim**2 + dim) + 4 * dim
    of_experts = layers // 2 * experts * (ffn + dim)  # and their row of the gate
    total = 51200 * dim + layers * attention + layers // 2 * ffn + of_experts
    assert total / 1e9 == pytest.approx(billions, rel=0.03)
