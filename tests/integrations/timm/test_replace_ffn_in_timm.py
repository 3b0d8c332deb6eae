"""``replace_ffn`` on models of timm: the same outputs, and what is refused."""

import re

import pytest
import torch
from helpers.commands import ROOT
from helpers.replaced import check_that_copies_change_nothing
from helpers.vision import import_timm

from fairseq_tutel.moe import MoELayer, replace_ffn

pytestmark = pytest.mark.extras

SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 32}
PLAIN = {**SIZES, "depth": 4, "num_heads": 4}
SWIN = {
    **SIZES, "depths": (2, 4), "num_heads": (2, 4), "window_size": 2, "drop_path_rate": 0.0,
}  # fmt: skip
CONV = {"depths": (1, 1, 2, 2), "dims": (8, 8, 16, 16), "ls_init_value": 1.0}
# name, options, blocks by name
MODELS = {
    "vit": ("vit_tiny_patch16_224", PLAIN, r"\.mlp$"),
    "deit": ("deit_tiny_distilled_patch16_224", PLAIN, r"\.mlp$"),
    "beit": ("beit_base_patch16_224", PLAIN, r"\.mlp$"),
    "swinv2": ("swinv2_tiny_window8_256", SWIN, r"layers\.1\.blocks\.\d+\.mlp$"),
    "mixer": ("MlpMixer", {**SIZES, "num_blocks": 4}, r"\.mlp_channels$"),
    "convnext": ("convnext_tiny", CONV, r"stages\.[23]\.blocks\.\d+\.mlp$"),
}
REFUSED = {
    "1x1 convolutions": ("convnext_tiny", {**CONV, "conv_mlp": True}, "fc1 is a convolution"),
    "norm over tokens": ("convnextv2_tiny", {}, r"GlobalResponseNormMlp\) is no \[\.\.\., M\]"),
    "depthwise convolution": ("pvt_v2_b0", {}, "dwconv is a convolution"),
}


def make(name):
    """A model with 5 classes, whose blocks show in its output, and its blocks by name."""
    timm = import_timm()
    kind, options, match = MODELS[name]
    torch.manual_seed(0)
    if name == "mixer":  # its entry has a fixed patch
        model = timm.models.mlp_mixer.MlpMixer(num_classes=5, **options)
    else:
        model = timm.create_model(kind, num_classes=5, **options)
    with torch.no_grad():
        for key, param in model.named_parameters():
            if param.dim() == 2:
                param.normal_(0, 0.15)
            elif "gamma" in key or re.search(r"norm\d*\.weight$", key):
                param.fill_(1.0)  # SwinV2's start at 0, BEiT's at 0.1
    return model, match


@pytest.mark.parametrize("name", MODELS)
def test_experts_that_start_as_the_block_change_nothing(name):
    size = 64 if name == "convnext" else 16
    images = torch.rand(4, 3, size, size)
    check_that_copies_change_nothing(*make(name), "Experts", lambda model: model(images))


@pytest.mark.parametrize("name", REFUSED)
def test_what_sees_several_tokens_is_refused_by_name(name):
    kind, options, problem = REFUSED[name]
    model = import_timm().create_model(kind, num_classes=5, **options)
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=rf"^stages\.[\w.]*\.mlp.*{problem}"):
        replace_ffn(model, r"\.mlp$", 4)
    assert list(model.state_dict()) == before


def test_the_pages_program_makes_swinv2_moe_of_timms_swinv2():
    import_timm()
    page = ROOT / "scripts/examples/README.md"
    programs = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (program,) = [each for each in programs if "import timm" in each]
    names = {}
    exec(compile(program, str(page), "exec"), names)
    model = names["model"]
    layers = {name for name, module in model.named_modules() if isinstance(module, MoELayer)}
    third = {f"layers.2.blocks.{number}.mlp" for number in range(1, 18, 2)}
    assert layers == third | {"layers.3.blocks.1.mlp"}  # as the published models
    assert names["loss"].isfinite()
    for name in layers:  # the norm after it starts at 0: nothing comes back through that yet
        assert model.get_submodule(name.replace("mlp", "norm2")).weight.grad.abs().sum() > 0
        assert model.get_submodule(name).gate.wg.weight.grad.abs().sum() > 0
