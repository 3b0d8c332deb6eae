"""The command line: names, defaults and conflicts of the options, and the named sizes."""

import importlib

import pytest
from fairseq import checkpoint_utils, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import fairseq_tutel
from fairseq_tutel.criterions.moe_cross_entropy import MoECrossEntropyCriterionConfig
from fairseq_tutel.models import TransformerLMGPTMoEConfig
from fairseq_tutel.models.options import check_model_options
from fairseq_tutel.models.routing_options import moe_config

ARCH = "transformer_lm_gpt_moe"
CRITERION = "moe_cross_entropy"
# option -> (words, field, value then, default); those of fairseq's branch "moe" first
MODEL_OPTIONS = {
    "--moe-freq": (["3"], 3, 2),  # the branch's default is 0: dense
    "--moe-expert-count": (["64"], 64, 0),
    "--moe-gating-use-fp32": ([], True, None),
    "--moe-second-expert-policy": (["random"], "random", "sampling"),
    "--moe-normalize-gate-prob-before-dropping": ([], True, False),
    "--moe-expert-ffn-dim": (["96"], 96, None),
    "--moe-top1-expert": ([], True, False),
    "--moe-eval-capacity-token-fraction": (["0.25"], 0.25, None),
    "--moe-normalize-expert-grad": (["sqrt_world_size"], "sqrt_world_size", "world_size"),
    "--use-moe-pad-mask": ([], True, False),
    "--moe-batch-prioritized-routing": ([], True, False),
    "--record-a2a-perf-stats": ([], True, False),
    "--dummy-a2a": ([], True, False),
    "--alternate-decoder-ffn-embed-dim": (["512"], 512, 0),
    "--min-params-to-wrap": (["7"], 7, 10**8),
    "--use-stable-embedding": ([], True, False),
    "--num-workers-valid": (["3"], 3, 0),
    # new ones
    "--moe-top-k": (["4"], 4, None),
    "--moe-capacity-factor": (["-1.5"], -1.5, None),
    "--moe-eval-capacity-factor": (["2.0"], 2.0, None),
    "--moe-gating-use-model-dtype": ([], True, False),
    "--moe-router": (["cosine"], "cosine", "linear"),
    "--moe-cosine-proj-dim": (["64"], 64, 256),
    "--moe-cosine-init-temperature": (["0.25"], 0.25, 0.5),
    "--moe-gate-noise": (["0.5"], 0.5, 0.0),
    "--moe-input-jitter": (["0.01"], 0.01, 0.0),
    "--moe-input-dropout": (["0.1"], 0.1, 0.0),
    "--moe-z-loss-wt": (["0.001"], 0.001, 0.0),
    "--moe-gate-loss-scope": (["global"], "global", "rank"),
    "--moe-gate-loss-choices": (["all"], "all", "first"),
    "--moe-load-bias": (["quantile", "--moe-top-k", "1"], "quantile", "none"),
    "--moe-load-bias-rate": (["0.01"], 0.01, 0.001),
    "--moe-load-bias-entropy": (
        ["--moe-load-bias", "sign", "--moe-top-k", "1"],
        True,
        False,
    ),
    "--moe-overflow-rerouting": (["4"], 4, 0),
    "--moe-drop-policy": (["random"], "random", "position"),
    "--moe-score-function": (["sigmoid"], "sigmoid", "softmax"),
    "--moe-route-scale": (["2.5"], 2.5, 1.0),
    "--moe-overlap-degree": (["auto"], "auto", "1"),
    "--moe-tune-steps": (["9"], 9, 5),
    "--moe-tune-max-loss": (["0.1"], 0.1, 0.02),
    "--moe-tune-file": (["plans.json", "--moe-overlap-degree", "auto"], "plans.json", None),
    "--moe-expert-placement": (["sliced"], "sliced", "replicated"),
    "--moe-parallelism-r": (["0"], "0", "1"),
    "--moe-backend": (["torch"], "torch", "auto"),
    "--moe-wire": (["fp8"], "fp8", "same"),
    "--moe-wire-back": (["fp16"], "fp16", "auto"),
    "--moe-wire-grad": (["bf16"], "bf16", "auto"),
    "--moe-wire-compact": ([], True, False),
    "--moe-simulate-world-size": (["8"], 8, 0),
    "--moe-load-log-interval": (["10"], 10, 0),
}
CRITERION_OPTIONS = {
    "--moe-gate-loss-wt": (["0.01"], 0.01, 1.0),
    "--moe-gate-loss-combine-method": (["sum"], "sum", "average"),
    "--moe-gate-loss-transform": (["neg_log"], "neg_log", "none"),
    "--sentence-avg": ([], True, False),
}
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
    return convert_namespace_to_omegaconf(parse(*words, **kwargs))


