"""``MoETrainer`` beside a loop in plain torch; what it saves, and what it refuses.

Training on several ranks, clipping and resuming: tests/examples/test_hosts.py.
"""

import re
import warnings

import pytest
import torch
from helpers.assertions import assert_same_state
from tiny_models import logits, make, tokens

from fairseq_tutel import training
from fairseq_tutel.integrations.transformers import replace_moe

transformers = pytest.importorskip("transformers", minversion="5")
trainer = pytest.importorskip("fairseq_tutel.integrations.transformers.trainer")
pytestmark = pytest.mark.extras

STEPS, MICRO, RATE = 2, 2, 1e-2
OPTIONS = {
    "max_steps": STEPS, "save_steps": STEPS, "gradient_accumulation_steps": MICRO,
    "per_device_train_batch_size": 2, "learning_rate": RATE, "lr_scheduler_type": "constant",
    "train_sampling_strategy": "sequential", "report_to": "none", "disable_tqdm": True,
    "use_cpu": True,
}  # fmt: skip


def samples():
    return [{"input_ids": row, "labels": row} for row in tokens(2 * STEPS * MICRO)]


@pytest.mark.parametrize("max_norm", [0.1, 0.0], ids=["clipped", "not clipped"])
def test_trains_as_a_plain_loop_and_saves_what_the_original_class_loads(max_norm, tmp_path):
    model, plain = (make("mixtral").train() for _ in range(2))
    moe = {"load_bias": "none", "balance_scope": "update"}
    blocks = replace_moe(model, **moe)
    replace_moe(plain, **moe)
    args = transformers.TrainingArguments(str(tmp_path), max_grad_norm=max_norm, **OPTIONS)
    options = {"train_dataset": samples(), "aux_weight": 0.5, "blocks": blocks}
    trainer.MoETrainer(model, args, **options).train()

    optimizer = torch.optim.AdamW(plain.parameters(), RATE, weight_decay=0)
    for rows in tokens(2 * STEPS * MICRO).unflatten(0, (STEPS, MICRO, 2)):
        for ids in rows:
            with training.collect_aux(plain) as aux:
                loss = plain(ids, labels=ids).loss
            ((loss + 0.5 * aux.loss) / MICRO).backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        training.end_update(plain)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)
    loaded = type(plain).from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    replace_moe(loaded, **moe)
    assert_same_state(loaded.state_dict(), model.state_dict())


def test_load_biases_move_and_evaluation_has_no_aux_loss(tmp_path):
    model = make("mixtral").train()
    replace_moe(model, load_bias="sign")
    args = transformers.TrainingArguments(str(tmp_path), save_strategy="no", **OPTIONS)
    host = trainer.MoETrainer(model, args, train_dataset=samples(), eval_dataset=samples())
    host.train()
    bias = model.model.layers[0].mlp.gate.load_bias
    assert bias.any()
    found, batch = host.evaluate()["eval_loss"], tokens(2 * STEPS * MICRO)
    with torch.no_grad():
        want = torch.stack([model(x, labels=x).loss for x in batch.split(8)]).mean()
    assert found == pytest.approx(want.item(), rel=1e-4)


def test_the_best_model_comes_from_the_set_of_all_ranks(tmp_path):
    model = make("mixtral").train()
    replace_moe(model)
    options = {**OPTIONS, "max_steps": 3, "save_steps": 1, "eval_steps": 1, "learning_rate": 1.0}
    args = transformers.TrainingArguments(
        str(tmp_path), eval_strategy="steps", load_best_model_at_end=True,
        metric_for_best_model="loss", **options,
    )  # fmt: skip
    host = trainer.MoETrainer(model, args, train_dataset=samples() * 2, eval_dataset=samples())
    host.train()
    best = make("mixtral")
    replace_moe(best)
    training.load_checkpoint(f"{host.state.best_model_checkpoint}/run.pt", best)
    assert not host.state.best_model_checkpoint.endswith("-3")
    assert_same_state(model.state_dict(), best.state_dict())


