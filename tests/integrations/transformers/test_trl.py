"""``MoETrainer`` before the trainers of TRL, and generation on several ranks.

Each trainer takes three steps. The gradient that the balance losses add is compared with that of
the same batches one by one, whatever the trainer computes beside it.
"""

import copy
import os
import tempfile
from string import ascii_lowercase

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers import distributed
from helpers.distributed import on_ranks
from helpers.examples import EXAMPLES, example
from tiny_models import make, tokens

from fairseq_tutel import training
from fairseq_tutel.distributed import process_world
from fairseq_tutel.integrations.transformers import MoETrainer, replace_moe
from fairseq_tutel.integrations.transformers.forwards import generate_together

pytestmark = pytest.mark.extras
distributed._PRELOAD += ["transformers.trainer"]

ROWS, STEPS, MICRO = 16, 3, 2
OPTIONS = {
    "max_steps": STEPS, "gradient_accumulation_steps": MICRO, "per_device_train_batch_size": 2,
    "learning_rate": 0.0, "max_grad_norm": 0.0, "logging_steps": 1, "save_strategy": "no",
    "activation_checkpointing": False, "bf16": False, "use_cpu": True, "report_to": "none",
    "disable_tqdm": True,
}  # fmt: skip
ONLINE = {"num_generations": 2, "max_completion_length": 4}
# options of a trainer, and whether it has a reference model
TRAINERS = {
    "SFT": ({}, False), "DPO": ({}, True), "KTO": ({}, True), "GRPO": (ONLINE, False),
    "RLOO": ({**ONLINE, "beta": 0.0}, False),
}  # fmt: skip


def tokenizer():
    """Return a tokenizer of single letters, two of which end a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    words = [*special.values(), *ascii_lowercase]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def row(trainer, number):
    """Return a sample: texts of several lengths."""
    text, short = ascii_lowercase[: 4 + number], "zyxwv"[: 1 + number % 4]
    more = {
        "DPO": {"chosen": text, "rejected": text[::-2]},
        "KTO": {"completion": text, "label": bool(number % 2)},
    }
    return {"text": text} if trainer == "SFT" else {"prompt": short, **more.get(trainer, {})}


def gate(model):
    return model.model.layers[0].mlp.gate.wg.weight


class Watch(transformers.TrainerCallback):
    """Callback that keeps the first update's gradient of a router, and the batches before it."""

    def __init__(self, model):
        self.model, self.batches, self.gradient = model, [], None
        model.register_forward_pre_hook(self.see, with_kwargs=True)

    def see(self, module, args, kwargs):
        if torch.is_grad_enabled() and self.gradient is None:
            self.batches.append((kwargs["input_ids"], kwargs["attention_mask"]))

    def on_pre_optimizer_step(self, *_, **__):
        if self.gradient is None:
            self.gradient = gate(self.model).grad.clone()


def train(name, aux_weight, folder):
    import datasets
    import trl

    (more, has_reference), model = TRAINERS[name], make("qwen3_moe", use_cache=True).train()
    options = {"aux_weight": aux_weight, "blocks": replace_moe(model)}
    if not aux_weight:
        # TRL's own balance loss; else it is left out, because we add one
        more = {**more, "router_aux_loss_coef": 0.0, "max_steps": 1}
    if has_reference:
        options["ref_model"] = copy.deepcopy(model)
    if "num_generations" in more:
        options["reward_funcs"] = lambda completions, **_: [float(len(c)) for c in completions]
    options["train_dataset"] = datasets.Dataset.from_list([row(name, n) for n in range(ROWS)])
    mixed = type("Mixed", (MoETrainer, getattr(trl, f"{name}Trainer")), {})
    args = getattr(trl, f"{name}Config")(folder, **{**OPTIONS, **more})
    host, watch = mixed(model, args=args, processing_class=tokenizer(), **options), Watch(model)
    host.add_callback(watch)
    host.train()
    return host, watch


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks(timeout=400)
def test_balance_losses_count_once_per_token(world_size):
    rank, _ = process_world()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ["MASTER_ADDR"], padded = "127.0.0.1", set()
    for name in TRAINERS:
        with tempfile.TemporaryDirectory() as folder:
            _, without = train(name, 0.0, folder)
            host, watch = train(name, 1.0, folder)
        model, losses = host.model, []
        model.zero_grad()
        assert len(watch.batches) == MICRO
        for ids, mask in watch.batches:
            with training.collect_aux(model, attention_mask=mask) as aux:
                model(ids, attention_mask=mask)
            losses.append(aux.loss / MICRO)
            losses[-1].backward()
        want = gate(model).grad
        if world_size > 1:
            dist.all_reduce(want)
        found = watch.gradient - without.gradient
        torch.testing.assert_close(found, want / world_size, rtol=1e-3, atol=1e-5, msg=name)
        padded |= {name for _, mask in watch.batches if not mask.all()}
        lines = [line for line in host.state.log_history if "loss" in line]
        assert len(lines) == STEPS and "aux_loss" not in lines[0]
        assert lines[0]["moe_aux_loss"] == pytest.approx(sum(losses).item(), rel=1e-4)
        assert 0 < lines[0]["moe_util_load"] <= 100 and lines[0]["moe_drop"] == 0
    assert padded >= {"SFT", "DPO", "KTO"}


def test_the_example_replays_what_was_generated(tmp_path, monkeypatch):
    import trl

    compute, passes = trl.GRPOTrainer._compute_loss, []

    def watched(self, model, inputs):
        with torch.no_grad():  # the weights that sampled would choose others now
            gate(self.model).neg_()
        with training.record_choices(model) as found:
            loss = compute(self, model, inputs)
        passes.append((torch.stack(list(found.values()), 1), inputs["choices"]))
        return loss

    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", watched)
    options = {**OPTIONS, "per_device_train_batch_size": 4}
    example("grpo_replay", EXAMPLES).main(str(tmp_path), **options)
    assert len(passes) == STEPS * MICRO
    for found, recorded in passes:
        assert torch.equal(found, recorded) and (recorded[:, :, :-1] >= 0).all()


@on_ranks(2)
def test_a_rank_that_ends_early_generates_on():
    rank, _ = process_world()
    alone, model = make("qwen3_moe", use_cache=True), make("qwen3_moe", use_cache=True)
    replace_moe(model)
    options = {"max_new_tokens": 3 + 4 * rank, "do_sample": False, "eos_token_id": 999}
    with generate_together(model):
        found = model.generate(tokens(2, seed=rank), **options)
    assert torch.equal(found, alone.generate(tokens(2, seed=rank), **options))
    assert "generate" not in vars(model)