@pytest.fixture(scope="module")
def default():
    return config()


# these exclude one of the others
ALONE = {
    "--moe-top1-expert",
    "--moe-eval-capacity-token-fraction",
    "--moe-gating-use-fp32",
    "--moe-load-bias",
    "--moe-load-bias-entropy",
    "--moe-drop-policy",
    "--moe-overlap-degree",
    "--moe-tune-file",
}


@pytest.fixture(scope="module")
def together():
    """All options on one command line, but for ALONE."""
    words = []
    for option, (values, *_) in {**MODEL_OPTIONS, **CRITERION_OPTIONS}.items():
        words += [] if option in ALONE else [option, *values]
    return config(*words)


def check(cfg_default, cfg_given, option, value, default_value):
    field = option.removeprefix("--").replace("-", "_")
    assert cfg_default[field] == default_value
    assert cfg_given[field] == value


@pytest.mark.parametrize("option", MODEL_OPTIONS)
def test_model_option_is_accepted_and_has_its_default(option, default, together):
    words, value, default_value = MODEL_OPTIONS[option]
    given = config(option, *words) if option in ALONE else together
    check(default.model, given.model, option, value, default_value)


@pytest.mark.parametrize("option", CRITERION_OPTIONS)
def test_criterion_option_is_accepted_and_has_its_default(option, default, together):
    _, value, default_value = CRITERION_OPTIONS[option]
    check(default.criterion, together.criterion, option, value, default_value)


def test_default_sizes_are_those_of_transformer_lm_gpt(default):
    model = default.model
    sizes = (
        model.decoder_embed_dim,
        model.decoder_ffn_embed_dim,
        model.decoder_layers,
        model.decoder_attention_heads,
        model.dropout,
        model.attention_dropout,
    )
    assert sizes == (768, 3072, 12, 12, 0.1, 0.1) and str(model.activation_fn) == "gelu"


def test_every_option_has_a_help_text():
    for dataclass, own in (
        (TransformerLMGPTMoEConfig, MODEL_OPTIONS),
        (MoECrossEntropyCriterionConfig, CRITERION_OPTIONS),
    ):
        for option in own:
            field = option.removeprefix("--").replace("-", "_")
            own_field = dataclass.__dataclass_fields__[field]
            assert own_field.metadata.get("help") or "optimization." in own_field.default, option


def test_published_command_parses():
    cfg = config(*README.split())
    assert cfg.distributed_training.ddp_backend == "legacy_ddp"  # of fully_sharded
    assert cfg.model._name == ARCH and cfg.model.moe_expert_count == 8
    assert cfg.common.memory_efficient_fp16 and cfg.model.checkpoint_activations
    assert cfg.optimizer.fp16_adam_stats and cfg.criterion.moe_gate_loss_wt == 0.01
    assert cfg.dataset.batch_size_valid == 1
    routing = moe_config(cfg.model, 8)
    assert (routing.top_k, routing.capacity_factor, routing.second_expert_policy) == (2, 1.0, "all")
    assert routing.eval_capacity_factor == 1.0  # fraction -1: the training formula
    assert routing.gating_fp32


def test_without_options_evaluation_drops_nothing_and_the_gate_is_fp32(default):
    routing = moe_config(default.model, 8)
    assert routing.capacity(100, training=False) is None
    assert routing.gating_fp32 and routing.second_expert_policy == "sampling"
    assert not moe_config(config("--moe-gating-use-model-dtype").model, 8).gating_fp32


