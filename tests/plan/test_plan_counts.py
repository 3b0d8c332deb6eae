"""Parameter counts against models on the meta device, activations against what autograd saves."""

from types import SimpleNamespace

import pytest
import torch
from helpers.saved import SavedBytes
from plan_helpers import A100, memory_of, pairs, settings_of, small, work_of

from fairseq_tutel.backends import torch as torch_backend
from fairseq_tutel.integrations.fairseq.criterions import (
    MoECrossEntropyCriterion,
    MoELabelSmoothedCrossEntropyCriterion,
)
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.plan.gpu_memory import make_layers
from fairseq_tutel.plan.parameters import build_model, count_parameters, expert_sizes
from fairseq_tutel.plan.planner import flop_matched, make_plan

SLICED = ["model.moe_expert_count=2", "model.moe_expert_placement=sliced"]


@pytest.fixture(autouse=True)
def experts_as_on_a_gpu(monkeypatch):
    """Where the values after the activation are kept, too; a CPU computes them again."""
    forward = torch_backend.network_fwd

    def keeping(source, params, **options):
        out, kept = forward(source, params, **options)
        active = kept.hidden.new_empty(len(kept.hidden), params[2].shape[2])
        return out, kept._replace(active=active)

    monkeypatch.setattr(torch_backend, "network_fwd", keeping)


def build_without_dropout(settings):
    """The CPU's attention without tables of scores has no dropout, unlike a GPU's."""
    return build_model(settings.replace(model={"attention_dropout": 0.0}))


def training_loss(settings, model):
    """A function that runs the model and its criterion once and returns the loss."""
    dictionary, pairs = model.decoder.dictionary, hasattr(model, "encoder")
    task = SimpleNamespace(target_dictionary=dictionary, source_dictionary=dictionary)
    kind = MoELabelSmoothedCrossEntropyCriterion if pairs else MoECrossEntropyCriterion
    criterion = kind(task, sentence_avg=False)
    shape = (settings.batch_size, settings.tokens_per_sample)
    tokens = torch.randint(4, settings.vocabulary, shape)
    given = {"src_tokens": tokens, "src_lengths": torch.full(shape[:1], shape[1])}
    if pairs:
        given["prev_output_tokens"] = tokens.roll(1, 1)
    sample = {"net_input": given, "target": tokens, "ntokens": tokens.numel()}
    return lambda: criterion(model, sample)[0]


def check_activations(settings, dtype=torch.float32):
    """Compare what autograd saves in a forward pass with what the planner counts."""
    model = build_without_dropout(settings).to(dtype)
    loss = training_loss(settings, model)
    with SavedBytes(*model.parameters()) as saved:
        loss()
    measured = saved.total(without_last_dim=settings.vocabulary)
    memory = memory_of(settings)
    predicted = memory.activations
    if not settings.model.checkpoint_activations:
        predicted += memory.dispatch
        # the CPU's attention of a stack to itself writes its result in sentence order
        width = settings.precision.element * settings.model.decoder_embed_dim
        predicted -= sum(each.layers for each in settings.stacks) * settings.tokens * width
    # tables of the routing, masks and norms' statistics are not counted
    assert predicted <= measured <= 1.1 * predicted


