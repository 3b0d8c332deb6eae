"""Choices recorded while generating and in passes, and replays of them beside a loop."""

import models_page
import pytest
import torch
from tiny_models import logits, make, tokens

from fairseq_tutel import training
from fairseq_tutel.integrations.transformers import replace_moe, restore_moe

pytestmark = pytest.mark.extras

WAYS = {
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams, several": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 2.0},
    "beams, samples": {"num_beams": 3, "do_sample": True, "num_return_sequences": 3},
}


@pytest.mark.parametrize("folder", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_each_token_has_the_choices_of_its_own_sequence(options, folder):
    model, prompts = make(folder, use_cache=True), tokens(2)
    replace_moe(model)
    mask = torch.ones_like(prompts)
    mask[0, :4] = 0  # left padding
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": 7, **options}
    with training.record_choices(model) as choices:
        out = model.generate(
            prompts, attention_mask=mask, return_dict_in_generate=True, pad_token_id=0, **options
        )
    beams = out.beam_indices if "num_beams" in options else None
    found = training.choices_of_sequences(choices, out.sequences.shape, beams)

    repeats = len(out.sequences) // len(prompts)
    after = torch.ones_like(out.sequences[:, prompts.shape[1] :])
    whole = torch.cat([mask.repeat_interleave(repeats, 0), after], 1)
    positions = (whole.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), training.record_choices(model) as want:
        model(out.sequences, attention_mask=whole, position_ids=positions)
    ended = (out.sequences == 7).cumsum(1) > 0
    ended[:, : prompts.shape[1]] = False
    seen = whole.bool() & ~ended  # a token that ends a sequence, and padding, are no input
    seen[:, -1] = False
    assert len(found) == 3
    for name, choice in found.items():
        reference = want[name].view(*seen.shape, -1)
        assert torch.equal(choice[seen].sort(1).values, reference[seen].sort(1).values), name
        assert (choice[:, -1] == -1).all()


# folder -> weights of a token's given experts by its logits: the formula of the model's router
ROUTERS = {
    "qwen3_moe": lambda logits, given: (p := logits.softmax(-1)[given]) / p.sum(),
    "gpt_oss": lambda logits, given: logits[given].softmax(-1),
    "ernie4_5_moe": lambda logits, given: (p := logits.softmax(-1)[given]) / p.sum(),
    "kolibri1": lambda logits, given: (p := logits[given].sigmoid()) / p.sum(),
}


class Loop:
    """A router of transformers that weights given choices token by token."""

    def __init__(self, folder, router, given):
        self.weigh, self.router, self.given = ROUTERS[folder], router, given.flatten(0, 1).long()

    def __call__(self, x):
        weight, bias = self.router.weight, getattr(self.router, "bias", None)
        logits = torch.nn.functional.linear(x.flatten(0, -2), weight, bias)
        rows = [
            self.weigh(row, each) if each[0] >= 0 else 0 * row[:2]
            for row, each in zip(logits, self.given, strict=True)
        ]
        return logits, torch.stack(rows), self.given.clamp(min=0)


def router_of(block):
    return block.router if hasattr(block, "router") else block.gate


@pytest.mark.parametrize("folder", ROUTERS)
def test_training_replays_other_choices_as_a_loop_over_tokens(folder):
    """With activation checkpointing, whose backward pass comes after the block."""
    model, dense = (make(folder, use_cache=True).train() for _ in range(2))
    sparse = [block.mlp for block in dense.model.layers if hasattr(block.mlp, "experts")]
    routers = [router_of(block) for block in sparse]
    blocks = replace_moe(model)
    with training.record_choices(model) as choices:
        ids = model.generate(tokens(2), max_new_tokens=4, do_sample=False)
    recorded = training.choices_of_sequences(choices, ids.shape)
    assert len(recorded) == len(routers)
    recorded = {name: torch.where(c < 0, c, (c + 3) % 8) for name, c in recorded.items()}
    for router, given in zip(routers, recorded.values(), strict=True):
        router.forward = Loop(folder, router, given)

    model.activation_checkpointing_enable({"use_reentrant": False})
    target = torch.randn(*ids.shape, 64)
    with training.replay_choices(model, recorded), training.record_choices(model) as again:
        outs = [model(ids, use_cache=False).logits]
    outs.append(dense(ids, use_cache=False).logits)
    for out in outs:
        (out * target).sum().backward()
    found = [(out, n.model.embed_tokens.weight.grad) for out, n in zip(outs, (model, dense))]  # noqa: B905
    for name, choice in again.items():
        assert torch.equal(choice.view_as(recorded[name]), recorded[name])
    places = [model.get_submodule(name.removesuffix(".experts")) for name in blocks]
    mine = [getattr(router_of(each), "wg", router_of(each)).weight.grad for each in places]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine, [r.weight.grad for r in routers], rtol=1e-3, atol=1e-4)
    assert all(grad.abs().max() > 1e-3 for grad in mine)


# models whose choices cannot be given
NOT_STEERED = {"phimoe", "deepseek_v4", "zaya"}  # no topk, a table of tokens, a choice of nothing


@pytest.mark.parametrize("folder", models_page.folders_on_page("experts"))
def test_each_router_replays_its_own_choices_to_the_bit_and_others_or_refuses(folder):
    model = make(folder)
    blocks = replace_moe(model)
    with training.record_choices(model) as choices:
        want = logits(model)

    def replayed(changed):
        given = {name: changed(each) % 8 for name, each in choices.items()}
        with training.replay_choices(model, given), training.record_choices(model) as again:
            out = logits(model)
        torch.testing.assert_close(again, given, rtol=0, atol=0)
        return out

    assert torch.equal(replayed(lambda each: each), want)
    if folder in NOT_STEERED:
        with pytest.raises(ValueError, match="does not choose by one torch.topk"):
            replayed(lambda each: each + 1)
    else:
        assert (replayed(lambda each: each + 1) - want).abs().max() > 1e-3
    with pytest.raises(ValueError, match="the model's router chooses"):
        replayed(lambda each: each[:, :1] + torch.arange(3 - each.shape[1]))
    restore_moe(model, blocks)
    assert not any("forward" in vars(module) for module in model.modules())
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
