"""--moe-preset: a command, a config file and Python, with and without options beside it."""

from typing import Any

import pytest
from helpers import training
from helpers.training import make_config, make_trainer
from omegaconf import OmegaConf

from fairseq_tutel.integrations.fairseq.options.options import moe_config
from fairseq_tutel.integrations.fairseq.trainer import trainer
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.plan.compose import load_config

EXPERTS = 8
# preset, options beside it -> policy, capacity factor, load bias
ROUTING = {
    (None, ""): ("sampling", 1.0, "none"),
    ("meta", ""): ("sampling", 1.0, "none"),
    ("meta", "second_expert_policy=all load_bias=sign"): ("all", 1.0, "sign"),
    ("balanced", "second_expert_policy=sampling"): ("sampling", 0.0, "none"),
    ("balanced", "second_expert_policy=sampling top_k=1"): ("sampling", 0.0, "quantile"),
    ("balanced", ""): ("all", 0.0, "quantile"),
    ("balanced", "capacity_factor=1.0 load_bias=none"): ("all", 1.0, "none"),
    ("balanced", "capacity_factor=1.25 load_bias=sign"): ("all", 1.25, "sign"),
    ("balanced", "top_k=8"): ("all", 0.0, "none"),  # a token takes all experts
    ("balanced", "top_k=8 null_experts=1"): ("all", 0.0, "quantile"),
}


def found(routing):
    return routing.second_expert_policy, routing.capacity_factor, routing.load_bias


@pytest.mark.parametrize("preset, others", ROUTING, ids=str)
def test_given_options_win_over_the_preset(preset, others, tmp_path):
    want = ROUTING[preset, others]
    given = dict(word.split("=") for word in others.split())
    words = [] if preset is None else ["--moe-preset", preset]
    for name, value in given.items():
        words += [f"--moe-{name.replace('_', '-')}", value]
    arch = ("--arch", "transformer_lm_gpt_moe", "--moe-expert-count", "8")
    assert found(moe_config(make_config(*arch, *words, moe=False).model, EXPERTS)) == want

    values: Any = {
        n: float(v) if "." in v else int(v) if v.isdigit() else v for n, v in given.items()
    }
    model = {f"moe_{name}": value for name, value in values.items()}
    model |= {"_name": "transformer_lm_gpt_moe", "moe_expert_count": EXPERTS}
    model |= {} if preset is None else {"moe_preset": preset}
    OmegaConf.save({"model": model}, tmp_path / "own.yaml")
    others = ["+task._name=dummy_lm", "+criterion._name=moe_cross_entropy"]
    assert found(moe_config(load_config(tmp_path, "own", others).model, EXPERTS)) == want

    if preset is not None:
        assert found(MoELayer(16, EXPERTS, preset=preset, **values).config) == want


def test_wrong_presets_are_refused():
    with pytest.raises(ValueError, match="preset='even' is unknown; choose one of meta, balanced"):
        MoELayer(16, EXPERTS, preset="even")
    layer = MoELayer(16, EXPERTS)
    with pytest.raises(ValueError, match="given beside it: .*'preset': 'meta'"):
        MoELayer(16, config=layer.config, preset="meta")


# options -> preset and weight of the gate loss in training
WEIGHTS = {
    "": ("meta", 1.0),
    "--moe-gate-loss-wt 0.5": ("meta", 0.5),
    "--moe-preset balanced": ("balanced", 0.001),
    "--moe-preset balanced --moe-gate-loss-wt 1.0": ("balanced", 1.0),
    "--moe-preset balanced --criterion moe_label_smoothed_cross_entropy": ("balanced", 0.001),
    "--criterion moe_label_smoothed_cross_entropy": ("meta", 0.0),
    "--arch transformer_lm_moe --criterion cross_entropy": ("meta", 0.01),
}


@pytest.mark.parametrize("words", WEIGHTS, ids=str)
def test_the_log_and_the_checkpoint_say_what_the_preset_set(words, monkeypatch):
    preset, weight = WEIGHTS[words]
    said = []
    monkeypatch.setattr(trainer.logger, "info", said.append)
    monkeypatch.setattr(training, "TINY", training.TINY.replace("--moe-gate-loss-wt 0.1", ""))
    words = "--arch transformer_lm_gpt_moe --moe-expert-count 4 " + words
    made: Any = make_trainer(make_config(*words.split(), moe=False))
    (line,) = [line for line in said if "--moe-preset" in line]
    policy, capacity, bias = ROUTING[preset, ""]
    assert line == (
        f"--moe-preset {preset}: --moe-second-expert-policy {policy} "
        f"--moe-capacity-factor {capacity} --moe-load-bias {bias} --moe-gate-loss-wt {weight}"
    )
    own = made._gate_loss or made.criterion
    assert own.gate_loss_weight == weight
    section = made.cfg.model if made._gate_loss else made.cfg.criterion
    model = made.cfg.model
    assert section.moe_gate_loss_wt == weight and str(model.moe_second_expert_policy) == policy
    assert model.moe_capacity_factor == capacity and str(model.moe_load_bias) == bias
