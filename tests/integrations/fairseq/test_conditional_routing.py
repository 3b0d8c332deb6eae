"""Conditional routing: the mixture, its budget in the loss, and the branch's names."""

import pytest
import torch
from fairseq import tasks, utils
from helpers.distributed import run_ranks
from helpers.translation import PAD, LoopOverExperts, make_pairs, pair_config
from torch import nn

from fairseq_tutel.checkpoint.layout import split_dense_expert, without_aliases
from fairseq_tutel.distributed import process_world
from fairseq_tutel.integrations.fairseq.criterions.conditional_routing import Budget
from fairseq_tutel.moe import MoEAux

CMR = ("--moe-cmr", "--moe-expert-count", "4", "--moe-capacity-factor", "0")


def build(*words):
    cfg = pair_config(*CMR, *words)
    utils.set_torch_seed(cfg.common.seed)
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model).double()
    for param in model.parameters():
        param.data += 0.1 * torch.randn_like(param)
    return model, task.build_criterion(cfg.criterion)


def stock_of(words):
    cfg = pair_config(*words, moe=False)
    return tasks.setup_task(cfg.task).build_model(cfg.model).double()


class ByHand(nn.Module):
    """(1 - g) FFN(x) + g MoE(x), token by token, in place of a stock layer's FFN."""

    def __init__(self, state, prefix, live=None):
        super().__init__()
        self.loop = LoopOverExperts(state, f"{prefix}.moe_layer")
        names = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
        self.dense = [state[f"{prefix}.{name}"] for name in names]
        self.wg = [state[f"{prefix}.cmr_layer.gate.wg.{name}"] for name in ("weight", "bias")]
        self.live, self.used, self.count = live, 0.0, 0

    def forward(self, x):
        (w1, b1, w2, b2), (w, b), sparse = self.dense, self.wg, self.loop(x)
        y = torch.zeros_like(x)
        for i, j in torch.cartesian_prod(*map(torch.arange, x.shape[:2])).tolist():
            share = torch.sigmoid(w[0] @ x[i, j] + b[0])
            counted = self.live is None or bool(self.live[j, i])
            share = share * counted
            self.used, self.count = self.used + share, self.count + counted
            y[i, j] = (1 - share) * (w2 @ (w1 @ x[i, j] + b1).relu() + b2) + share * sparse[i, j]
        return y


def by_hand(model, words, batch, masked):
    """Output, and the mean share of the experts over both stacks' layers."""
    stock, state, layers = stock_of(words), model.state_dict(keep_vars=True), []
    stock.load_state_dict(state, strict=False)
    net_input = batch["net_input"]
    for name in model.moe_layers:
        side, number = name.split(".")
        tokens = net_input["src_tokens" if side == "encoder" else "prev_output_tokens"]
        layer = getattr(stock, side).layers[int(number)]
        layers.append(ByHand(state, f"{side}.layers.{number}", tokens != PAD if masked else None))
        layer.fc1, layer.fc2, layer.activation_fn = layers[-1], nn.Identity(), nn.Identity()
    x = stock(**net_input)[0]
    return x, sum(layer.used for layer in layers) / sum(layer.count for layer in layers)


# LoopOverExperts routes padding, too, which the mask leaves on the dense FFN alone: g is 0 there
@pytest.mark.parametrize("words", [(), ("--use-moe-pad-mask",), ("--checkpoint-activations",)])
def test_output_budget_and_gradients_are_the_loops(words):
    model, criterion = build(*words, "--cmr-gate-loss-p", "0.8", "--cmr-gate-loss-wt", "0.1")
    batch, masked = make_pairs(1), "--use-moe-pad-mask" in words
    x, share = by_hand(model, [], batch, masked)
    torch.testing.assert_close(model(**batch["net_input"])[0], x, rtol=1e-9, atol=1e-9)
    loss, size, output = criterion(model, batch)
    assert output["cmr_gate_loss"].item() == pytest.approx(size * abs(share.item() - 0.8), rel=1e-5)
    criterion.budget = Budget()
    without = criterion(model, batch)[0]
    assert (loss - without).item() == pytest.approx(0.1 * output["cmr_gate_loss"].item(), rel=1e-4)
    gates = [p for name, p in model.named_parameters() if "cmr_layer" in name]
    (loss - without).backward()
    got = [gate.grad for gate in gates]
    want = torch.autograd.grad(0.1 * size * (share - 0.8).abs(), gates)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_dropout_of_the_gate_scales_what_is_left():
    """A token has the dense output, or 1/(1-p) of its share, which may be more than 1."""
    model, _ = build("--cmr-gate-drop", "0.5")
    mixture = model.encoder.layers[1].cmr_layer
    x, dense, sparse = torch.randn(3, 40, 5, 16).double()
    share = mixture.gate["wg"](x).sigmoid()
    y, (used, count) = mixture(x, dense, sparse, None)
    kept = (y != dense).any(-1, keepdim=True)
    assert 60 < kept.sum() < 140 and (2 * share[kept] > 1).any()
    torch.testing.assert_close(y, torch.where(kept, dense + 2 * share * (sparse - dense), dense))
    assert used.item() == pytest.approx((2 * share * kept).sum().item(), rel=1e-5) and count == 200
    mixture.eval()
    torch.testing.assert_close(mixture(x, dense, sparse, None)[0], dense + share * (sparse - dense))


def test_names_are_the_branchs_which_stores_some_twice():
    model, _ = build()
    state = model.state_dict()
    assert state["encoder.layers.1.cmr_layer.gate.wg.weight"].shape == (1, 16)
    assert state["decoder.layers.1.cmr_layer.gate.wg.bias"].shape == (1,)
    assert "decoder.layers.1.fc1.weight" in state and "decoder.layers.0.cmr_layer" not in str(state)
    of_branch = dict(state)
    for name, value in state.items():
        if ".moe_layer." in name:
            of_branch[name.replace(".moe_layer.", ".cmr_layer.moe_layer.")] = value
    assert len(of_branch) > len(state)
    read = without_aliases(of_branch)
    model.load_state_dict(read)
    assert list(read) == list(state) and len(split_dense_expert(read)[1]) == 2 * 4 * 4


def _share_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(3 + 2 * rank, generator=generator).requires_grad_()


def _term(over_ranks):
    """This rank's term of two layers' gates, and the gates' gradient of it."""
    gates = _share_of(process_world()[0])
    share = torch.stack([gates.sum(), torch.tensor(float(len(gates)))])
    empty = torch.zeros(())
    report = MoEAux(empty, empty, empty, empty, empty, 1, share_of_layer=share)
    term = Budget(0.1, 0.9, over_ranks)([report], 10 + process_world()[0])
    term.backward()
    return float(term), gates.grad


def _both_terms():
    return _term(True), _term(False)


def test_over_ranks_it_is_the_budget_of_one_process_with_all_tokens():
    gates = [_share_of(rank) for rank in range(2)]
    term = 21 * (torch.cat(gates).mean() - 0.9).abs()
    term.backward()
    found, alone = zip(*run_ranks(_both_terms, 2), strict=True)
    assert sum(value for value, _ in found) == pytest.approx(term.item(), rel=1e-6)
    for mine, (_, got) in zip(gates, found, strict=True):
        torch.testing.assert_close(got, mine.grad)
    want = [(10 + rank) * abs(_share_of(rank).mean().item() - 0.9) for rank in range(2)]
    assert [value for value, _ in alone] == pytest.approx(want, rel=1e-6)
