"""The encoder-decoder with MoE layers, and fairseq's dense one around loops over experts; also
with conditional routing: the mixture, its budget in the loss, and the branch's names."""

import copy
from argparse import Namespace
from unittest import mock

import pytest
import torch
from fairseq import options, tasks, utils
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator
from helpers.distributed import run_ranks
from helpers.training import make_trainer
from helpers.translation import PAD, LoopOverExperts, make_pairs, pair_config
from omegaconf import open_dict
from torch import nn

from fairseq_tutel.checkpoint.layout import split_dense_expert, without_aliases
from fairseq_tutel.distributed import agreement, process_world
from fairseq_tutel.integrations.fairseq.criterions.conditional_routing import Budget
from fairseq_tutel.integrations.fairseq.models import TransformerMoEConfig
from fairseq_tutel.integrations.fairseq.options import data_tags
from fairseq_tutel.integrations.fairseq.options.command_line import REFUSED_TASKS
from fairseq_tutel.integrations.fairseq.options.options import run_options
from fairseq_tutel.moe import MoEAux

FOUR = ("--moe-expert-count", "4")
DROPLESS = (*FOUR, "--moe-capacity-factor", "0")


def build(*words, moe=True):
    cfg = pair_config(*words, moe=moe)
    utils.set_torch_seed(cfg.common.seed)
    return tasks.setup_task(cfg.task).build_model(cfg.model)


def in_fp64(*words):
    """Norms start at 1 and 0, where a bug may not show."""
    model = build(*DROPLESS, *words).double()
    for param in model.parameters():
        param.data += 0.1 * torch.randn_like(param)
    return model


def stock_around(model, words, make_ffn):
    """Stock fairseq's model of these weights around ``make_ffn(state, side, prefix)``."""
    stock, state = build(*words, moe=False).double(), model.state_dict(keep_vars=True)
    assert type(stock) is TransformerModel
    stock.load_state_dict(state, strict=False)
    for name in model.moe_layers:
        side, number = name.split(".")
        layer = getattr(stock, side).layers[int(number)]
        layer = getattr(layer, "module", layer)
        layer.fc1 = make_ffn(state, side, f"{side}.layers.{number}")
        layer.fc2 = layer.activation_fn = nn.Identity()
    return stock


def forward(model, batch=None):
    return model(**(batch or make_pairs(1))["net_input"])


@pytest.mark.parametrize("words, sparse", [
    ("", "encoder.1 encoder.3 decoder.1"),
    ("--moe-freq 1", "encoder.0 encoder.1 encoder.2 encoder.3 decoder.0 decoder.1 decoder.2"),
    ("--encoder-moe-freq 2", "encoder.1 encoder.3"),
    ("--decoder-moe-freq 3", "decoder.2"),
    # Meta's way to a dense stack
    ("--moe-freq 2 --decoder-moe-freq 1000", "encoder.1 encoder.3"),
    ("--encoder-moe-freq 1000 --decoder-moe-freq 3", "decoder.2"),
    ("--moe-freq 1 --encoder-moe-freq 4 --decoder-moe-freq 2", "encoder.3 decoder.1"),
    ("--alternate-decoder-ffn-embed-dim 40", "encoder.1 encoder.3"),
    ("--alternate-ffn-embed-dim 40", "decoder.1"),
])  # fmt: skip
def test_layers_are_sparse_by_the_larger_frequency(words, sparse):
    model = build("--encoder-layers", "4", "--decoder-layers", "3", *FOUR, *words.split())
    assert list(model.moe_layers) == sparse.split()
    names = set(model.state_dict())
    for side, number in (("encoder", 4), ("decoder", 3)):
        for i in range(number):
            expected = f"{side}.{i}" in model.moe_layers
            assert (f"{side}.layers.{i}.moe_layer.experts.3.fc2.bias" in names) == expected
            assert (f"{side}.layers.{i}.fc1.weight" in names) != expected
    _, extra = forward(model)
    assert len(extra["moe"]) == len(extra["moe_counts"].load) == len(model.moe_layers)
    widths = [len(model.state_dict().get(f"decoder.layers.{i}.fc1.bias", "")) for i in range(3)]
    assert (40 in widths) == words.startswith("--alternate-decoder")


