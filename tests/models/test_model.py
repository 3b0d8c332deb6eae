"""The decoder around the MoE layers, compared with fairseq's dense one wherever they must agree."""

import itertools
import math

import pytest
import torch
from fairseq import tasks, utils
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from helpers.assertions import assert_close, rms_ratio
from helpers.distributed import run_ranks
from helpers.training import LENGTH, make_batch, make_config

from fairseq_tutel.config import EXCHANGES
from fairseq_tutel.distributed import StepAgreement, process_world
from fairseq_tutel.models.decoder import ForwardScope, MoETransformerDecoderLayer
from fairseq_tutel.models.transformer_lm_gpt_moe import StableEmbedding
from fairseq_tutel.moe import MoEAux, MoELayer, balance

# one expert that gets every token with weight 1: the layer is a dense FFN
ONE_EXPERT = ("--moe-expert-count", "1", "--moe-top-k", "1", "--moe-capacity-factor", "0")


def build(*words, moe=True):
    cfg = make_config(*words, moe=moe)
    utils.set_torch_seed(cfg.common.seed)
    return tasks.setup_task(cfg.task).build_model(cfg.model)


def forward(model, batch=None):
    return model(**(make_batch(1) if batch is None else batch)["net_input"])


@pytest.mark.parametrize("freq, layers, sparse", [(2, 4, [1, 3]), (1, 3, [0, 1, 2]), (3, 4, [2])])
def test_every_freq_th_layer_is_sparse(freq, layers, sparse):
    words = ("--moe-freq", str(freq), "--decoder-layers", str(layers), "--moe-expert-count", "4")
    model = build(*words)
    assert list(model.moe_layers) == sparse
    names = set(model.state_dict())
    for i in range(layers):
        assert (f"decoder.layers.{i}.moe_layer.gate.wg.weight" in names) == (i in sparse)
        assert (f"decoder.layers.{i}.fc1.weight" in names) == (i not in sparse)
    # printed as one block of text per kind of layer, with the numbers of those that are of it
    printed = str(model.decoder.layers)
    assert printed.count("(moe_layer): MoELayer(") == 1
    assert printed.count("(fc1): Linear(") == (len(sparse) < layers)
    assert f"({', '.join(map(str, sparse))}): " in printed
    _, extra = forward(model)
    assert len(extra["moe"]) == len(sparse) and all(isinstance(a, MoEAux) for a in extra["moe"])


def test_state_dict_differs_from_the_dense_one_in_the_ffn_only():
    dense = set(build(moe=False).state_dict())
    sparse = set(build("--moe-expert-count", "2").state_dict())
    ffn = {f"decoder.layers.1.fc{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")}
    assert dense - sparse == ffn
    assert sparse - dense == {"decoder.layers.1.moe_layer.gate.wg.weight"} | {
        f"decoder.layers.1.moe_layer.experts.{j}.fc{i}.{kind}"
        for j in (0, 1)
        for i in (1, 2)
        for kind in ("weight", "bias")
    }


def test_without_sparse_layers_it_is_the_stock_model_to_the_bit():
    model, stock = build("--moe-freq", "0"), build(moe=False)
    assert type(stock) is TransformerLanguageModel and not model.moe_layers
    stock.load_state_dict(model.state_dict())
    assert model.moe_groups is None
    assert torch.equal(forward(model)[0], forward(stock)[0])