# overrides of a language model, or a command's words of an encoder-decoder
@pytest.mark.parametrize(
    "row",
    [
        ["model.moe_expert_count=2"],  # E < W: two replicas of each expert
        [*SLICED, "model.share_decoder_input_output_embed=false"],
        ["model.moe_expert_count=16", "model.moe_freq=1", "model.decoder_learned_pos=true",
         "model.layernorm_embedding=true"],
        ["model.decoder_layers=5", "model.moe_freq=3", "model.moe_expert_ffn_dim=96",
         "model.no_token_positional_embeddings=true", "model.no_decoder_final_norm=true"],
        ["model.scale_attn=true", "model.scale_heads=true", "model.scale_resids=true"],
        ["model.use_stable_embedding=true", "model.moe_router=cosine",
         "model.moe_cosine_proj_dim=8"],
        ["model.moe_shared_expert_ffn_dim=96", "model.moe_null_experts=3"],
        ["model.moe_shared_expert_ffn_dim=96", "model.moe_shared_expert_gate=true"],
        [*SLICED, "model.moe_expert_network=geglu"],
        ["model.decoder_input_dim=32", "model.decoder_output_dim=48",
         "model.share_decoder_input_output_embed=false"],
        ["model.alternate_decoder_ffn_embed_dim=512", "model.moe_freq=0"],
        "--moe-expert-count 2 --moe-expert-placement sliced --decoder-moe-freq 1",
        "--encoder-layers 5 --encoder-moe-freq 2 --moe-expert-ffn-dim 96",
        "--alternate-ffn-embed-dim 40 --decoder-ffn-embed-dim 96",
        "--moe-freq 0",
        "--moe-cmr --moe-shared-expert-ffn-dim 24",
    ],
)  # fmt: skip
def test_the_layers_and_the_rest_are_the_whole(row):
    settings = pairs(row, gpus=4) if isinstance(row, str) else small(*row)
    plan = make_plan(settings, A100)
    stack = make_layers(settings, plan.parameters, plan.traffic)
    local = sum(layer.parameters for layer in stack) + plan.parameters.embeddings
    assert local == plan.parameters.per_gpu
    assert len(stack) == sum(each.layers for each in settings.stacks)
    if isinstance(row, str) and settings.routing:
        more = plan.work.model_flops - flop_matched(plan).work.model_flops
        gates = sum(2 * s.dim * len(s.sparse) for s in settings.stacks)
        assert more == pytest.approx(3 * gates * settings.routing.num_experts, rel=1e-9)


def test_published_counts():
    """Of the 8-GPU example of README.moe.md in fairseq's moe branch; of the 1.1T model on 512."""
    parameters = count_parameters(settings_of("meta_4.1b", gpus=8))
    assert (parameters.dense, parameters.local) == (908_423_168, 402_776_064)
    settings = settings_of(gpus=512)
    parameters = count_parameters(settings)
    memory, work = memory_of(settings, parameters), work_of(settings, parameters)
    assert 1.095e12 < parameters.total < 1.105e12
    assert parameters.stacks[0].expert == 134_238_208 and 6.6e9 < parameters.per_gpu < 6.8e9
    assert 53e9 < memory.states < 54e9 and memory.peak < 80e9
    assert (work.capacity, work.exchange_bytes, work.bytes_per_peer) == (96, 384 << 20, 768 << 10)
    assert work.exchanges == 6 * 16


def test_what_sharded_statistics_free():
    """On 512 GPUs each has those of its experts and of one dense tensor; the embedding is one."""
    plan, twice = "distributed_training.zero_sharding=os", "model.moe_expert_count=1024"
    before, after = settings_of(gpus=512), settings_of(overrides=[plan], gpus=512)
    parameters = count_parameters(after)
    assert parameters.owned == 51200 * 4096 == parameters.largest
    memory, peak = memory_of(after, parameters), memory_of(before, parameters).peak
    assert peak == pytest.approx(62.5e9, rel=2e-3) and memory.peak == pytest.approx(
        45.2e9, rel=2e-3
    )
    assert memory.optimizer == 4 * (parameters.local + parameters.owned)
    # on the other GPUs, which own a matrix of a layer
    assert memory.peak - 4 * (parameters.owned - 4096 * 16384) == pytest.approx(44.6e9, rel=2e-3)
    # as many experts again fit where one each did
    assert memory_of(settings_of(overrides=[plan, twice], gpus=512)).peak < 76e9
    assert memory_of(settings_of(overrides=[twice], gpus=512)).peak > 80e9
    # all ranks own something of a small model: parts are as equal as whole tensors can be
    small_one = count_parameters(small("model.moe_expert_count=4", gpus=2))
    assert 0.5 * small_one.dense <= small_one.owned < 0.52 * small_one.dense