@pytest.mark.parametrize("words, how", [
    ("", ""),
    ("--encoder-normalize-before --decoder-normalize-before", "--moe-freq 1"),
    ("--layernorm-embedding", "--encoder-moe-freq 1"),
    ("--checkpoint-activations", ""),
])  # fmt: skip
def test_forward_is_the_stock_model_around_a_loop_over_experts(words, how):
    """In fp64; padding, attention between the stacks, norms and residuals are the stock model's."""
    model = in_fp64(*words.split(), *how.split())

    def loop(state, side, prefix):
        return LoopOverExperts(state, f"{prefix}.moe_layer")

    stock = stock_around(model, words.split(), loop)
    with torch.no_grad():
        torch.testing.assert_close(forward(model)[0], forward(stock)[0], rtol=1e-10, atol=1e-10)


class Mixture(nn.Module):
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


# LoopOverExperts routes padding, too, which the mask leaves on the dense FFN alone: g is 0 there
@pytest.mark.parametrize("words", ["", "--use-moe-pad-mask", "--checkpoint-activations"])
def test_conditional_routing_has_the_loops_output_budget_and_gradients(words):
    words = f"--moe-cmr --cmr-gate-loss-p 0.8 --cmr-gate-loss-wt 0.1 {words}".split()
    model, batch, layers = in_fp64(*words), make_pairs(1), []
    cfg = pair_config(*FOUR, *words)
    criterion = tasks.setup_task(cfg.task).build_criterion(cfg.criterion)

    def mixture(state, side, prefix):
        name = "src_tokens" if side == "encoder" else "prev_output_tokens"
        masked = "--use-moe-pad-mask" in words
        layers.append(Mixture(state, prefix, batch["net_input"][name] != PAD if masked else None))
        return layers[-1]

    x = forward(stock_around(model, [], mixture), batch)[0]
    share = sum(layer.used for layer in layers) / sum(layer.count for layer in layers)
    torch.testing.assert_close(forward(model, batch)[0], x, rtol=1e-9, atol=1e-9)
    loss, size, output = criterion(model, batch)
    assert output["cmr_gate_loss"].item() == pytest.approx(size * abs(share.item() - 0.8), rel=1e-5)
    criterion.budget = Budget()
    added = loss - criterion(model, batch)[0]
    assert added.item() == pytest.approx(0.1 * output["cmr_gate_loss"].item(), rel=1e-4)
    gates = [p for name, p in model.named_parameters() if "cmr_layer" in name]
    added.backward()
    want = torch.autograd.grad(0.1 * size * (share - 0.8).abs(), gates)
    torch.testing.assert_close([g.grad for g in gates], [*want], rtol=1e-4, atol=1e-6)


def test_dropout_of_the_gate_scales_what_is_left():
    """A token has the dense output, or 1/(1-p) of its share, which may be more than 1."""
    model = in_fp64("--moe-cmr", "--cmr-gate-drop", "0.5")
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
    model = in_fp64("--moe-cmr")
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


def _terms():
    """This rank's term of two layers' gates over all ranks and alone, and the gates' gradient."""
    rank, found, empty = process_world()[0], [], torch.zeros(())
    for over_ranks in (True, False):
        gates = _share_of(rank)
        share = torch.stack([gates.sum(), torch.tensor(float(len(gates)))])
        report = MoEAux(empty, empty, empty, empty, empty, 1, share_of_layer=share)
        term = Budget(0.1, 0.9, over_ranks)([report], 10 + rank)
        term.backward()
        found.append((float(term), gates.grad))
    return found


def _share_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(3 + 2 * rank, generator=generator).requires_grad_()


def test_over_ranks_the_budget_is_that_of_one_process_with_all_tokens():
    gates = [_share_of(rank) for rank in range(2)]
    term = 21 * (torch.cat(gates).mean() - 0.9).abs()
    term.backward()
    found, alone = zip(*run_ranks(_terms, 2), strict=True)
    assert sum(value for value, _ in found) == pytest.approx(term.item(), rel=1e-6)
    torch.testing.assert_close([got for _, got in found], [each.grad for each in gates])
    want = [(10 + rank) * abs(_share_of(rank).mean().item() - 0.9) for rank in range(2)]
    assert [value for value, _ in alone] == pytest.approx(want, rel=1e-6)