def test_pseudo_moe_has_dense_layers_of_the_given_width():
    model = build("--alternate-decoder-ffn-embed-dim", "40")
    assert not model.moe_layers
    assert model.decoder.layers[0].fc1.weight.shape == (24, 16)
    assert model.decoder.layers[1].fc1.weight.shape == (40, 16)
    assert forward(model)[1]["moe"] == []


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--moe-freq 1",
        "--checkpoint-activations",
        "--share-decoder-input-output-embed",
        "--activation-fn relu",
        "--no-decoder-final-norm",
    ],
)
def test_one_expert_is_the_dense_model(options):
    """Output and every gradient: residuals, norms and positions are those of the stock."""
    words = [*options.split(), "--decoder-layers", "3"]
    sparse = build(*words, *ONE_EXPERT)
    stock = build(*(w for w in words if w not in ("--moe-freq", "1")), moe=False)
    with torch.no_grad():
        for param in sparse.parameters():  # norms start at 1 and 0, where a bug may not show
            param.add_(0.1 * torch.randn_like(param))
    renamed = {
        name.replace("moe_layer.experts.0.", ""): value
        for name, value in sparse.state_dict().items()
        if "gate" not in name
    }
    stock.load_state_dict(renamed)
    batch = make_batch(1, lengths=[8, 5])
    target = torch.randn(2, 8, 32)
    outputs = []
    for model in (sparse, stock):
        out, _ = forward(model, batch)
        (out * target).sum().backward()
        outputs.append(out)
    assert_close("output", *outputs, torch.float32)
    want = {name: param.grad for name, param in stock.named_parameters()}
    for name, param in sparse.named_parameters():
        if "gate" in name:
            assert param.grad.abs().max() < 1e-5
        elif not name.endswith("k_proj.bias"):
            stock_name = name.replace("moe_layer.experts.fc1_", "fc1.")
            stock_name = stock_name.replace("moe_layer.experts.fc2_", "fc2.")
            grad = param.grad[0] if ".experts." in name else param.grad
            assert rms_ratio(grad, want[stock_name]) < 1e-5, name


