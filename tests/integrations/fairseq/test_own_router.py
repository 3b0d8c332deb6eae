"""A router that a user's file registers: in a layer alone, and in fairseq with its own options."""

import argparse
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from fairseq import models, options, utils
from helpers.commands import run
from helpers.distributed import run_ranks
from helpers.sets import member
from helpers.training import make_batch, make_config, make_trainer, save

from fairseq_tutel.command_line import CONFIGS
from fairseq_tutel.config import ROUTERS
from fairseq_tutel.distributed import register_exchange
from fairseq_tutel.distributed.exchanges import LinearExchange
from fairseq_tutel.integrations.fairseq.models import ARCHITECTURES
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.moe.routers import base
from fairseq_tutel.plan.compose import load_config
from fairseq_tutel.plan.parameters import count_parameters
from fairseq_tutel.plan.settings import read_settings

HELPERS = Path(__file__).parents[2] / "helpers"
TOY = "--moe-expert-count 4 --moe-top-k 2 --moe-router toy --moe-toy-rate 0.25"
KEY = "decoder.layers.1.moe_layer.gate.load_bias"

# the file is imported before anything of fairseq is; then fairseq registers the package
ALONE = """
import sys, torch
import toy_plugin
from fairseq_tutel.moe import MoELayer
torch.manual_seed(0)
layer = MoELayer(8, 4, 16, router="toy", router_options={"rate": 0.5}, capacity_factor=0.0)
x = torch.randn(30, 8)
with torch.no_grad():
    layer.gate.load_bias.copy_(torch.tensor([9.0, 0.0, -9.0, 0.0]))
y, aux = layer(x, return_aux=True)
assert aux.load_E[0] == 30 and aux.load_E[2] == 0, aux.load_E
moved = layer.gate.load_bias - torch.tensor([9.0, 0.0, -9.0, 0.0])
assert moved.tolist() == (0.5 * (15 - aux.load_E.float()).sign()).tolist()

layer.half()
assert layer.gate.load_bias.dtype == torch.float32 and layer.gate.wg.weight.dtype == torch.float16
assert not {"fairseq", "hydra"} & {name.split(".")[0] for name in sys.modules}

import fairseq_tutel
fairseq_tutel.register()
from fairseq_tutel.integrations.fairseq.models import TransformerLMGPTMoEConfig
assert TransformerLMGPTMoEConfig(moe_toy_rate=0.75).moe_toy_rate == 0.75
"""


def test_alone_and_registered_before_fairseq_is_imported():
    run([sys.executable, "-c", ALONE], cwd=HELPERS)


def _documented_example(folder):
    """The router in the documentation of the room, imported as the error about a name says."""
    text = base.__doc__.split("::\n", 1)[1].split("\nThat is all")[0]
    user_dir = Path(folder) / "my_plugin"
    user_dir.mkdir()
    (user_dir / "my_router.py").write_text(textwrap.dedent(text))
    lines = re.findall("`(.*?)`", ROUTERS.how_to_add())
    assert len(lines) == 3
    (user_dir / "__init__.py").write_text("\n".join(lines))
    utils.import_user_module(argparse.Namespace(user_dir=str(user_dir)))
    MoELayer(8, 4, 16, router="mine", router_options={"scale": 2.0})(torch.randn(12, 8))
    cfg = make_config("--moe-router", "mine", "--moe-mine-scale", "0.5")
    assert cfg.model.moe_mine_scale == 0.5


def _in_fairseq(folder):
    """In a process of its own: the names that it adds stay."""
    before = make_config("--moe-expert-count", "4")  # the schema exists already
    utils.import_user_module(argparse.Namespace(user_dir=str(HELPERS / "toy_plugin")))
    assert list(ROUTERS) == ["cosine", "linear", "toy"]
    assert not hasattr(before.model, "moe_toy_rate")
    for name, schema in models.MODEL_DATACLASS_REGISTRY.items():
        assert not name.endswith("_moe") or "moe_toy_rate" in schema.__dataclass_fields__, name
    for arch in ("transformer_lm_big_moe", "transformer_align_moe"):  # with a dataclass and without
        assert make_config(*TOY.split(), "--arch", arch).model.moe_toy_rate == 0.25

    cfg = make_config(*TOY.split(), "--memory-efficient-bf16", "--bf16")
    assert (cfg.model.moe_toy_rate, str(cfg.model.moe_toy_score)) == (0.25, "sigmoid")
    trainer = make_trainer(cfg)
    router = trainer.get_model().moe_layers[1].gate
    assert type(router).__name__ == "ToyRouter" and router.options.rate == 0.25
    assert router.wg.weight.dtype == torch.bfloat16 and router.load_bias.dtype == torch.float32
    for seed in (1, 2, 3):
        trainer.train_step([make_batch(seed)])
    # not zero, and not what rounding to bf16 would leave
    with torch.no_grad():
        router.load_bias += 2.0**-20
    bias, path = router.load_bias.clone(), f"{folder}/x.pt"
    assert bias.abs().max() >= 0.25
    save(trainer, path)
    shared = torch.load(member(path, "shared"), weights_only=False)
    assert torch.equal(shared["model"][KEY], bias)
    resumed = make_trainer(cfg)
    resumed.load_checkpoint(path)
    layer = resumed.get_model().moe_layers[1]
    assert torch.equal(layer.gate.load_bias, bias)
    # a checkpoint from before the buffer, and one with a parameter missing
    state = {k: v for k, v in layer.state_dict().items() if k != "gate.load_bias"}
    layer.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key.*gate.wg.weight"):
        layer.load_state_dict({k: v for k, v in state.items() if k != "gate.wg.weight"})

    for words, said in (
        ("--moe-router nope", "^2$"),
        ("--moe-router toy --moe-toy-rate 1.5",
         "^error: router toy: rate=1.5 must be at least 0 and at most 1$"),
        ("--moe-toy-rate 0.5", "^error: --moe-toy-rate 0.5"),
        ("--moe-router toy --moe-cosine-proj-dim 8", "^error: --moe-cosine-proj-dim 8"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match=said):
            make_config(*words.split())
    plans = [
        count_parameters(read_settings(load_config(CONFIGS, "tiny_cpu", words), "x"))
        for words in ((), ("+model.moe_router=toy", "+model.moe_toy_rate=0.5"))
    ]
    assert plans[0] == plans[1]  # the buffer is no parameter
    _documented_example(folder)

    # an exchange of a user's own becomes a choice in the same way
    register_exchange("toy-a2a")(type("Toy", (LinearExchange,), {"__doc__": "A toy's way."}))
    assert str(make_config("--moe-exchange", "toy-a2a").model.moe_exchange) == "toy-a2a"
    field = ARCHITECTURES["transformer_lm_gpt_moe"].schema.__dataclass_fields__["moe_exchange"]
    assert "; 'toy-a2a': A toy's way; 'auto': " in field.metadata["help"]
    parser = options.get_training_parser()
    options.parse_args_and_arch(parser, ["--task", "dummy_lm", "--arch", "transformer_lm_gpt_moe"])
    help_text = " ".join(parser.format_help().split())
    for words in ("'toy': sigmoid scores, chosen with a bias against the load", "--moe-toy-rate",
                  "how far the bias moves in one call", "{sigmoid,tanh}"):  # fmt: skip
        assert words in help_text, words


def test_in_fairseq_registered_by_a_user_dir(tmp_path):
    run_ranks(_in_fairseq, 1, str(tmp_path))
