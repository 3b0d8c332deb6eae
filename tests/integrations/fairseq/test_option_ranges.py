"""Every number on a command line or in a Hydra config against the one table of ranges."""

import math
import re
from argparse import Namespace

import pytest
from fairseq.models import ARCH_CONFIG_REGISTRY
from helpers.training import make_config

from fairseq_tutel.config import EXPERTS, ROUTERS
from fairseq_tutel.integrations.fairseq.criterions.moe_cross_entropy import (
    MoECrossEntropyCriterion,
    MoECrossEntropyCriterionConfig,
)
from fairseq_tutel.integrations.fairseq.models import TransformerLMGPTMoE, TransformerLMGPTMoEConfig
from fairseq_tutel.integrations.fairseq.options import help


def ranges_of(options):
    stated = ((f.name, f.metadata.get("range")) for f in options.__dataclass_fields__.values())
    return {name: allowed for name, allowed in stated if allowed is not None}


MODEL = ranges_of(TransformerLMGPTMoEConfig)
CRITERION = ranges_of(MoECrossEntropyCriterionConfig)


def beyond(allowed):
    """A number that is not in a range (others: test_ranges.py)."""
    ends = (int(end) for end in (allowed.low - 1, allowed.high + 1) if math.isfinite(end))
    return next(ends, math.nan)


@pytest.fixture(scope="module")
def cfg():
    return make_config("--moe-expert-count", "4")


def refused(name, value):
    """Match for the one line about an option and its value, spelled as on a command line."""
    return f"^(error: )?{re.escape('--' + name.replace('_', '-'))} .*{value}.* must be "


@pytest.mark.parametrize("name", MODEL)
def test_the_models_options(cfg, name):
    default, value = cfg.model[name], beyond(MODEL[name])
    with pytest.raises(SystemExit, match=refused(name, value)):
        ARCH_CONFIG_REGISTRY["transformer_lm_gpt_moe"](Namespace(**{name: value}))
    cfg.model[name] = value
    with pytest.raises(ValueError, match=refused(name, value)):
        TransformerLMGPTMoE.build_model(cfg.model, None)
    cfg.model[name] = default


@pytest.mark.parametrize("name", CRITERION)
def test_the_criterions_options(name):
    value = beyond(CRITERION[name])
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
