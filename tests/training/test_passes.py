"""What belongs to a forward pass stays with it: choices, records, losses, counts.

The reference is a loop that calls the layers with explicit arguments, and counts by hand.
"""

import copy
import io
import itertools
import pickle

import pytest
import torch
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import training
from fairseq_tutel.moe import MoELayer

M, E, K, RATE = 6, 4, 2, 0.01
NAMES = ["blocks.0.layer", "blocks.1.layer"]

FEATURES = ("replay", "record", "collect", "update", "bias")
RECOMPUTED = {"plain": None, "checkpoint": False, "reentrant": True}
# slow ways to run: the whole model or one of its blocks is compiled, in two orders
COMPILED = (
    "compiled, then asked",
    "asked, then compiled",
    "block compiled, then asked",
    "asked, then compiled with checkpoints",
)
# passes of one update; those in capitals have gradients, and one backward pass follows all
ORDERS = {"one": "A", "two": "AB", "no-grad between": "ArB", "evaluation between": "AeB"}
CASES = [*itertools.product(FEATURES, RECOMPUTED, list(ORDERS)[1:])]  # which include "one"
CASES += [(feature, COMPILED[i % 4], list(ORDERS)[1 + i % 3]) for i, feature in enumerate(FEATURES)]


class Block(nn.Module):
    def __init__(self, seed, **options):
        super().__init__()
        self.before, self.after = nn.Linear(M, M), nn.Linear(M, M)
        self.layer = MoELayer(M, E, 8, top_k=K, capacity_factor=0, seed=seed, **options)

    def forward(self, h):
        return (h + self.after(self.layer(self.before(h)))).tanh()


class Model(nn.Module):
    def __init__(self, recomputes=None, whole=False, **options):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(seed, **options) for seed in range(2))
        self.recomputes, self.whole = recomputes, whole

    def forward(self, h):
        for block in self.blocks:
            if self.recomputes is None or self.whole:
                h = block(h)
            else:
                h = checkpoint(block, h, use_reentrant=self.recomputes)
        return h


def build(feature, run):
    options = {"update": {"balance_scope": "update"}}
    options["bias"] = {"load_bias": "sign", "load_bias_rate": RATE}
    recomputes = False if run.endswith("checkpoints") else RECOMPUTED.get(run)
    whole = run in RECOMPUTED and feature == "replay"
    return Model(recomputes, whole, **options.get(feature, {})).double()


def caller(model, run):
    """Return the function that runs a pass."""
    if model.whole and model.recomputes is not None:
        return lambda h: checkpoint(model, h, use_reentrant=model.recomputes)
    if run.startswith("block"):
        model.blocks[1].compile(backend="eager")
    elif "compiled" in run:
        backend = "aot_eager" if run == "asked, then compiled" else "eager"
        return torch.compile(model, backend=backend)
    return model


def inputs(letter, feature="replay"):
    """A and B replay with the same tokens, so that these do not tell them apart."""
    seed = ord("A" if feature == "replay" and letter == "B" else letter)
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(2, 5, M, generator=generator, dtype=torch.float64)
    return h.requires_grad_(letter.isupper())


def given(letter):
    generator = torch.Generator().manual_seed(ord(letter))
    return {name: torch.rand(2, 5, E, generator=generator).topk(K).indices for name in NAMES}


def reference(feature, order):
    """Run the passes by explicit calls; return gradients, and what each pass should report."""
    model, total, all_chosen, all_losses = build(feature, "plain"), 0, [], []
    pairs, number = torch.zeros(2, E, dtype=torch.float64), 0
    bias_counts = torch.zeros(2, E, dtype=torch.float64)
    for letter in ORDERS[order]:
        model.train(letter != "e")
        with torch.set_grad_enabled(letter.isupper()):
            h = inputs(letter, feature)
            chosen, losses, here = [], [], []
            for i, (name, block) in enumerate(zip(NAMES, model.blocks, strict=True)):
                x = block.before(h)
                choices = given(letter)[name] if feature == "replay" and letter in "AB" else None
                y, aux = block.layer(x, choices=choices, return_aux=True, balance_later=True)
                prob = block.layer.gate.wg(x).softmax(-1)
                best = prob.topk(K).indices if choices is None else choices
                count = torch.bincount(best[..., 0].flatten(), minlength=E).double()
                here.append(count)
                loss = aux.loss
                if feature == "update" and letter != "e":  # the layer has left it to its caller
                    share = (pairs[i] + count) / (number + count.sum())
                    loss = loss + E * prob.flatten(0, 1).mean(0) @ share
                losses.append(loss)
                chosen.append(best)
                if letter.isupper():
                    bias_counts[i] += torch.bincount(best.flatten(), minlength=E)
                h = (h + block.after(y)).tanh()
            if letter.isupper():
                pairs, number = pairs + torch.stack(here), number + here[0].sum()
                total = total + h.square().sum()
                if feature in ("collect", "update"):
                    total = total + sum(losses)
            all_chosen.append(chosen)
            all_losses.append(sum(losses).item())
    total.backward()
    bias = RATE * (bias_counts.mean(1, keepdim=True) - bias_counts).sign()
    return grads(model), all_chosen, all_losses, bias - bias.mean(1, keepdim=True)


def grads(model):
    return [param.grad for param in model.parameters() if param.grad is not None]