@pytest.mark.parametrize("before", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("scale", [None, "scale_attn", "scale_heads", "scale_resids"])
def test_one_expert_is_the_dense_layer(scale, before):
    """Also with what stock layers can do and the arch's command line does not reach."""
    cfg = TransformerConfig(activation_fn="gelu", dropout=0.0)
    cfg.decoder.embed_dim, cfg.decoder.ffn_embed_dim, cfg.decoder.attention_heads = 16, 24, 2
    cfg.decoder.normalize_before = before
    if scale is not None:
        setattr(cfg, scale, True)
    scope = ForwardScope()
    layer = MoELayer(16, 1, 24, top_k=1, capacity_factor=0.0)
    sparse = MoETransformerDecoderLayer(cfg, layer, scope)
    stock = TransformerDecoderLayerBase(cfg, no_encoder_attn=True)
    with torch.no_grad():
        for param in sparse.parameters():
            param.add_(0.1 * torch.randn_like(param))
    stock.load_state_dict(
        {
            name.replace("moe_layer.experts.0.", ""): value
            for name, value in sparse.state_dict().items()
            if "gate" not in name
        }
    )
    x = torch.randn(LENGTH, 3, 16)
    mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
    with scope.open(StepAgreement(3 * LENGTH)) as reports:
        out, *_ = sparse(x, self_attn_mask=mask)
        assert len(reports) == 1
    assert_close("output", out, stock(x, self_attn_mask=mask)[0], torch.float32)


def test_capacity_goes_to_the_first_sentence_first():
    """As in the reference; fairseq's layers have the time first."""
    model = build("--moe-expert-count", "4").train()
    layer, seen = model.moe_layers[1], []
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    features = []
    model.decoder.layers[0].register_forward_hook(lambda m, a, out: features.append(out[0]))
    forward(model, make_batch(1, sentences=3))
    assert features[0].shape == (LENGTH, 3, 16) and seen[0].shape == (3, LENGTH, 16)


def test_padding_is_not_routed_if_asked():
    batch = make_batch(1, lengths=[8, 2])
    loads = []
    for words in ((), ("--use-moe-pad-mask",)):
        model = build("--moe-expert-count", "4", "--moe-capacity-factor", "0", *words)
        out, extra = forward(model, batch)
        loads.append(int(extra["moe"][0].load_E.sum()))
    assert loads == [2 * 16, 2 * 10]


@pytest.mark.parametrize(
    "words",
    [
        "--moe-router linear",
        "--moe-router cosine --moe-null-experts 2",
        "--moe-shared-expert-ffn-dim 8 --moe-eom 0.2 --moe-fom 0.2 --moe-null-experts 2",
    ],
)
def test_incremental_decoding_equals_the_whole_sentence(words):
    """Generation feeds one token at a time; nothing is dropped in evaluation."""
    model = build("--moe-expert-count", "4", *words.split()).eval()
    tokens = make_batch(2, sentences=3)["net_input"]["src_tokens"]
    whole, _ = model(tokens)
    state, steps = {}, []
    for t in range(LENGTH):
        out, extra = model.decoder(tokens[:, : t + 1], incremental_state=state)
        assert out.shape[1] == 1 and len(extra["moe"]) == 1
        steps.append(out)
    assert rms_ratio(torch.cat(steps, 1), whole) < 1e-5


def test_evaluation_does_not_depend_on_the_batch():
    model = build("--moe-expert-count", "4").eval()
    tokens = make_batch(2, sentences=6)["net_input"]["src_tokens"]
    together, _ = model(tokens)
    for i in range(6):
        assert rms_ratio(model(tokens[i : i + 1])[0][0], together[i]) < 1e-5


def test_counts_of_all_layers_are_reported():
    model = build("--moe-expert-count", "4", "--moe-freq", "1", "--moe-capacity-factor", "0.5")
    _, extra = forward(model, make_batch(1, sentences=3))
    counts, reports = extra["moe_counts"], extra["moe"]
    tokens = 3 * LENGTH
    assert counts.load.sum(1).tolist() == [2 * tokens] * 2
    assert counts.slots.tolist() == [4 * 2 * int(0.5 * math.ceil(tokens / 4))] * 2
    for kept, received, aux in zip(counts.kept, counts.received, reports, strict=True):
        assert torch.equal(kept, aux.num_kept_per_expert_E)
        assert received.tolist() == [kept.sum()]
    assert (counts.kept.sum(1) < counts.load.sum(1)).any()
    model.eval()
    assert forward(model)[1]["moe_counts"].slots.tolist() == [0, 0]  # rows as many as needed


def test_stable_embedding_is_normalised_in_fp32():
    model = build("--moe-expert-count", "2", "--use-stable-embedding")
    embed = model.decoder.embed_tokens
    assert isinstance(embed, StableEmbedding)
    tokens = torch.tensor([[5, 6]])
    vectors = embed.weight[tokens].double()
    mean, var = vectors.mean(-1, keepdim=True), vectors.var(-1, unbiased=False, keepdim=True)
    want = (vectors - mean) / (var + 1e-5).sqrt()
    assert rms_ratio(embed(tokens), want) < 1e-6
    assert embed.half()(tokens).dtype == torch.float16
    assert rms_ratio(embed(tokens), want) < 2e-3


def test_expert_ffn_dim_is_for_the_experts():
    model = build("--moe-expert-count", "2", "--moe-expert-ffn-dim", "12")
    state = model.state_dict()
    assert state["decoder.layers.1.moe_layer.experts.1.fc1.weight"].shape == (12, 16)
    assert state["decoder.layers.0.fc1.weight"].shape == (24, 16)


def _on_two_ranks(cfg):
    rank, _ = process_world()
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model)
    assert model.moe_groups.num_experts == 2  # the default: one per rank
    assert list(model.moe_groups.local_experts) == [rank]
    tokens = make_batch(0)["net_input"]["src_tokens"]
    with pytest.raises(ValueError, match="generation runs without expert parallelism.*2 ranks"):
        model.decoder(tokens, incremental_state={})
    # evaluation with other sizes on the other rank equals that without it
    model.eval()
    out, _ = model(tokens[:, : 3 + 4 * rank])
    cfg.model.moe_expert_count = 3
    with pytest.raises(ValueError, match="3 experts cannot be spread over 2 ranks"):
        task.build_model(cfg.model)
    return out.shape[1]


def test_model_on_two_ranks():
    assert run_ranks(_on_two_ranks, 2, make_config()) == [3, 7]