@pytest.mark.parametrize(
    "words, names",
    [
        ("--moe-top1-expert --moe-top-k 2", ("--moe-top1-expert", "--moe-top-k 2")),
        (
            "--moe-eval-capacity-token-fraction 0.25 --moe-eval-capacity-factor 1",
            ("--moe-eval-capacity-token-fraction 0.25", "--moe-eval-capacity-factor 1.0"),
        ),
        (
            "--moe-gating-use-fp32 --moe-gating-use-model-dtype",
            ("--moe-gating-use-fp32", "--moe-gating-use-model-dtype"),
        ),
        ("--moe-expert-count 2 --moe-top-k 4", ("top_k=4", "2")),
        (
            "--moe-expert-placement sliced --moe-expert-parallel-size 2",
            ("--moe-expert-placement sliced", "--moe-expert-parallel-size 2"),
        ),
        (
            "--moe-parallelism-r 2",
            ("--moe-parallelism-r 2", "--moe-expert-placement replicated"),
        ),
        ("--moe-freq 7 --decoder-layers 4", ("--moe-freq 7", "4 layers")),
        ("--moe-freq -1", ("--moe-freq -1",)),
        ("--moe-expert-count -8", ("--moe-expert-count -8",)),
        ("--decoder-attention-heads 5", ("--decoder-attention-heads 5", "768")),
        ("--moe-capacity-factor nan", ("--moe-capacity-factor nan must be a finite number",)),
        ("--moe-input-jitter 1.5", ("--moe-input-jitter 1.5 must be at least 0 and below 1",)),
        ("--moe-load-importance-loss", ("gate_noise=0.0",)),
        ("--moe-overlap-degree 3", ("--moe-overlap-degree 3 must be one of 1, 2, 4, 8, or auto",)),
        ("--moe-parallelism-r x", ("--moe-parallelism-r x must be a whole number, or auto",)),
        ("--moe-parallelism-r -1", ("--moe-parallelism-r -1 must be at least 0, or auto",)),
        (
            "--moe-parallelism-r auto --dummy-a2a",
            ("--moe-parallelism-r auto cannot be combined with --dummy-a2a",),
        ),
        (
            "--moe-overlap-degree auto --record-a2a-perf-stats",
            ("--moe-overlap-degree auto cannot", "--record-a2a-perf-stats"),
        ),
        ("--moe-overlap-degree auto --dummy-a2a", ("cannot be combined with --dummy-a2a",)),
        (
            "--moe-overlap-degree auto --moe-simulate-world-size 8",
            ("cannot be combined with --moe-simulate-world-size 8",),
        ),
        ("--moe-tune-file plans.json", ("--moe-tune-file plans.json: nothing is tuned",)),
        ("--base-layers 1", ("BASE layers",)),
        ("--scale-fc", ("--scale-fc",)),
    ],
)
def test_conflicts_end_the_program_before_anything_is_built(words, names):
    with pytest.raises(SystemExit) as caught:
        parse(*words.split())
    assert str(caught.value).startswith("error: ")
    for name in names:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "option, value",
    [
        ("--moe-second-expert-policy", "best"),
        ("--moe-normalize-expert-grad", "none"),
        ("--moe-router", "hash"),
        ("--moe-backend", "cuda"),
        ("--moe-gate-loss-combine-method", "max"),
    ],
)
def test_unknown_choices_are_refused_by_the_parser(option, value, capsys):
    with pytest.raises(SystemExit):
        parse(option, value)
    assert option in capsys.readouterr().err


@pytest.mark.parametrize(
    "option, value", [("--decoder-layerdrop", "0.1"), ("--decoder-layers-to-keep", "0,1")]
)
def test_what_moves_layers_is_refused_with_experts(option, value):
    with pytest.raises(SystemExit, match=f"{option}.* with MoE layers"):
        config(option, value)
    check_model_options(config(option, value, "--moe-freq", "0").model)


# name -> (layers, M, heads, experts, parameters in billions)
NAMED = {
    "4_1b": (24, 2048, 32, 8, 4.1),
    "142b": (32, 4096, 32, 64, 142),
    "15b": (12, 768, 12, 512, 15),
    "52b": (24, 1024, 16, 512, 52),
    "207b": (24, 2048, 32, 512, 207),
    "1_1t": (32, 4096, 32, 512, 1104),
}


def count_parameters(model):
    """Weights and biases of a GPT with MoE layers and a vocabulary of 51200, in billions."""
    M, F, layers = model.decoder_embed_dim, model.decoder_ffn_embed_dim, model.decoder_layers
    sparse = layers // model.moe_freq
    ffn = 2 * M * F + M + F
    attention = 4 * (M * M + M) + 4 * M
    experts = sparse * model.moe_expert_count
    total = 51200 * M + layers * attention + (layers - sparse + experts) * ffn + experts * M
    return total / 1e9


@pytest.mark.parametrize("name", NAMED)
def test_named_arch_has_its_documented_size(name):
    layers, dim, heads, experts, billions = NAMED[name]
    model = config(arch=f"{ARCH}_{name}").model
    assert (model.decoder_layers, model.decoder_embed_dim, model.decoder_ffn_embed_dim) == (
        layers,
        dim,
        4 * dim,
    )
    assert (model.decoder_attention_heads, model.moe_expert_count) == (heads, experts)
    assert model.moe_freq == 2 and model.share_decoder_input_output_embed
    assert count_parameters(model) == pytest.approx(billions, rel=0.03)


def test_options_win_over_a_named_arch():
    model = config("--decoder-layers", "6", "--moe-expert-count", "16", arch=f"{ARCH}_15b").model
    assert (model.decoder_layers, model.moe_expert_count, model.decoder_embed_dim) == (6, 16, 768)


def test_registration_is_idempotent():
    before = checkpoint_utils.save_checkpoint
    importlib.reload(fairseq_tutel.hosts.fairseq)
    assert checkpoint_utils.save_checkpoint is before
