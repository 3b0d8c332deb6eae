"""``replace_ffn`` on models of transformers: the same outputs, then a loss that falls."""

import re

import pytest
import torch
from helpers.distributed import run_ranks
from helpers.replaced import check_losses, check_that_copies_change_nothing, train_replaced
from tiny_models import logits, make

from fairseq_tutel.moe import replace_ffn

pytestmark = pytest.mark.extras

# folder -> blocks by name, experts
MODELS = {
    "gpt2": (r"\.mlp$", "Experts"), "llama": (r"\.mlp$", "SwiGLUExperts"),
    "bert": (r"encoder\.layer\.\d+$", "Experts"), "t5": (r"\.DenseReluDense$", "Experts"),
    "wav2vec2": (r"\.feed_forward$", "Experts"),
    # its gelu is the approximation, for which there are no built-in gated experts
    "gemma": (r"\.mlp$", "ExpertList"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_experts_that_start_as_the_block_change_nothing(name):
    check_that_copies_change_nothing(make(name, num_hidden_layers=4), *MODELS[name], logits)


def train(name):
    def loss_of(net, rows):
        out = logits(net, rows)
        targets = torch.randn(4, *out.shape[1:], generator=torch.Generator().manual_seed(2))
        return (out - targets[rows]).square().mean()

    return train_replaced(make(name, num_hidden_layers=4), MODELS[name][0], loss_of)


def train_each():
    return {name: train(name) for name in MODELS}


@pytest.fixture(scope="module")
def on_two_ranks():
    return run_ranks(train_each, 2, timeout=200)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_train_as_one_and_the_loss_falls(name, on_two_ranks):
    check_losses(train(name), [losses[name] for losses in on_two_ranks])


# folder -> class of a layer whose network is two modules, or was in some version
TWO_MODULES = {
    "beit": "BeitMLP", "bert": "BertLayer",
    "big_bird": "BigBirdLayer", "convbert": "ConvBertLayer", "deberta": "DebertaLayer",
    "deberta_v2": "DebertaV2Layer", "deit": "DeiTMLP", "dpt": "DPTViTLayer",
    "electra": "ElectraLayer", "ernie": "ErnieLayer", "esm": "EsmLayer", "fnet": "FNetLayer",
    "ibert": "IBertLayer", "layoutlm": "LayoutLMLayer", "luke": "LukeLayer",
    "megatron_bert": "MegatronBertLayer", "mpnet": "MPNetLayer", "rembert": "RemBertLayer",
    "roberta": "RobertaLayer", "roberta_prelayernorm": "RobertaPreLayerNormLayer",
    "roc_bert": "RoCBertLayer", "roformer": "RoFormerLayer", "splinter": "SplinterLayer",
    "squeezebert": "SqueezeBertModule", "visual_bert": "VisualBertLayer", "vit": "ViTMLP",
    "vit_mae": "ViTMAEMLP",
    "xlm_roberta": "XLMRobertaLayer",
}  # fmt: skip
REFUSED = {
    "ibert": "missing 1 required positional argument: 'hidden_states_scaling_factor'",
    "squeezebert": "is a convolution",
}


def output(model):
    torch.manual_seed(1)  # masks
    with torch.no_grad():
        return logits(model)


@pytest.mark.parametrize("folder", TWO_MODULES)
def test_copies_of_two_modules_change_nothing_or_the_layer_is_refused(folder):
    model = make(folder, num_hidden_layers=2)
    modules = model.named_modules()
    names = [name for name, each in modules if type(each).__name__ == TWO_MODULES[folder]][:2]
    if folder in REFUSED:
        with pytest.raises(ValueError, match=rf"^{re.escape(names[0])}[. (:].*{REFUSED[folder]}"):
            replace_ffn(model, names, 4)
        return
    want = output(model)
    replaced = replace_ffn(model, names, 4, copy_weights=True, capacity_factor=0.0)
    assert len(replaced) == len(names) > 0
    scale = min(1.0, want.abs().max().item())
    torch.testing.assert_close(output(model), want, rtol=1e-4, atol=1e-4 * scale)
    with torch.no_grad():
        for each in replaced:
            for param in model.get_submodule(each).experts.parameters():
                param.zero_()
    assert (output(model) - want).abs().max() > 1e-3 * scale
