"""Tables of options on a command line: ranges of numbers, flags of Meta's branches."""

import math
import re
from argparse import Namespace

import pytest
from fairseq import options
from fairseq.models import ARCH_CONFIG_REGISTRY
from helpers.training import make_config

from fairseq_tutel.config import EXPERTS, ROUTERS
from fairseq_tutel.integrations.fairseq.criterions.moe_cross_entropy import (
    MoECrossEntropyCriterion,
    MoECrossEntropyCriterionConfig,
)
from fairseq_tutel.integrations.fairseq.models import TransformerLMGPTMoE, TransformerLMGPTMoEConfig
from fairseq_tutel.integrations.fairseq.options import help
from fairseq_tutel.integrations.fairseq.options.command_line import (
    ACCEPTED,
    ACCEPTED_IN_EVALUATION,
    REFUSED,
    REFUSED_BY_LANGUAGE_MODELS,
)


def beyond(options):
    """By option a number that is not in its range (others: test_ranges.py)."""
    stated = {f.name: f.metadata.get("range") for f in options.__dataclass_fields__.values()}
    for name, allowed in stated.items():
        if allowed is not None:
            ends = (int(end) for end in (allowed.low - 1, allowed.high + 1) if math.isfinite(end))
            yield name, next(ends, math.nan)


def refused(name, value):
    """Match for the one line about an option and its value, spelled as on a command line."""
    return f"^(error: )?{re.escape('--' + name.replace('_', '-'))} .*{value}.* must be "


@pytest.fixture(scope="module")
def cfg():
    return make_config("--moe-expert-count", "4")


@pytest.mark.parametrize("name, value", [*beyond(TransformerLMGPTMoEConfig)])
def test_ranges_of_the_models_options(cfg, name, value):
    default = cfg.model[name]
    with pytest.raises(SystemExit, match=refused(name, value)):
        ARCH_CONFIG_REGISTRY["transformer_lm_gpt_moe"](Namespace(**{name: value}))
    cfg.model[name] = value
    with pytest.raises(ValueError, match=refused(name, value)):
        TransformerLMGPTMoE.build_model(cfg.model, None)
    cfg.model[name] = default


@pytest.mark.parametrize("name, value", [*beyond(MoECrossEntropyCriterionConfig)])
def test_ranges_of_the_criterions_options(name, value):
    with pytest.raises(ValueError, match=refused(name, value)):
        MoECrossEntropyCriterion(None, False, **{name: value})


def test_every_number_of_our_own_has_a_range_that_holds_its_default():
    registered = {*ROUTERS.flags(), *EXPERTS.flags()}
    for field in help.every_option().values():
        if field.name in registered or not re.search(r"\b(int|float)\b", str(field.type)):
            continue  # a registry checks the options of what is registered
        allowed = field.metadata["range"]
        assert allowed is not None, f"{field.name} states no range"
        assert field.default is None or field.default in allowed, field.name


def parse(*words, rank="0"):
    base = "--task dummy_lm --arch transformer_lm_gpt_moe --criterion moe_cross_entropy"
    given = [*base.split(), "--distributed-rank", rank, *words]
    return options.parse_args_and_arch(options.get_training_parser(), input_args=given)


@pytest.mark.parametrize("entry, reason", (REFUSED | REFUSED_BY_LANGUAGE_MODELS).items())
def test_a_flag_that_would_change_the_result_is_refused_with_its_line(entry, reason, capsys):
    with pytest.raises(SystemExit):
        parse(*entry.split())
    assert f"{entry.split()[0]} of Meta's branches: {reason}" in capsys.readouterr().err


def test_accepted_flags_have_their_lines_on_the_first_rank_and_leave_no_trace(caplog):
    words = [word for entry in ACCEPTED for word in entry.split()]
    with caplog.at_level("WARNING", "fairseq_tutel"):
        parse(*words, rank="1")
        assert not caplog.messages
        args = parse(*words)
    lines = [
        f"{e.split()[0]} of Meta's branches has no effect: {why}" for e, why in ACCEPTED.items()
    ]
    assert sorted(caplog.messages) == sorted(lines)
    assert vars(args) == vars(parse())
    args = options.get_eval_lm_parser().parse_args(["--path", "x.pt", *ACCEPTED_IN_EVALUATION])
    assert args.is_moe is args.moe_generation is True


@pytest.mark.parametrize("entry", REFUSED_BY_LANGUAGE_MODELS)
def test_the_encoder_decoder_takes_what_language_models_refuse(entry):
    flag, *value = entry.split()
    routing = ["--moe-cmr"] if flag.startswith("--cmr") else []
    given = [flag, *("0.5" if v == "P" else "2" for v in value)]
    args = parse("--arch", "transformer_moe", *routing, *given)
    assert float(getattr(args, _name(entry))) == {"": 1, "N": 2, "P": 0.5}["".join(value)]


def _name(entry):
    return entry.split()[0].lstrip("-").replace("-", "_")