def a_pass(feature, run, model, call, letter, passes):
    """Run a pass with the feature; return its output with loss, and what it reports."""
    h = inputs(letter, feature)
    if feature == "replay" and letter in "AB":
        with training.replay_choices(model, given(letter)):
            return call(h).square().sum(), None
    if feature == "record":
        with training.record_choices(model) as choices:
            y = call(h)
        return y.square().sum(), [choices[name].long() for name in NAMES]
    if feature not in ("collect", "update", "bias"):
        return call(h).square().sum(), None
    with training.collect_aux(model) as aux:
        loss = call(h).square().sum()
    passes.append(aux)
    if run == "reentrant" and letter.isupper():
        with pytest.raises(RuntimeError, match=r"blocks.0.layer.* has no gradient"):
            _ = aux.loss
        with torch.no_grad():
            return loss, aux.loss.item()
    return loss + (0 if feature == "bias" else aux.loss), aux.loss.item()


def run_passes(feature, run, order):
    """Run an update; return gradients, what each pass reported, and the moved biases."""
    model = build(feature, run)
    call = caller(model, run)
    if run.endswith("then asked"):
        call(inputs("A"))
        training.end_update(model)
    total, reports, passes = 0, [], []
    for letter in ORDERS[order]:
        model.train(letter != "e")
        with torch.set_grad_enabled(letter.isupper()):
            loss, report = a_pass(feature, run, model, call, letter, passes)
        total = total + loss if letter.isupper() else total
        reports.append(report)
    model.train()
    total.backward()
    if feature == "bias":
        training.update_load_bias(model, passes)
    return model, reports


@pytest.mark.parametrize("feature, run, order", CASES)
def test_a_pass_keeps_what_is_its_own(feature, run, order):
    torch._dynamo.reset()
    gradients, chosen, losses, biases = reference(feature, order)
    model, reports = run_passes(feature, run, order)
    if feature == "record":
        torch.testing.assert_close(reports, chosen)
    elif feature in ("collect", "update"):
        assert reports == pytest.approx(losses, rel=1e-9)
    elif feature == "bias":
        got = torch.stack([block.layer.gate.load_bias for block in model.blocks])
        torch.testing.assert_close(got.double(), biases, rtol=0, atol=1e-7)
    if not (feature in ("collect", "update") and run == "reentrant"):  # refused
        torch.testing.assert_close(grads(model), gradients)
    assert not any(block.layer.requests.served for block in model.blocks)


def twice(outer, inner):
    """A checkpoint in another."""
    inside = lambda model, h: checkpoint(model, h, use_reentrant=inner)  # noqa: E731
    return lambda model: lambda h: checkpoint(inside, model, h, use_reentrant=outer)


def with_block_inside(reentrant):
    """A checkpointed function that opens a block itself."""

    def replayed(model, h):
        with training.replay_choices(model, given("A")):
            return model(h)

    return lambda model: lambda h: checkpoint(replayed, model, h, use_reentrant=reentrant)


MAKE = [twice(outer, inner) for outer in (True, False) for inner in (True, False)]
MAKE += [with_block_inside(True), with_block_inside(False), checkpoint_wrapper]  # fairseq's


@pytest.mark.parametrize("make", MAKE)
def test_a_block_reaches_the_recomputations_of_its_calls_alone(make):
    """The backward pass runs in a block of another pass, and the inner of two blocks counts."""
    gradients, _, _, _ = reference("replay", "one")
    model = build("replay", "plain")
    call = make(model)
    with training.replay_choices(model, given("B")), training.replay_choices(model, given("A")):
        y = call(inputs("A"))
    copied, h = copy.deepcopy(model), inputs("r")
    with training.record_choices(model) as choices:  # of another pass
        y.square().sum().backward()
        assert not choices
        model(h)
    torch.testing.assert_close(grads(model), gradients)
    with training.record_choices(copied) as of_copy:
        copied(h)
    assert all(torch.equal(of_copy[name], choices[name]) for name in NAMES)


def test_copies_and_files_of_a_model_begin_without_a_pass():
    model, h = build("replay", "checkpoint"), inputs("A")
    free = model(h)
    with training.replay_choices(model, given("A")), training.collect_aux(model):
        y = model(h)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    torch.save(model, file := io.BytesIO())  # the recomputation is still to come
    file.seek(0)
    copies.append(torch.load(file, weights_only=False))
    assert not torch.allclose(y, free)
    for each in copies:
        torch.testing.assert_close(each(h), free)
        assert not any(block.layer.requests.served for block in each.blocks)


def test_biases_move_by_all_calls_and_others_stay():
    """Layers called twice, skipped, without a bias; a pass without gradient does not count."""
    layers = [MoELayer(M, E, 8, load_bias=rule) for rule in ("sign", "quantile", "none", "sign")]
    model, x = nn.Sequential(*layers), torch.randn(3, 7, M)
    with torch.no_grad():
        layers[3].gate.load_bias.add_(torch.randn(E))
    before = layers[3].gate.load_bias.clone()
    with training.collect_aux(model) as aux:
        reports = [layers[i](x[j], return_aux=True)[1] for i in range(3) for j in range(2)]
    with torch.no_grad(), training.collect_aux(model) as other:
        layers[0](x[2])
    training.update_load_bias(model, [aux, other])
    for i in range(2):
        alone = MoELayer(M, E, 8, load_bias=layers[i].config.load_bias).gate
        alone.update_load_bias(sum(aux.bias_counts.long() for aux in reports[2 * i : 2 * i + 2]))
        torch.testing.assert_close(layers[i].gate.load_bias, alone.load_bias)
        assert alone.load_bias.any()
    assert torch.equal(layers[3].gate.load_bias, before)