def test_expert_groups():
    """A group of 4 GPUs holds what 4 GPUs alone would; its replicas' gradients are all-reduced."""
    alone, grouped = small(gpus=4), small("model.moe_expert_parallel_size=4", gpus=16)
    parameters = count_parameters(grouped)
    assert parameters == count_parameters(alone) and parameters.local_experts == 2
    work, before = work_of(grouped, parameters), work_of(alone, parameters)
    assert (work.exchange_bytes, work.exchange_peers) == (before.exchange_bytes, 4)
    assert (work.replicas, work.replica_bytes) == (4, parameters.local * 4)
    with pytest.raises(ValueError, match="expert.parallel.size.4.*placement.*sliced"):
        count_parameters(grouped.with_placement("sliced"))
    with pytest.raises(ValueError, match="expert.parallel.size.3 .* 16, .* 8"):
        small("model.moe_expert_parallel_size=3", gpus=16)


F32 = torch.float32
KEPT = [
    (F32, []),
    (F32, ["model.activation_fn=relu", "model.moe_capacity_factor=2.0"]),
    (F32, ["model.moe_top1_expert=true", "model.moe_freq=1"]),
    (F32, ["model.moe_freq=0"]),
    *((F32, [*SLICED, f"model.moe_parallelism_r={r}"]) for r in (1, 2, 0)),
    (F32, ["model.moe_shared_expert_ffn_dim=512"]),
    (F32, ["model.moe_expert_network=swiglu"]),
    (torch.bfloat16, ["common.bf16=true", "common.memory_efficient_bf16=true"]),
]
KEPT = [(kind, [*row, f"model.checkpoint_activations={c}"])
        for kind, row in KEPT for c in ("false", "true")]  # fmt: skip
WORDS = ("", "--checkpoint-activations", "--moe-freq 0", "--moe-cmr",
         "--encoder-moe-freq 1 --moe-freq 0 --decoder-ffn-embed-dim 128")  # fmt: skip


@pytest.mark.parametrize(("dtype", "row"), [*KEPT, *((F32, words) for words in WORDS)])
def test_activations_are_what_autograd_saves(dtype, row):
    check_activations(pairs(row) if isinstance(row, str) else small(*row), dtype)


def dispatch_rows(settings):
    return settings.routing.dispatch_rows(settings.tokens)


def peak_of_step(settings):
    """Measured peak bytes of one forward and backward pass over what was there before."""
    torch.manual_seed(0)
    model = build_without_dropout(settings)
    loss = training_loss(settings, model)
    loss().backward()
    model.zero_grad()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        for _ in range(settings.update_freq):
            loss().backward()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


@pytest.mark.parametrize(
    ("overrides", "saved_by_torch"),
    [
        (["model.checkpoint_activations=false"], 0),
        # A layer's backward pass is the peak: torch's operators write the gradient before the
        # activation over that after it, kernels have a buffer for each.
        (["model.checkpoint_activations=true"], 1),
        # the loss is the peak
        (["model.checkpoint_activations=true", "task.dict_size=3996"], 0),
        (["task.dict_size=3996", "optimization.update_freq=[2]"], 0),
        ([*SLICED, "model.moe_parallelism_r=1", "model.checkpoint_activations=false"], 0),
    ],
)
def test_peak_equals_a_measured_run(overrides, saved_by_torch):
    settings = small("dataset.batch_size=16", *overrides)
    memory = memory_of(settings)
    measured = peak_of_step(settings) + memory.weights + memory.optimizer
    # torch's operators add the bias in a tensor of its own, where a GPU's kernels need none
    temporary = dispatch_rows(settings) * settings.stacks[0].expert_dim * 4
    assert memory.peak - saved_by_torch * temporary < 1.06 * measured
    assert measured - temporary < 1.06 * memory.peak


@pytest.mark.gpu
def test_peak_equals_a_measured_run_on_the_gpu():
    settings = small(
        "dataset.batch_size=16", "model.decoder_embed_dim=512", "model.decoder_ffn_embed_dim=2048",
        "common.fp16=true", "common.memory_efficient_fp16=true", "task.tokens_per_sample=256",
    )  # fmt: skip
    memory = memory_of(settings)
    with torch.device("cuda"):
        model = build_without_dropout(settings).half().cuda()
        loss = training_loss(settings, model)
        loss().backward()
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        loss().backward()
    measured = torch.cuda.max_memory_allocated() + memory.optimizer
    assert memory.peak == pytest.approx(measured, rel=0.15)