def test_padding_takes_no_capacity_with_the_mask():
    """And is routed without it, as in Meta's code."""
    batch = make_pairs(1, source=(9, 3, 4), target=(2, 9, 5))
    words = (*FOUR, "--moe-freq", "1", "--moe-gate-loss-over", "unpadded")
    live = {"encoder": 9 + 3 + 4, "decoder": 2 + 9 + 5}
    for given, counts in (((), {"encoder": 27, "decoder": 27}), (("--use-moe-pad-mask",), live)):
        _, extra = forward(build(*words, *given), batch)
        routed = [int(aux.num_routed_KE[0].sum()) for aux in extra["moe"]]
        assert routed == [counts["encoder"]] * 2 + [counts["decoder"]] * 2
    # what stands in padding, or behind a sentence, changes no loss
    model, other = build(*words, "--use-moe-pad-mask"), copy.deepcopy(batch)
    longer = torch.full((3, 4), PAD)
    other["net_input"]["src_tokens"] = torch.cat([longer, other["net_input"]["src_tokens"]], 1)
    losses = [
        [aux.loss.item() for aux in forward(model, each)[1]["moe"][:2]] for each in (batch, other)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("given, message", [
    ({"moe_freq": 7}, "--moe-freq 7 makes no MoE layer among 6 encoder layers; --moe-freq 7 m"),
    ({"decoder_moe_freq": 8}, "--decoder-moe-freq 8 makes no MoE layer among 6 decoder layers:"),
    ({"moe_freq": -1}, "--moe-freq -1 must be at least 0"),
    ({"encoder_layerdrop": 0.2}, "--encoder-layerdrop 0.2 cannot be combined with MoE layers"),
    ({"decoder_layers_to_keep": "0,1"}, "--decoder-layers-to-keep 0,1 cannot be combined"),
    ({"quant_noise_pq": 0.1}, "--quant-noise-pq 0.1 cannot be combined"),
    ({"adaptive_input": True}, "--adaptive-input"),
    ({"adaptive_softmax_cutoff": "50"}, "--adaptive-softmax-cutoff"),
])  # fmt: skip
def test_what_it_cannot_do_is_refused_by_name(given, message):
    with pytest.raises(ValueError) as error:
        run_options(TransformerMoEConfig(**given), TransformerMoEConfig)
    assert message in str(error.value)


@pytest.mark.parametrize("task", REFUSED_TASKS)
def test_a_task_that_cannot_train_it_is_refused_by_name(task):
    words = ["--arch", "transformer_moe", "--task", task, "data", "--langs", "de,en"]
    words = words[:-2] + ["--lang-pairs", "de-en"] if task.startswith("multi") else words
    with pytest.raises(SystemExit) as error:
        options.parse_args_and_arch(options.get_training_parser(), input_args=words)
    assert str(error.value).startswith(f"error: --task {task} is not for --arch transformer_moe: ")


def test_sets_of_the_official_release_load_elsewhere():
    """Dense encoder layers of 0.12.2 save their weights twice."""
    model = build(*FOUR)
    state = model.state_dict()
    names = ("in_proj_weight", "in_proj_bias", "out_proj_weight", "fc1_bias", "fc2_weight")
    state |= {f"encoder.layers.0.{name}": torch.zeros(3) for name in names}
    model.load_state_dict(state)


@pytest.mark.parametrize(
    "rows, hint", [(1, "trained on$"), (3, "or --add-data-source-prefix-tags$")]
)
def test_weights_of_another_dictionary_are_refused_with_the_way_out(rows, hint):
    model = build(*FOUR)
    state = model.state_dict()
    name = "encoder.embed_tokens.weight"
    state[name] = torch.cat([state[name], state[name][:rows]])
    with pytest.raises(ValueError, match=f"of {32 + rows} symbols, and this one has 32: .*{hint}"):
        model.load_state_dict(state)


PUBLISHED = """fake --task translation_multi_simple_epoch --langs de,en --lang-pairs de-en
    --encoder-langtok src --decoder-langtok --add-data-source-prefix-tags"""


@pytest.mark.parametrize("program", ["train", "generate"])
def test_names_of_data_sources_follow_those_of_the_languages(program, tmp_path):
    """As in branch nllb (multilingual_utils.py), so that a published model's rows fit."""
    make = {"train": options.get_training_parser, "generate": options.get_generation_parser}
    given = ["--arch", "transformer_moe"] if program == "train" else ["-s", "de", "-t", "en"]
    args = options.parse_args_and_arch(make[program](), input_args=[*PUBLISHED.split(), *given])
    args.data = str(tmp_path)
    for lang in ("de", "en"):
        (tmp_path / f"dict.{lang}.txt").write_text("a 2\nb 1\n", encoding="utf-8")
    task = tasks.setup_task(args)
    want = ["a", "b", "__de__", "__en__", "<MINED_DATA>", "<MMT_BT_DATA>", "<SMT_BT_DATA>"]
    for dictionary in (task.source_dictionary, task.target_dictionary):
        assert dictionary.symbols[4:] == want
    plain = tasks.setup_task(Namespace(**vars(args) | {"add_data_source_prefix_tags": False}))
    assert plain.source_dictionary.symbols[4:] == want[:4]
    # three lines in the file would give as many rows, and other words to the languages
    with pytest.raises(ValueError, match="trained with --add-data-source-prefix-tags: give it"):
        data_tags.refuse_without_flag(task.args, plain)
    data_tags.refuse_without_flag(plain.args, plain)


def _translate(model, task, batch, beam):
    generator = SequenceGenerator([model], task.target_dictionary, beam_size=beam, max_len_b=12)
    return generator.generate([model], {"net_input": {**batch["net_input"]}})


@pytest.mark.parametrize("mask, beam", [((), 4), (("--use-moe-pad-mask",), 1)])
def test_a_translation_does_not_depend_on_its_batch(mask, beam):
    """With a capacity that drops most pairs in validation."""
    words = ("--moe-expert-count", "4", "--moe-freq", "1", "--moe-eval-capacity-factor", "0.25")
    cfg = pair_config(*words, *mask)
    task = tasks.setup_task(cfg.task)
    utils.set_torch_seed(5)
    model = task.build_model(cfg.model).eval()
    batch = make_pairs(7, source=(7, 5, 3, 9, 6, 2, 8, 4), target=(6, 4, 9, 3, 8, 5, 7, 2))

    def dropped():
        with torch.no_grad():
            _, extra = model(**batch["net_input"])
        return sum(int((aux.load_E - aux.num_kept_per_expert_E).sum()) for aux in extra["moe"])

    assert dropped() > 0
    model.make_generation_fast_(beamable_mm_beam_size=None, need_attn=False)
    assert dropped() == 0  # as in fairseq-generate --score-reference
    together = _translate(model, task, batch, beam)
    sources = batch["net_input"]["src_tokens"]
    lengths = batch["net_input"]["src_lengths"]
    seen = set()
    for i, of_batch in enumerate(together):
        alone = {"src_tokens": sources[i : i + 1, -lengths[i] :], "src_lengths": lengths[i : i + 1]}
        (of_one,) = _translate(model, task, {"net_input": alone}, beam)
        for ours, theirs in zip(of_one, of_batch, strict=True):
            assert ours["tokens"].tolist() == theirs["tokens"].tolist()
            assert float(ours["score"]) == pytest.approx(float(theirs["score"]), abs=1e-5)
        seen.add(tuple(of_one[0]["tokens"].tolist()))
    assert len(seen) > 2  # the model does not say the same of all


def _passes(options):
    """For each, exchanges of integers per forward pass, and what the layers were told."""
    calls, found, rank = [], [], process_world()[0]
    batch = make_pairs(rank, source=(3 + 4 * rank, 3), target=(12 - 4 * rank, 4))
    original = agreement.gather_integers

    def counted(values, group=None):
        calls.append(values)
        return original(values, group)

    for words in options:
        model = build(*FOUR, *words)
        with mock.patch.object(agreement, "gather_integers", counted):
            _, extra = forward(model, batch)
        found.append((len(calls), [aux.num_slots for aux in extra["moe"]]))
        calls.clear()
    return found


def _on_two_ranks():
    """The passes; generation is refused, also in validation, where the ranks share experts."""
    cfg = pair_config(*FOUR)
    model = tasks.setup_task(cfg.task).build_model(cfg.model).eval()
    source = make_pairs(1)["net_input"]
    with pytest.raises(ValueError, match="the experts are spread over"):
        model.encoder(source["src_tokens"], src_lengths=source["src_lengths"])
    with open_dict(cfg):  # before the first update
        cfg.task.eval_bleu = True
    with pytest.raises(ValueError, match="^--eval-bleu .* give --moe-expert-parallel-size 1, so"):
        make_trainer(cfg, make_pairs(0))
    cfg.model.moe_expert_parallel_size = 1
    make_trainer(cfg, make_pairs(0))
    return _passes([(), ("--decoder-moe-freq", "2")])


def test_ranks_agree_once_for_both_stacks_and_do_not_generate():
    # E * K * ceil(T / E) of the longest: 14 source tokens on rank 1, 24 target tokens on rank 0
    want = [(1, [4 * 2 * 4, 4 * 2 * 6]), (1, [4 * 2 * 6])]
    assert run_ranks(_on_two_ranks, 2) == [want] * 2
