"""Recipes of what users have: options of runs, loops and layers, and the models that they build."""

import importlib
import sys
from pathlib import Path

import torch
from torch import nn

from fairseq_tutel import training
from fairseq_tutel.distributed import build_groups, process_world
from fairseq_tutel.moe import ExchangeConfig, MoELayer

HERE = Path(__file__).parent
TOKENS, M, F, E, DIM = 24, 6, 8, 4, 4

SMALL = "--decoder-embed-dim 8 --decoder-ffn-embed-dim 12 "
PAIRS = SMALL + ("--encoder-embed-dim 8 --encoder-ffn-embed-dim 12 "
                 "--encoder-normalize-before --decoder-normalize-before ")  # fmt: skip
FOUR = SMALL + "--moe-expert-count 4 "
# runs of fairseq's trainer: ranks that saved the set, ranks that resume it, options
RUNS = {
    "lm": (2, (1, 2, 4), FOUR), "dense": (1, (1,), SMALL),
    "lm_one_rank": (1, (1,), FOUR + "--moe-capacity-factor 2"),
    "lm_adam16": (2, (1, 2), FOUR + "--fp16-adam-stats"),
    "lm_fp16": (1, (1,), FOUR + "--memory-efficient-fp16 --fp16-adam-stats --fp16-init-scale 8"),
    "lm_zero": (2, (1, 2), FOUR + "--zero-sharding os"),
    "lm_sliced": (2, (1, 2), SMALL + "--moe-expert-count 1 --moe-top-k 1 "
                  "--moe-expert-placement sliced"),
    "lm_lora": (1, (1,), FOUR + "--moe-lora-rank 2 --moe-expert-dtype int8"),
    "lm_swiglu": (1, (1,), FOUR + "--moe-expert-network swiglu --moe-shared-expert-ffn-dim 8 "
                  "--moe-load-bias quantile --moe-score-function sigmoid"),
    "lm_cosine": (1, (1,), FOUR + "--moe-router cosine --moe-cosine-proj-dim 4 "
                  "--moe-null-experts 1 --moe-eval-capacity-token-fraction 0.5"),
    "lm_in_backward": (2, (2,), FOUR + "--moe-update-in-backward --clip-norm 0"),
    "lm_users": (2, (1, 2), FOUR + "--moe-router users --moe-users-scale 2 "
                 "--moe-expert-network users --moe-users-slope 0.3 --moe-exchange users"),
    "mt": (2, (1, 2, 4), PAIRS + "--moe-expert-count 4 "
           "--moe-normalize-gate-prob-before-dropping"),
    "dense_mt": (1, (1,), PAIRS),
}  # fmt: skip
# a run's set after a tool: the tool's set, the run, and what the tool says to add
CHANGED = {
    "lm_grown": ("lm", "--moe-expert-count 8"),
    "lm_grown_exact": ("lm", "--moe-expert-count 6 --moe-load-bias quantile"),
    "lm_shrunk": ("lm", "--moe-expert-count 2"),
    "lm_upcycled": ("lm", "--moe-expert-ffn-dim 6 --moe-capacity-factor 0"),
    "lm_merged": ("lm", ""),
}
# loops, and what saved them: experts, placement, ranks; commit 381b71b saved the old ones
LOOPS = {
    "adamw": (4, "replicated", 2), "adam16": (4, "replicated", 2), "sgd": (4, "replicated", 1),
    "muon": (4, "replicated", 2), "zero": (4, "replicated", 2), "sliced": (1, "sliced", 2),
    "dcp": (1, "sliced", 2), "old_replicated": (4, "replicated", 2), "old_sliced": (1, "sliced", 2),
}  # fmt: skip
RAGGED = {"capacity_factor": 0.0}


def numbers(value: torch.Tensor) -> list[float]:
    """Return the norm, and the norm after an addition that tells signs and order."""
    flat = value.detach().double().flatten()
    shift = torch.arange(1, len(flat) + 1).double().cos() * flat.square().mean().sqrt()
    return [flat.norm().item(), (flat + shift).norm().item()]


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(M, F), nn.ReLU(), nn.Linear(F, M))


