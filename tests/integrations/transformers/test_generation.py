"""Choices recorded while generating, beside those of a pass over the final sequences."""

import pytest
import torch
from tiny_models import make, tokens

from fairseq_tutel import training
from fairseq_tutel.integrations.transformers import replace_moe

pytestmark = pytest.mark.extras

WAYS = {
    "greedy": {},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
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
    seen = whole.bool()
    ended = (out.sequences == 7).cumsum(1) > 0
    ended[:, : prompts.shape[1]] = False
    seen &= ~ended  # a token that ends a sequence, and padding, are no input
    seen[:, -1] = False
    assert len(found) == 3
    for name, choice in found.items():
        reference = want[name].view(*seen.shape, -1)
        assert torch.equal(choice[seen].sort(1).values, reference[seen].sort(1).values), name
        assert (choice[:, -1] == -1).all()


def test_a_replay_repeats_the_generation():
    model = make("qwen3_moe", use_cache=True)
    replace_moe(model)
    with training.record_choices(model) as choices:
        ids = model.generate(tokens(2), max_new_tokens=4, do_sample=False)
    recorded = training.choices_of_sequences(choices, ids.shape)
    with torch.no_grad():
        want = model(ids).logits[:, :-1]
        for param in model.model.layers[1].mlp.gate.parameters():
            param.neg_()  # this router would choose others now
        with training.replay_choices(model, recorded), training.record_choices(model) as again:
            model(ids)
        found = model(ids).logits[:, :-1]
    for name, choice in recorded.items():
        assert torch.equal(again[name], choice)
    assert (found - want).abs().max() > 0.1