def _with_every_exchange():
    rank, _ = process_world()
    results = {}
    for name, degree in itertools.product(EXCHANGES, ("1", "4")):
        model = build(
            "--moe-expert-count",
            "8",
            "--moe-a2a",
            name,
            "--moe-ranks-per-node",
            "2",
            "--moe-overlap-degree",
            degree,
            "--moe-capacity-factor",
            "1.0",
            "--checkpoint-activations",
        )
        assert [layer.exchange.name for layer in model.moe_layers.values()] == [name]
        for training in (True, False):
            torch.manual_seed(rank)
            model.train(training).zero_grad()
            logits, extra = forward(model, make_batch(rank, lengths=[6, 2 + rank]))
            (logits.square().sum() + sum(aux.loss for aux in extra["moe"])).backward()
            grads = [param.grad.clone() for param in model.parameters()]
            results.setdefault((training, degree), {})[name] = [logits.detach(), *grads]
    for (training, degree), by_name in results.items():
        for name, got in by_name.items():
            pairs = zip(got, by_name["linear"], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), (name, degree)
        for a, b in zip(by_name["linear"], results[training, "1"]["linear"], strict=True):
            # sums of other orders
            limit = 1e-5 * max(1.0, float(b.abs().max()))
            torch.testing.assert_close(a, b, rtol=0, atol=limit)
    return len(by_name)


def test_model_on_two_nodes_of_two_ranks_with_every_exchange():
    """And every degree of overlap; recomputed layers exchange again, in the same order."""
    assert run_ranks(_with_every_exchange, 4) == [len(list(EXCHANGES))] * 4


def test_simulation_of_many_ranks_in_one_process(caplog):
    with caplog.at_level("WARNING", logger="fairseq_tutel.models.transformer_lm_gpt_moe"):
        model = build("--moe-simulate-world-size", "8", "--moe-expert-count", "16")
    assert "SIMULATION: this process is one rank of 8" in caplog.text
    assert list(model.moe_groups.local_experts) == [0, 1]
    out, extra = forward(model.train())
    (out.float().square().mean() + extra["moe"][0].loss).backward()
    assert torch.isfinite(out).all()
    assert model.moe_layers[1].experts.fc1_weight.shape[0] == 2
    assert model.moe_layers[1].experts.fc1_weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "words, message",
    [
        ("--base-layers 1", "BASE layers"),
        ("--scale-fc", "--scale-fc"),
        ("--character-embeddings", "--character-embeddings"),
        ("--adaptive-input", "--adaptive-input"),
        ("--adaptive-softmax-cutoff 50", "--adaptive-softmax-cutoff"),
        ("--moe-freq 5", "--moe-freq 5 makes no MoE layer among 2 layers"),
        ("--moe-top-k 3 --moe-expert-count 2", "top_k=3"),
    ],
)
def test_configs_that_never_saw_the_command_line_are_checked_too(words, message):
    """Hydra builds the model from a config."""
    cfg = make_config()
    parts = words.split()
    for option, value in zip(parts[::2], [*parts[1::2], "1"], strict=False):
        name = option.removeprefix("--").replace("-", "_")
        flag = isinstance(cfg.model[name], bool)
        cfg.model[name] = True if flag else int(value)
    with pytest.raises(ValueError, match=message):
        tasks.setup_task(cfg.task).build_model(cfg.model)


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_one_reduction_balances_all_layers_over_all_ranks(recompute, monkeypatch):
    """On one rank the counts of all ranks are its own."""
    words = ["--moe-expert-count", "4", "--moe-freq", "1"]
    if recompute:
        words.append("--checkpoint-activations")
    reductions, losses, grads = [], [], []
    monkeypatch.setattr(balance, "process_world", lambda: (0, 2))
    monkeypatch.setattr(balance, "sum_tensor_over_ranks_", lambda x: reductions.append(x.shape))
    for scope in ("rank", "global"):
        model = build(*words, "--moe-gate-loss-scope", scope)
        _, extra = forward(model)
        loss = torch.stack([aux.loss for aux in extra["moe"]]).sum()
        loss.backward()
        losses.append(loss.item())
        grads.append(model.decoder.layers[0].moe_layer.gate.wg.weight.grad)
    assert reductions == [(2, 5)]  # layers x (experts, tokens)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert rms_ratio(grads[1], grads[0]) < 1e-5
