"""GRPO of TRL that trains with the experts that the generation chose, on a tiny Qwen3-MoE.

    python scripts/examples/grpo_replay.py run

A training pass may choose other experts than the generation did. Here it replays the choices.
"""

import sys

import datasets
import tokenizers
import torch
import transformers
import trl

from fairseq_tutel import training
from fairseq_tutel.integrations.transformers import MoETrainer, replace_moe


class ReplayTrainer(MoETrainer, trl.GRPOTrainer):
    def _generate_single_turn(self, *args, **kwargs):
        with training.record_choices(self.model) as self.recorded:
            return super()._generate_single_turn(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        shape = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1).shape
        choices = training.choices_of_sequences(self.recorded, shape)
        return {**batch, "choices": torch.stack([*choices.values()], 1)}  # TRL splits its rows

    def _compute_loss(self, model, inputs):
        choices = dict(zip(self.recorded, inputs["choices"].unbind(1), strict=True))
        with training.replay_choices(model, choices):
            return super()._compute_loss(model, inputs)


def letters():
    vocabulary = {"<pad>": 0, "<eos>": 1, **{chr(95 + number): number for number in range(2, 28)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def main(folder, **options):
    args = trl.GRPOConfig(folder, num_generations=4, max_completion_length=8, **options)
    config = transformers.Qwen3MoeConfig(
        vocab_size=28, hidden_size=32, moe_intermediate_size=32, num_experts=8, head_dim=8,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    data = datasets.Dataset.from_list([{"prompt": text} for text in ("ab", "c", "def", "gh")] * 4)
    ReplayTrainer(
        model, lambda completions, **_: [float(text.count("e")) for text in completions], args,
        train_dataset=data, processing_class=letters(), blocks=replace_moe(model),
    ).train()  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], max_steps=3, bf16=False, report_to="none")