def test_rows_of_the_dispatch_buffer():
    assert dispatch_rows(small()) == 8 * 2 * 32  # E K ceil(T / E)
    assert dispatch_rows(small("model.moe_capacity_factor=1.5")) == 8 * 2 * 48
    assert dispatch_rows(small("model.moe_capacity_factor=0")) == 2 * 256
    assert dispatch_rows(small("model.moe_top_k=4")) == 8 * 4 * 32
    assert dispatch_rows(small("model.moe_null_experts=8")) == 8 * 2 * 16  # half are for nobody
    assert dispatch_rows(small("model.moe_null_experts=8", "model.moe_capacity_factor=0")) == 256


def test_flops_of_a_model_with_one_token_wide_layers():
    """Counted by hand for one dense and one MoE layer."""
    settings = small("model.decoder_layers=2", "model.checkpoint_activations=false")
    parameters = count_parameters(settings)
    work = work_of(settings, parameters)
    attention = 2 * (8 * 64 * 64 + 4 * 64 * 64)
    ffn, experts, gate, output = 4 * 64 * 256, 2 * 4 * 64 * 256, 2 * 64 * 8, 2 * 64 * 600
    assert work.model_flops == 3 * (attention + ffn + experts + gate + output)
    assert work.hardware_flops == work.model_flops  # T divides by E: no row is empty
    again = work_of(small("model.decoder_layers=2"), parameters)
    assert again.hardware_flops == work.model_flops + (attention + ffn + experts + gate)
    assert (work.exchanges, again.exchanges) == (4, 6)
    wider = work_of(small("model.decoder_layers=2", "model.moe_capacity_factor=2"), parameters)
    assert wider.hardware_flops - again.hardware_flops == 4 * experts
    nulls = work_of(small("model.decoder_layers=2", "model.moe_null_experts=8"), parameters)
    assert nulls.model_flops == work.model_flops + 3 * (2 * 64 * 8 - experts / 2)
    shared = small("model.decoder_layers=2", "model.moe_shared_expert_ffn_dim=96")
    assert work_of(shared, parameters).model_flops - work.model_flops == 3 * 4 * 64 * 96


def test_gated_experts_are_counted_by_their_shapes():
    """Three matrices of M F; without biases no number of an expert is every holder's."""
    names = ("expert", "unsliced", "products", "hidden")
    for network, options, want in (
        ("swiglu", {}, (3 * 64 * 96, 0, 3 * 64 * 96, 3 * 96)),
        ("geglu", {"bias": True}, (3 * 64 * 96 + 2 * 96 + 64, 64, 3 * 64 * 96, 3 * 96)),
        ("ffn", {}, (2 * 64 * 96 + 96 + 64, 64, 2 * 64 * 96, 2 * 96)),
    ):
        layer = MoELayer(64, 4, 96, expert_network=network, expert_options=options)
        assert expert_sizes(layer.experts) == dict(zip(names, want, strict=True))
        held = sum(param.numel() for param in layer.experts.parameters())
        assert held == 4 * want[0]


HALF = ["common.fp16=true", "common.memory_efficient_fp16=true"]


@pytest.mark.parametrize(
    "changes, moved",
    [  # bytes read and written per parameter: norm, fp32 copies, largest statistics, update
        ([], 4 + 0 + 0 + (3 + 4) * 4),
        (HALF[:1], 2 + (3 * 4 + 2) + 0 + 3 * 2 + 4 * 4),
        (HALF, 2 + 0 + 0 + 3 * 2 + 4 * 4),
        ([*HALF, "optimizer.fp16_adam_stats=true"], 2 + 0 + 3 * 2 + 3 * 2 + 4 * 2),
    ],
    ids=["fp32", "copies", "no copies", "half statistics"],
)
def test_what_an_update_moves(changes, moved):
    settings = small("optimizer.fp16_adam_stats=false", *changes, gpus=1)
    plan = make_plan(settings, A100)
    held = plan.parameters.dense + plan.parameters.local
    assert plan.time.optimizer * A100.stream == pytest.approx(moved * held, rel=1e-9)
