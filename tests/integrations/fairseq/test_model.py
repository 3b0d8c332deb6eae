"""The decoder around the MoE layers, compared with fairseq's dense one wherever they must agree."""

import pytest
import torch
from fairseq import tasks, utils
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from helpers.assertions import assert_close, rms_ratio
from helpers.distributed import run_ranks
from helpers.training import LENGTH, make_batch, make_config

from fairseq_tutel.distributed import StepAgreement, process_world
from fairseq_tutel.integrations.fairseq.models.moe_block import (
    ForwardScope,
    MoETransformerDecoderLayer,
)
from fairseq_tutel.integrations.fairseq.models.transformer_lm_gpt_moe import StableEmbedding
from fairseq_tutel.moe import MoEAux, MoELayer, balance


def build(*words, moe=True):
    cfg = make_config(*words, moe=moe)
    utils.set_torch_seed(cfg.common.seed)
    return tasks.setup_task(cfg.task).build_model(cfg.model)


def forward(model):
    return model(**make_batch(1)["net_input"])


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


def test_without_sparse_layers_it_is_the_stock_model_to_the_bit():
    model, stock = build("--moe-freq", "0"), build(moe=False)
    assert type(stock) is TransformerLanguageModel and not model.moe_layers
    stock.load_state_dict(model.state_dict())
    assert model.moe_groups is None
    assert torch.equal(forward(model)[0], forward(stock)[0])


@pytest.mark.parametrize("kind", ["scale_attn", "scale_heads", "scale_resids"])
def test_one_expert_is_the_dense_layer(kind):
    """Also with what stock layers can do and no option says."""
    cfg = TransformerConfig(activation_fn="gelu", dropout=0.0)
    for side in (cfg.encoder, cfg.decoder):
        side.embed_dim, side.ffn_embed_dim, side.attention_heads = 16, 24, 2
    setattr(cfg, kind, True)
    scope = ForwardScope()
    layer = MoELayer(16, 1, 24, top_k=1, capacity_factor=0.0)
    x = torch.randn(LENGTH, 3, 16)
    mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
    sparse = MoETransformerDecoderLayer(cfg, layer, scope, no_encoder_attn=True)
    stock = TransformerDecoderLayerBase(cfg, no_encoder_attn=True)
    with torch.no_grad():
        for param in sparse.parameters():  # norms start at 1 and 0, where a bug may not show
            param.add_(0.1 * torch.randn_like(param))
    state = sparse.state_dict().items()
    dense = {k.replace("moe_layer.experts.0.", ""): v for k, v in state if "gate" not in k}
    stock.load_state_dict(dense)
    with scope.open(StepAgreement(3 * LENGTH)) as reports:
        out, *_ = sparse(x, self_attn_mask=mask)
        assert len(reports) == 1
    want, *_ = stock(x, self_attn_mask=mask)
    assert_close("output", out, want, torch.float32)


@pytest.mark.parametrize("words", [
    "", "--moe-router cosine --moe-null-experts 2",
    "--moe-shared-expert-ffn-dim 8 --moe-eom 0.2 --moe-fom 0.2 --moe-null-experts 2",
])  # fmt: skip
@torch.no_grad()
def test_incremental_decoding_equals_the_whole_sentence(words):
    """Generation feeds one token at a time; nothing is dropped."""
    model = build("--moe-expert-count", "4", *words.split()).eval()
    tokens = make_batch(2, sentences=3)["net_input"]["src_tokens"]
    whole, _ = model(tokens)
    state, steps = {}, []
    for t in range(LENGTH):
        out, extra = model.decoder(tokens[:, : t + 1], incremental_state=state)
        assert out.shape[1] == 1 and extra["moe"] == []  # nobody reads a report
        steps.append(out)
    assert rms_ratio(torch.cat(steps, 1), whole) < 1e-5


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


def _on_two_ranks(cfg):
    rank, _ = process_world()
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model)
    assert model.moe_groups.num_experts == 2  # the default: one per rank
    assert list(model.moe_groups.local_experts) == [rank]
    tokens = make_batch(0)["net_input"]["src_tokens"]
    with pytest.raises(ValueError, match="the experts are spread over 2 ranks"):
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


def test_simulation_of_many_ranks_in_one_process(caplog):
    with caplog.at_level("WARNING", logger="fairseq_tutel.integrations.fairseq"):
        model = build("--moe-benchmark", "simulate_world_size=8", "--moe-expert-count", "16")
    assert "SIMULATION: this process is one rank of 8" in caplog.text
    assert list(model.moe_groups.local_experts) == [0, 1]
    out, extra = forward(model.train())
    (out.float().square().mean() + extra["moe"][0].loss).backward()
    assert torch.isfinite(out).all()
    assert model.moe_layers[1].experts.fc1_weight.shape[0] == 2
    assert model.moe_layers[1].experts.fc1_weight.grad.abs().sum() > 0


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_one_reduction_balances_all_layers_over_all_ranks(recompute, monkeypatch):
    """On one rank the counts of all ranks are its own."""
    words = ["--moe-expert-count", "4", "--moe-freq", "1"]
    if recompute:
        words.append("--checkpoint-activations")
    reductions, losses, grads = [], [], []

    def reduced(x):
        reductions.append(x.shape)
        return x

    monkeypatch.setattr(balance, "sum_tensor_over_ranks_", reduced)
    for scope in ("rank", "global", "update"):
        model = build(*words, "--moe-gate-loss-scope", scope)
        _, extra = forward(model)
        loss = torch.stack([aux.loss for aux in extra["moe"]]).sum()
        loss.backward()
        losses.append(loss.item())
        grads.append(model.decoder.layers[0].moe_layer.gate.wg.weight.grad)
    assert reductions == [(2 * 5,)] * 2  # layers x (experts, tokens)
    for loss, grad in zip(losses[1:], grads[1:], strict=True):
        assert loss == pytest.approx(losses[0], rel=1e-6)
        assert rms_ratio(grad, grads[0]) < 1e-5
