"""``replace_ffn`` on models of transformers: the same outputs, then a loss that falls."""

import pytest
import torch
from helpers.distributed import run_ranks
from helpers.replaced import check_losses, check_that_copies_change_nothing, train_replaced
from tiny_models import logits, make

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