# arguments of layers in one process
LAYERS = {
    "padded": {}, "ragged": RAGGED, "top-1": {"top_k": 1}, "top-3": {"top_k": 3, **RAGGED},
    "relu": {"activation": "relu"}, "swiglu": {"expert_network": "swiglu", **RAGGED},
    "geglu": {"expert_network": "geglu", "expert_options": {"bias": True}},
    "clamped_swiglu": {"expert_network": "clamped_swiglu", "expert_options": {"bias": True},
                       **RAGGED},
    "shared": {"shared_expert_dim": 5, "shared_expert_gate": True},
    "cosine": {"router": "cosine", "router_options": {"proj_dim": 3}},
    "sigmoid": {"score_function": "sigmoid", "load_bias": "sign", "route_scale": 1.5},
    "groups": {"num_expert_groups": 2, "top_groups": 1, "group_score": "max", **RAGGED},
    "null": {"null_experts": 2, **RAGGED}, "prioritized": {"batch_prioritized": True},
    "unnormalized": {"unnormalized_weights": True},
    "before": {"normalize_before_dropping": True, "capacity_factor": 0.5},
    "rerouted": {"overflow_rerouting": 1, "capacity_factor": 0.5},
    "over-update": {"balance_scope": "update", "load_bias": "quantile"},
    "lean": {"activation_memory": "lean", **RAGGED},
    "lean-bf16": {"activation_memory": "lean", "activation_storage": "bf16"},
    "minimal": {"activation_memory": "minimal", "expert_network": "swiglu"},
    "fp8": {"expert_compute": "fp8", "model_dim": 16, "hidden_dim": 16},
    "gate": {"gate": lambda: nn.Linear(M, E)},
    "expert_fn": {"expert_fn": lambda: expert, **RAGGED},
    "experts": {"experts": lambda: [expert() for _ in range(E)]},
    "int8": {"expert_storage": "int8"}, "bf16": {"expert_storage": "bf16"},
}  # fmt: skip
ONE = {"num_experts": 1, "top_k": 1, **RAGGED}
SWIGLU = {"expert_network": "swiglu", **RAGGED}
# arguments of layers on two ranks, and of their exchanges
EXCHANGES = {
    "padded": ({}, {}), "ragged": (RAGGED, {}), "overlapped": ({}, {"overlap_degree": 2}),
    "ragged overlapped": (SWIGLU, {"overlap_degree": 4}), "fp8 wire": ({}, {"wire": "fp8"}),
    "compact": ({}, {"wire_compact": True}), "global": ({"balance_scope": "global"}, {}),
    "2dh": ({}, {"algorithm": "2dh", "ranks_per_node": 1}),
    "balanced": (RAGGED, {"balance_ranks": True, "balance_min_rows": 1}),
    "lean": ({"activation_memory": "lean"}, {}), 
    "minimal": ({"activation_memory": "minimal", **SWIGLU}, {"overlap_degree": 2}),
    "clamped": ({"expert_network": "clamped_swiglu", **RAGGED}, {"overlap_degree": 2}),
    **{f"sliced r={r}": (ONE, {"r": r}) for r in (0, 1, 2)},
}  # fmt: skip
MINE, BIASED = {"expert_network": "users"}, {"expert_network": "users-bias"}
# the same with what user_dir registers
USERS = {
    "router": ({"router": "users", "router_options": {"scale": 2.0}}, {}),
    "whole router": ({"router": "users-whole", **RAGGED}, {}),
    "experts": ({**MINE, "expert_options": {"slope": 0.3}}, {}),
    "experts ragged": ({**MINE, **RAGGED}, {}), "experts with bias padded": (BIASED, {}),
    "experts with bias": ({**BIASED, **RAGGED}, {}),
    "experts overlapped": ({**BIASED, **RAGGED}, {"overlap_degree": 2}),
    "experts sliced": ({**MINE, **ONE}, {"r": 2}), "experts gathered": ({**MINE, **ONE}, {"r": 0}),
    "exchange": ({}, {"algorithm": "users"}),
    "exchange ragged": (RAGGED, {"algorithm": "users", "overlap_degree": 2}),
}  # fmt: skip


def register_users():
    """Import the user dir, as a program of the user does."""
    sys.path.insert(0, str(HERE))
    importlib.import_module("user_dir")


def make_layer(options: dict, exchange: dict | None = None) -> MoELayer:
    """A layer on these ranks, in slices if there are more ranks than experts."""
    options = {name: v() if callable(v) else v for name, v in options.items()}
    own = None if {"experts", "expert_fn"} & options.keys() else F
    options = {"model_dim": M, "num_experts": E, "hidden_dim": own, "seed": 1, **options}
    if process_world()[1] > 1:
        placement = "sliced" if options["num_experts"] == 1 else "replicated"
        options["groups"] = build_groups(options["num_experts"], placement=placement)
        options["exchange"] = ExchangeConfig(**(exchange or {}))
    return MoELayer(**options)


def make_run(name: str, more: str = ""):
    """A trainer with the options of a run, and the function that makes its batches."""
    from helpers import training as lm
    from helpers import translation as mt

    words, dense = f"{RUNS[name][2]} {more}".split(), name.startswith("dense")
    if name.endswith("mt"):
        config = mt.pair_config(*words, moe=not dense)
        return lm.make_trainer(config, mt.make_pairs(0)), mt.own_pairs
    return lm.make_trainer(lm.make_config(*words, moe=not dense)), lm.own_batches


def train(trainer, batches, first: int, last: int) -> list[list[float]]:
    """Return the loss and the gradient norm of each update."""
    from helpers.training import record_updates

    records = record_updates(trainer)
    for number in range(first, last):
        trainer.train_step(batches(number, max(2, process_world()[1])))
    return [[each.sums["loss"], each.grad_norm] for each in records]


def make_loop(kind: str):
    """A model, itself wrapped on several ranks, and its optimizers."""
    from fairseq_tutel.training.adam16 import Adam16

    torch.manual_seed(1)
    experts, placement, _ = LOOPS[kind]
    groups = build_groups(experts, placement=placement) if process_world()[1] > 1 else None
    options = {"top_k": min(2, experts), "capacity_factor": 0.0, "groups": groups, "seed": 2}
    model = nn.Sequential(nn.Linear(DIM, DIM), MoELayer(DIM, experts, 8, **options))
    net = training.wrap_data_parallel(model) if process_world()[1] > 1 else model
    if kind == "muon":
        matrices, others = training.matrix_parameters(model)
        return model, net, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.05)]
    if kind == "sgd":
        return model, net, [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]
    adam = Adam16 if kind in ("adam16", "old_replicated") else torch.optim.AdamW
    optimizer = adam(model.parameters(), lr=0.05)
    if kind == "zero" and groups:
        training.shard_optimizer(optimizer)
    return model, net, [optimizer]


def steps(net, optimizers, first: int, last: int) -> list[float]:
    """Return the mean loss over the ranks' equal parts of a batch, step by step."""
    rank, ranks = process_world()
    losses = []
    for number in range(first, last):
        x = torch.randn(8, 3, DIM, generator=torch.Generator().manual_seed(number))
        mine = x.chunk(ranks)[rank]
        loss = (net(mine) - mine.roll(1, -1)).square().mean()
        loss.backward()
        training.clip_grad_norm_(net, 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses
