"""``MoETrainer`` beside a loop in plain torch; what it saves, and what it refuses.

Training on several ranks, clipping and resuming: tests/examples/test_hosts.py.
"""

import re
import warnings

import pytest
import torch
import transformers
from helpers.assertions import assert_same_state
from tiny_models import call_all, logits, make, tokens

from fairseq_tutel import training
from fairseq_tutel.integrations.transformers import replace_moe, trainer

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


def replaced(name="mixtral", moe=None, **options):
    model = make(name, **options).train()
    return model, replace_moe(model, **(moe or {}))


def host_of(model, folder, options=None, **given):
    args = transformers.TrainingArguments(str(folder), **{**OPTIONS, **(options or {})})
    return trainer.MoETrainer(model, args, **{"train_dataset": samples(), **given})


@pytest.mark.parametrize("max_norm", [0.1, 0.0], ids=["clipped", "not clipped"])
def test_trains_as_a_plain_loop_and_saves_what_the_original_class_loads(max_norm, tmp_path):
    moe = {"load_bias": "none", "balance_scope": "update"}
    (model, blocks), (plain, _) = replaced(moe=moe), replaced(moe=moe)
    host_of(model, tmp_path, {"max_grad_norm": max_norm}, aux_weight=0.5, blocks=blocks).train()

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
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)
    loaded = type(plain).from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    replace_moe(loaded, **moe)
    assert_same_state(loaded.state_dict(), model.state_dict())


def test_load_biases_move_and_evaluation_has_no_aux_loss(tmp_path):
    model, _ = replaced(moe={"load_bias": "sign"})
    host = host_of(model, tmp_path, {"save_strategy": "no"}, eval_dataset=samples())
    host.train()
    assert model.model.layers[0].mlp.gate.load_bias.any()
    found, batch = host.evaluate()["eval_loss"], tokens(2 * STEPS * MICRO)
    with torch.no_grad():
        want = torch.stack([model(x, labels=x).loss for x in batch.split(8)]).mean()
    assert found == pytest.approx(want.item(), rel=1e-4)


def test_the_best_model_comes_from_the_set_of_all_ranks(tmp_path):
    (model, _), (best, _) = replaced(), replaced()
    options = {**BEST, "eval_steps": 1, "metric_for_best_model": "loss"}
    options |= {"max_steps": 3, "save_steps": 1, "learning_rate": 1.0}
    host = host_of(model, tmp_path, options, train_dataset=samples() * 2, eval_dataset=samples())
    host.train()
    training.load_checkpoint(f"{host.state.best_model_checkpoint}/run.pt", best)
    assert not host.state.best_model_checkpoint.endswith("-3")
    assert_same_state(model.state_dict(), best.state_dict())


BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": STEPS}
BLOCKS, FROZEN = "has LoRA, which blocks= cannot hold", "has frozen LoRA"
EXPERTS = "has adapters of peft, which checkpoints cannot hold"
# order of calls -> what is refused, without and with blocks=; None: saved
ORDERS = {
    "RB": (EXPERTS, EXPERTS), "RP": (None, None), "PR": (None, None), "RA": (None, None),
    "AR": (None, None), "RL": (None, BLOCKS), "RLP": (FROZEN, BLOCKS), "RPL": (None, BLOCKS),
    "RPl": (None, BLOCKS), "PRl": (None, BLOCKS), "RAl": (None, BLOCKS),
    "RlA": (FROZEN, BLOCKS),
}  # fmt: skip


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
    pytest.importorskip("peft")
    model, blocks = call_all(order, "mixtral")
    options = {"save_steps": 1}, {"blocks": blocks if with_blocks else None}
    if refused := ORDERS[order][with_blocks]:
        with pytest.raises(ValueError, match=refused):
            host_of(model, tmp_path, options[0], **options[1])
        return
    host_of(model, tmp_path, options[0], **options[1]).train()
    want, folder = logits(model.eval()), tmp_path / f"checkpoint-{STEPS}"
    torch.testing.assert_close(logits(reloaded(order, folder)), want, rtol=1e-4, atol=1e-4)
    before = reloaded(order, tmp_path / "checkpoint-1")
    assert (logits(before) - want).abs().max() > 1e-2


