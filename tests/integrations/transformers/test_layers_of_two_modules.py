"""``replace_ffn`` on each layer of transformers whose feed-forward network is two modules."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

from fairseq_tutel.moe import replace_ffn

transformers = pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.extras

SIZES = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 50, "max_position_embeddings": 64, "image_size": 32, "patch_size": 8,
    "embedding_size": 16, "encoder_hidden_size": 32, "num_frames": 2, "tubelet_size": 1,
    "pad_token_id": 0, "decoder_num_hidden_layers": 1, "decoder_hidden_size": 32,
    "decoder_intermediate_size": 40, "decoder_num_attention_heads": 4,
}  # fmt: skip
IDS = torch.randint(3, 40, (2, 16), generator=torch.Generator().manual_seed(0))
IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
SWIN = {"patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
VIDEO = {"pixel_values": IMAGES[:, None].repeat(1, 2, 1, 1, 1)}
# sizes of a layer's model beside SIZES
OWN = {
    "ClapAudioLayer": {
        "hidden_size": 32, "patch_embeds_hidden_size": 16, "depths": [1, 1], "spec_size": 32,
        "num_attention_heads": [2, 4], "num_mel_bins": 8, "window_size": 4, "patch_size": 4,
    },
    "CvtLayer": {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 2], "depth": [1, 2, 3]},
    "MobileViTTransformerLayer": {"hidden_sizes": [16, 24, 32], "patch_size": 2},
    "SEWDLayer": {
        "conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "squeeze_factor": 1,
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
    },
    "SqueezeBertModule": {"embedding_size": 32},
    "BridgeTowerBertCrossLayer": {
        "text_config": {**SIZES, "num_hidden_layers": 1}, "num_hidden_layers": 1,
        "vision_config": {"hidden_size": 64, "num_hidden_layers": 2, "image_size": 32,
                          "patch_size": 8},
    },
    "BrosLayer": {"hidden_size": 64},
    "LayoutLMv3Layer": {"coordinate_size": 4, "shape_size": 8},
    "LiltLayer": {"hidden_size": 48},
    "XmodLayer": {"default_language": "en_XX"},
    "YolosLayer": {"image_size": [32, 32]},
    **dict.fromkeys(("DonutSwinLayer", "MaskFormerSwinLayer", "Swinv2Layer"), SWIN),
    "Swin2SRLayer": {**SWIN, "patch_size": 1},
    "SwinMLP": SWIN,
}  # fmt: skip
# class of a layer's model, if it is not the first Model or Encoder that has the layer
MODELS = {
    "BridgeTowerTextLayer": "BridgeTowerTextModel", "BrosLayer": "BrosModel",
    "ClapTextLayer": "ClapTextModel", "EvollaSaProtLayer": "EvollaSaProtProteinEncoder",
    "ProphetNetFeedForward": "ProphetNetEncoder", "LayoutLMv3Layer": "LayoutLMv3Model",
}  # fmt: skip
# inputs, if they are not images (of a config with an image's size) or numbers of words
INPUTS = {
    "BridgeTowerBertCrossLayer": {
        "input_ids": IDS, "pixel_values": IMAGES, "pixel_mask": IMAGES[:, 0].ceil(),
    },
    "BrosLayer": {"input_ids": IDS, "bbox": torch.zeros(2, 16, 8)},
    "ClapAudioLayer": {"input_features": torch.rand(2, 1, 32, 8), "is_longer": None},
    "CvtLayer": {"pixel_values": IMAGES},
    "FlavaLayer": {"pixel_values": IMAGES},
    "GitLayer": {"input_ids": IDS},
    "LayoutLMv3Layer": {"input_ids": IDS},
    "LxmertLayer": {
        "input_ids": IDS, "visual_feats": torch.rand(2, 4, 2048), "visual_pos": torch.rand(2, 4, 4),
    },
    "PPDocLayoutV2ReadingOrderLayer": {
        "boxes": torch.rand(2, 5, 4), "mask": torch.ones(2, 5, dtype=torch.bool),
    },
    "SEWDLayer": {"input_values": torch.rand(2, 400)},
    "TimesformerLayer": VIDEO, "VideoMAELayer": VIDEO,
    "ViltLayer": {"input_ids": IDS, "pixel_values": IMAGES},
}  # fmt: skip
# layers of one module, which other versions have as two
ONE_MODULE = {
    "BeitMLP": "beit", "DeiTMLP": "deit", "SwinMLP": "swin", "ViTMLP": "vit",
    "ViTMAEMLP": "vit_mae",
}  # fmt: skip
REFUSED = {
    "Blip2QFormerLayer": "has no attribute 'intermediate'",
    "IBertLayer": "missing 1 required positional argument: 'hidden_states_scaling_factor'",
    "MobileBertLayer": "cannot be called as layer",
    "SqueezeBertModule": "is a convolution",
}
# layers whose models need other libraries (natten, detectron2) or large images, and a head
LEFT_OUT = {"DinatLayer", "LayoutLMv2Layer", "TvpEncodeLayer", "BigBirdForQuestionAnsweringHead"}


def layers():
    """Yield the layers with two modules of the installed version, and their modules."""
    root = Path(transformers.__file__).parent / "models"
    for path in sorted(root.glob("*/modeling_*.py")):
        classes = re.split(r"\n(?=class |def |@)", path.read_text(encoding="utf-8"))
        for text in classes:
            name = text.removeprefix("class ").partition("(")[0]
            two = "self.intermediate = " in text and "self.output = " in text
            known = two or ONE_MODULE.get(name) == path.parent.name
            if text.startswith("class ") and known and name not in LEFT_OUT:
                yield name, f"transformers.models.{path.parent.name}.{path.stem}"


LAYERS = dict(layers())


def model_with(name):
    """Return a tiny model with the layer, and the names of its first two layers."""
    module, errors = importlib.import_module(LAYERS[name]), []
    wanted = MODELS.get(name, r".*(Model|Encoder|Backbone|ReadingOrder)$")
    for found, cls in inspect.getmembers(module, inspect.isclass):
        if not re.fullmatch(wanted, found) or found.endswith("PreTrainedModel"):
            continue
        if not issubclass(cls, transformers.PreTrainedModel) or cls.__module__ != module.__name__:
            continue
        kind = cls.config_class
        known = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
        own = OWN.get(name, {})
        replaced = {old for old, new in kind.attribute_map.items() if new in own}
        if not known & {"hidden_size", *own}:
            continue
        torch.manual_seed(0)
        config = kind(**{key: v for key, v in {**SIZES, **own}.items() if key in known - replaced})
        try:
            model = cls(config).eval()
        except Exception as error:
            errors.append(f"{found}: {error}")
            continue
        if names := [key for key, each in model.named_modules() if type(each).__name__ == name]:
            inputs = {"pixel_values": IMAGES} if "image_size" in known else {"input_ids": IDS}
            return model, names[:2], INPUTS.get(name, inputs)
    raise LookupError(errors)


def output(model, inputs):
    torch.manual_seed(1)
    with torch.no_grad():
        found = model(**inputs)[0]
    while isinstance(found, tuple):  # of a backbone's stages
        found = found[-1]
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_copies_of_the_network_change_nothing_or_the_layer_is_refused(name):
    model, names, inputs = model_with(name)
    with torch.no_grad():
        for key, param in model.named_parameters():  # blocks whose output shows in the model's
            if param.dim() > 1 and "embed" not in key:
                param.normal_(0, param[0].numel() ** -0.5)
    if name in REFUSED:
        with pytest.raises(ValueError, match=rf"^{re.escape(names[0])}[. (:].*{REFUSED[name]}"):
            replace_ffn(model, names, 4)
        return
    want = output(model, inputs)
    replaced = replace_ffn(model, names, 4, copy_weights=True, capacity_factor=0.0)
    assert len(replaced) == len(names)
    scale = min(1.0, want.abs().max().item())
    torch.testing.assert_close(output(model, inputs), want, rtol=1e-4, atol=1e-4 * scale)
    with torch.no_grad():
        for each in replaced:
            for param in model.get_submodule(each).experts.parameters():
                param.zero_()
    assert (output(model, inputs) - want).abs().max() > 1e-3 * scale