BLOCKS, FROZEN = "has LoRA, which blocks= cannot hold", "has frozen LoRA"
EXPERTS = "has adapters of peft, which checkpoints cannot hold"
# order of calls -> what is refused, without and with blocks=; None: saved. R: replace_moe,
# P: get_peft_model, T: on experts, too, A: add_adapter, L: add_lora, l: add_lora(freeze=False)
ORDERS = {
    "RT": (EXPERTS, EXPERTS), "RP": (None, None), "PR": (None, None), "RA": (None, None),
    "AR": (None, None), "RL": (None, BLOCKS), "RLP": (FROZEN, BLOCKS), "RPL": (None, BLOCKS),
    "RPl": (None, BLOCKS), "PRl": (None, BLOCKS), "RAl": (None, BLOCKS),
    "RlA": (FROZEN, BLOCKS),
}  # fmt: skip


def adapted(order, **moe):
    """Return a model and its blocks after these calls."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model, blocks = make("mixtral").train(), None
    for call in order:
        if call == "R":
            blocks = replace_moe(model, **moe)
        elif call in "lL":
            training.add_lora(model, 2, freeze=call == "L")
        elif call == "A":
            model.add_adapter(config)
        else:
            if call == "T":
                config.target_parameters = ["experts.fc1_weight", "experts.fc2_weight"]
            model = peft.get_peft_model(model, config)
    return model, blocks


def reloaded(order, folder):
    """Return a model with what was saved for a model of this order, as the page says."""
    model = make("mixtral")
    replace_moe(model)
    if "P" in order:
        model = pytest.importorskip("peft").PeftModel.from_pretrained(model, folder)
    if "A" in order:
        model.load_adapter(folder)
    if "l" in order.lower():
        training.load_lora(folder / "experts", model)
    return model.eval()


@pytest.mark.parametrize("with_blocks", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_adapters_are_saved_or_refused_at_once(order, with_blocks, tmp_path):
    model, blocks = adapted(order)
    args = transformers.TrainingArguments(str(tmp_path), **{**OPTIONS, "save_steps": 1})
    options = {"train_dataset": samples(), "blocks": blocks if with_blocks else None}
    if refused := ORDERS[order][with_blocks]:
        with pytest.raises(ValueError, match=refused):
            trainer.MoETrainer(model, args, **options)
        return
    trainer.MoETrainer(model, args, **options).train()
    want, folder = logits(model.eval()), tmp_path / f"checkpoint-{STEPS}"
    torch.testing.assert_close(logits(reloaded(order, folder)), want, rtol=1e-4, atol=1e-4)
    before = reloaded(order, tmp_path / "checkpoint-1")
    assert (logits(before) - want).abs().max() > 1e-2


def test_a_load_bias_that_peft_would_lose_is_refused(tmp_path):
    args = transformers.TrainingArguments(str(tmp_path), **OPTIONS)
    with pytest.raises(ValueError, match="load_bias='sign', which peft does not save"):
        trainer.MoETrainer(adapted("RP", load_bias="sign")[0], args)
    trainer.MoETrainer(adapted("RPl", load_bias="sign")[0], args)


def test_another_version_is_named(monkeypatch, tmp_path):
    model = make("mixtral")
    replace_moe(model)
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    monkeypatch.setattr(transformers, "__version__", "6.1.0")
    with pytest.warns(UserWarning, match=r"tested with transformers >=5.23,<6, this is 6.1.0"):
        trainer.MoETrainer(model, args)
    monkeypatch.setattr(trainer.Trainer, "_clip_grad_norm", lambda self: None)
    with pytest.raises(ImportError, match=r">=5.23,<6, this is 6.1.0: Trainer._clip_grad_norm"):
        trainer.MoETrainer(model, args)


BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": STEPS}
REENTRANT = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {
    "use_reentrant": True
}}  # fmt: skip
# options of the layer, of TrainingArguments, and of activation checkpointing before -> words
REFUSED = {
    "no experts in checkpoints": ({}, {**BEST, "save_only_model": True}, None, "whole checkpoints"),
    "re-entrant": ({}, REENTRANT, None, "give use_reentrant=False, or aux_weight=0"),
    "re-entrant by torch's default": (
        {}, {**REENTRANT, "activation_checkpointing_kwargs": {"debug": True}}, None, "re-entrant",
    ),
    "re-entrant before": ({}, {}, {"use_reentrant": True}, "re-entrant"),
    "route_scale": ({"route_scale": 2.0}, {}, None, "route_scale=2.0, which the original block"),
    "load bias": ({"load_bias": "sign"}, {}, None, "load_bias='sign', which the original router"),
}  # fmt: skip


@pytest.mark.parametrize("moe, given, before, words", REFUSED.values(), ids=REFUSED)
def test_what_would_lose_experts_or_losses_is_refused(moe, given, before, words, tmp_path):
    model = make("mixtral")
    blocks = replace_moe(model, **moe)
    if before is not None:
        model.activation_checkpointing_enable(before)
    args = transformers.TrainingArguments(str(tmp_path), **{**OPTIONS, **given})
    with pytest.raises(ValueError, match=words):
        trainer.MoETrainer(model, args, eval_dataset=samples(), blocks=blocks)


# mask of two rows, the same tokens without padding, and their positions if they are packed
LEFT, RIGHT = [[0] * 4 + [1] * 5, [1] * 9], [[1] * 9, [1] * 4 + [0] * 5]


@pytest.mark.parametrize("skip", [False, True], ids=["", "skipped"])
@pytest.mark.parametrize("mask", [LEFT, RIGHT], ids=["left", "right"])
def test_padding_does_not_count(mask, skip, tmp_path):
    model, ids, mask = make("mixtral").train(), tokens(2), torch.tensor(mask)
    replace_moe(model)
    model.double()
    args = transformers.TrainingArguments(str(tmp_path), **OPTIONS)
    host = trainer.MoETrainer(model, args, aux_weight=1.0, skip_padding=skip)
    host.current_gradient_accumulation_steps = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    real = mask.bool()
    padded = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    packed = {"input_ids": ids[real][None], "position_ids": positions[real][None]}
    found = []
    for inputs in (padded, packed):
        first = inputs["position_ids"] == 0  # or padding: no token of the row predicts it
        labels = inputs["input_ids"].masked_fill(first, -100)
        if "attention_mask" in inputs:
            labels[mask == 0] = -100
        found.append(host.compute_loss(model, {**inputs, "labels": labels}))
        found.append(host._last.loss)
    torch.testing.assert_close(found[:2], found[2:], rtol=1e-6, atol=0)
    with training.collect_aux(model, attention_mask=mask, skip_padding=skip) as aux:
        model(**padded)
    torch.testing.assert_close(aux.loss, found[1])


def padded():
    short = {"attention_mask": torch.tensor([1] * 6 + [0] * 3)}
    return [{**sample, **short} for sample in samples()]


TWO = r"two balance losses are added, the model's .* and aux_weight=0.5"
COUNTED = "attention_mask has padding, which the layers' balance losses and load biases count"
SILENT = "aux_weight=0.5 has no effect on 3 of 3 MoE layers, whose blocks go on routing"
# model, its options, aux_weight, samples, warnings
WARNED = {
    "none": ("mixtral", {}, 0.5, samples, []),
    "two balance losses": ("mixtral", {"output_router_logits": True}, 0.5, samples, [TWO]),
    "the model's alone": ("mixtral", {"output_router_logits": True}, 0.0, samples, []),
    "padding": ("mixtral", {}, 0.5, padded, []),
    "padding of encoders": ("mixtral", {"is_encoder_decoder": True}, 0.5, padded, [COUNTED]),
    "experts alone": ("gpt_oss", {}, 0.5, padded, [SILENT]),
}  # fmt: skip


@pytest.mark.parametrize("name, options, weight, data, words", WARNED.values(), ids=WARNED)
def test_what_counts_twice_or_not_at_all_is_warned_of_once(
    name, options, weight, data, words, tmp_path
):
    model = make(name, **options).train()
    replace_moe(model)
    args = transformers.TrainingArguments(str(tmp_path), save_strategy="no", **OPTIONS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.MoETrainer(model, args, train_dataset=data(), aux_weight=weight).train()
    texts = [str(each.message) for each in caught]
    ours = [text for text in texts if re.search("balance|aux_weight|padding", text)]
    assert len(ours) == len(words)
    for text, word in zip(ours, words, strict=True):
        assert re.match(word, text)