def test_another_version_is_named(monkeypatch, tmp_path):
    model, _ = replaced()
    monkeypatch.setattr(transformers, "__version__", "6.1.0")
    with pytest.warns(UserWarning, match=r"tested with transformers >=5.23,<6, this is 6.1.0"):
        host_of(model, tmp_path)
    monkeypatch.setattr(trainer.Trainer, "_clip_grad_norm", lambda self: None)
    with pytest.raises(ImportError, match=r">=5.23,<6, this is 6.1.0: Trainer._clip_grad_norm"):
        host_of(model, tmp_path)


def reentrant(**kwargs):
    return {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs}


# words -> options of the layer, of TrainingArguments, and of activation checkpointing before
REFUSED = {
    "whole checkpoints": ({}, {**BEST, "save_only_model": True}, None),
    "give use_reentrant=False, or aux_weight=0": ({}, reentrant(use_reentrant=True), None),
    "re-entrant": ({}, reentrant(debug=True), None),  # torch's default
    "re-entran": ({}, {}, {"use_reentrant": True}),
    "route_scale=2.0, which the original block": ({"route_scale": 2.0}, {}, None),
    "load_bias='sign', which the original router": ({"load_bias": "sign"}, {}, None),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_would_lose_experts_or_losses_is_refused(words, tmp_path):
    moe, given, before = REFUSED[words]
    model, blocks = replaced(moe=moe)
    if before is not None:
        model.activation_checkpointing_enable(before)
    with pytest.raises(ValueError, match=words):
        host_of(model, tmp_path, given, eval_dataset=samples(), blocks=blocks)


def test_ranks_that_would_train_alone_are_refused(monkeypatch, tmp_path):
    """As those of torchrun without GPUs and without use_cpu."""
    model, _ = replaced()
    args = host_of(model, tmp_path).args
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="connected 1 of the 2 ranks .* use_cpu=True"):
        trainer.MoETrainer(model, args)


def test_a_load_bias_that_peft_would_lose_is_refused(tmp_path):
    with pytest.raises(ValueError, match="load_bias='sign', which peft does not save"):
        host_of(call_all("RP", "mixtral", load_bias="sign")[0], tmp_path)
    host_of(call_all("RPl", "mixtral", load_bias="sign")[0], tmp_path)


@pytest.mark.parametrize("skip", [False, True], ids=["", "skipped"])
@pytest.mark.parametrize("row", [[0] * 4 + [1] * 5, [1] * 5 + [0] * 4], ids=["left", "right"])
def test_padding_does_not_count(row, skip, tmp_path):
    (model, _), ids, mask = replaced(), tokens(2), torch.tensor([row, [1] * 9])
    model.double()
    host = host_of(model, tmp_path, aux_weight=1.0, skip_padding=skip)
    host.current_gradient_accumulation_steps = 1
    positions, real = (mask.cumsum(1) - 1).clamp(min=0), mask.bool()
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


@pytest.mark.parametrize("name, options, weight, data, words", [
    ("mixtral", {}, 0.5, samples, []),
    ("mixtral", {"output_router_logits": True}, 0.5, samples, [TWO]),
    ("mixtral", {"output_router_logits": True}, 0.0, samples, []),
    ("mixtral", {}, 0.5, padded, []),
    ("mixtral", {"is_encoder_decoder": True}, 0.5, padded, [COUNTED]),
    ("gpt_oss", {}, 0.5, padded, [SILENT]),
])  # fmt: skip
def test_what_counts_twice_or_not_at_all_is_warned_of_once(
    name, options, weight, data, words, tmp_path
):
    model, _ = replaced(name, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = {"train_dataset": data(), "aux_weight": weight}
        host_of(model, tmp_path, {"save_strategy": "no"}, **given).train()
    texts = [str(each.message) for each in caught]
    ours = [text for text in texts if re.search("balance|aux_weight|padding", text)]
    assert len(ours) == len(words) and all(map(re.match, words, ours))
