"""Every number on a command line or in a Hydra config against the one table of ranges."""

import copy
import math
import re

import pytest
from fairseq import options
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import ValidationError

from fairseq_tutel.config import ROUTERS
from fairseq_tutel.criterions.moe_cross_entropy import (
    MoECrossEntropyCriterion,
    MoECrossEntropyCriterionConfig,
)
from fairseq_tutel.hosts.fairseq.trainer import _prepare_config
from fairseq_tutel.models import TransformerLMGPTMoE, TransformerLMGPTMoEConfig
from fairseq_tutel.models.options import apply_command_line_rules
from fairseq_tutel.models.stock_ranges import STOCK_RANGES
from fairseq_tutel.ranges import ranges_of

MODEL = ranges_of(TransformerLMGPTMoEConfig)
CRITERION = ranges_of(MoECrossEntropyCriterionConfig)
STOCK = [(group, name) for group, ranges in STOCK_RANGES.items() for name in ranges]
COMMAND = """
    --task dummy_lm --arch transformer_lm_gpt_moe --criterion moe_cross_entropy --optimizer adam
    --lr-scheduler inverse_sqrt --moe-expert-count 4 --batch-size 2 --max-tokens 64
"""


def bad_numbers(allowed):
    """Not finite, and beyond each end of a range."""
    ends = [allowed.low - 1, allowed.high + 1]
    ends += [end for end, is_open in ((allowed.low, allowed.low_open),
                                      (allowed.high, allowed.high_open)) if is_open]  # fmt: skip
    beyond = [int(end) for end in ends if math.isfinite(end)]
    return [math.nan, math.inf, -math.inf, *beyond]


@pytest.fixture(scope="module")
def args():
    return options.parse_args_and_arch(options.get_training_parser(), COMMAND.split())


@pytest.fixture(scope="module")
def cfg(args):
    return convert_namespace_to_omegaconf(args)


def refused(name, value):
    """Match for the one line about an option and its value, spelled as on a command line."""
    return f"^(error: )?{re.escape('--' + name.replace('_', '-'))} .*{value}.* must be "


def assert_refused_in_config(cfg, group, name, value, start):
    cfg = copy.deepcopy(cfg)
    try:
        with open_dict(cfg):
            section = cfg[group]
            is_list = OmegaConf.is_list(section.get(name))
            section[name] = [value] if is_list else value
    except ValidationError:
        return  # not even Hydra takes it, as nan for a whole number
    with pytest.raises(ValueError, match=refused(name, value)):
        start(cfg)


@pytest.mark.parametrize("name", MODEL)
def test_the_models_options(args, cfg, name):
    for value in bad_numbers(MODEL[name]):
        given = copy.copy(args)
        setattr(given, name, value)
        with pytest.raises(SystemExit, match=refused(name, value)):
            apply_command_line_rules(given)
        assert_refused_in_config(
            cfg, "model", name, value, lambda c: TransformerLMGPTMoE.build_model(c.model, None)
        )


@pytest.mark.parametrize("name", CRITERION)
def test_the_criterions_options(name):
    for value in bad_numbers(CRITERION[name]):
        with pytest.raises(ValueError, match=refused(name, value)):
            MoECrossEntropyCriterion(None, False, **{name: value})


@pytest.mark.parametrize("group, name", STOCK)
def test_stock_options_with_experts(args, cfg, group, name):
    for value in bad_numbers(STOCK_RANGES[group][name]):
        given = copy.copy(args)
        setattr(given, name, f"(0.9, {value})" if name == "adam_betas" else [value])
        with pytest.raises(SystemExit, match=refused(name, value)):
            apply_command_line_rules(given)
        assert_refused_in_config(cfg, group, name, value, lambda c: _prepare_config(c, None))


def test_a_dense_model_of_stock_fairseq_is_left_alone():
    words = COMMAND.replace("gpt_moe", "gpt").replace("moe_cross", "cross").split()
    words = [w for w in words if w not in ("--moe-expert-count", "4")] + ["--weight-decay", "-1"]
    options.parse_args_and_arch(options.get_training_parser(), words)


def test_the_stock_options_exist(cfg):
    """A name of the table that fairseq no longer has would check nothing."""
    assert not [(group, name) for group, name in STOCK if name not in cfg[group]]


def test_every_number_among_fairseqs_general_options_has_a_range_that_holds_its_default():
    general = FairseqConfig.__dataclass_fields__
    missing = []
    for group in set(STOCK_RANGES) & set(general):
        options = general[group].type
        for name, option in getattr(options, "__dataclass_fields__", {}).items():
            if name.endswith("_mt") or not re.search(r"\b(int|float)\b", str(option.type)):
                continue  # of speech to speech
            allowed = STOCK_RANGES[group].get(name)
            if allowed is None:
                missing.append(f"{group}.{name}")
            elif isinstance(option.default, (int, float)):
                assert option.default in allowed, name
    assert missing == []


@pytest.mark.parametrize("config", [TransformerLMGPTMoEConfig, MoECrossEntropyCriterionConfig])
def test_every_number_of_our_own_has_a_range_that_holds_its_default(config):
    ranges = ranges_of(config)
    for name, kind in config.__annotations__.items():
        if name in ROUTERS.all_flags() or not re.search(r"\b(int|float)\b", str(kind)):
            continue  # a registry checks the options of what is registered
        assert name in ranges, f"{name} states no range"
        default = config.__dataclass_fields__[name].default
        assert default is None or default in ranges[name], name
