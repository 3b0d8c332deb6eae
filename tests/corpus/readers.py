"""Readers of what users have: each reads one form as users do, and returns plain values.

``entries.json`` names them, with their arguments. A reader gets the folder of the unpacked files,
and runs on every rank of its entry. Fairseq is imported only where it is needed: the process of the
tests does without it.
"""

import dataclasses
import hashlib
import importlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from surface import GOLDEN, HERE, numbers, run_main, scratch
from torch import nn

from fairseq_tutel import checkpoint, training
from fairseq_tutel.checkpoint import growth
from fairseq_tutel.distributed import build_groups, process_world
from fairseq_tutel.moe import ExchangeConfig, MoELayer

TOKENS, M, F, E, DIM = 24, 6, 8, 4, 4
# modules of the user's own, which an entry's options name
OWN = {
    "gate": lambda: nn.Linear(M, E), "expert_fn": lambda: expert,
    "experts": lambda: [expert() for _ in range(E)],
}  # fmt: skip


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(M, F), nn.ReLU(), nn.Linear(F, M))


def register_users():
    """Import the user dir, as a program of the user does."""
    sys.path.insert(0, str(HERE))
    importlib.import_module("user_dir")


def digest(values) -> str:
    """Return a checksum of a tree of tensors and numbers, to the bit."""
    found = hashlib.sha256()

    def add(name, value):
        if isinstance(value, dict):
            for key in sorted(value):
                add(f"{name}/{key}", value[key])
        elif torch.is_tensor(value):
            found.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            found.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            found.update(f"{name} {value!r}".encode())

    add("", values)
    return found.hexdigest()[:16]


def content(path, exact: bool = True) -> dict:
    """Return checksums of all experts and the optimizer state of a set, or numbers of weights."""
    state = checkpoint.load_for_rank(str(path), rank=0, world_size=1)
    if not exact:
        flat = [state["model"][name].float().flatten() for name in sorted(state["model"])]
        return {"model": numbers(torch.cat(flat)), "names": sorted(state["model"])}
    named = (state.get("last_optimizer_state") or {}).get("named_state")
    return {"model": digest(state["model"]), "optimizer": named and digest(named)}


def path_of(files, name) -> str:
    old = name.removeprefix("old_")
    return str((files if old == name else HERE / "data_381b71b") / f"{old}.pt")


def stored_set(files, name):
    """Content of a set, and what ``inspect`` says about it."""
    path = path_of(files, name)
    report = checkpoint.inspect(path, verify=True)
    for key in ("path", "size_on_disk", "files", "save_id", "written_by"):
        del report[key]
    return {**content(path), "report": report}


def resumed(files, name, words):
    """A run of fairseq's trainer goes on: loss and gradient norm of two more updates."""
    from helpers import training as lm
    from helpers import translation as mt

    moe = not name.startswith("dense")
    if name.endswith("mt"):
        trainer = lm.make_trainer(mt.pair_config(*words.split(), moe=moe), mt.make_pairs(0))
        batches = mt.own_pairs
    else:
        trainer, batches = lm.make_trainer(lm.make_config(*words.split(), moe=moe)), lm.own_batches
    assert trainer.load_checkpoint(str(files / f"{name}.pt")) is not None
    records = lm.record_updates(trainer)
    for number in (2, 3):
        trainer.train_step(batches(number, max(2, process_world()[1])))
    return [[each.sums["loss"], each.grad_norm] for each in records]


@torch.no_grad()
def evaluated(files, name):
    """Logits of the model that fairseq's programs load."""
    from fairseq import checkpoint_utils, tasks
    from helpers.training import make_batch, make_config
    from helpers.translation import make_pairs, pair_config

    make, config = (make_pairs, pair_config) if "mt" in name else (make_batch, make_config)
    task = tasks.setup_task(config().task)
    path = str(files / f"{name}.pt")
    (model,), _ = checkpoint_utils.load_model_ensemble([path], None, task)
    return numbers(model.eval()(**make(7)["net_input"])[0])


@torch.no_grad()
def meta(files, run, data, step):
    """Logits of a set that Meta's own code wrote."""
    from fairseq import checkpoint_utils

    path = str(GOLDEN / run / step / "checkpoint_last.pt")
    overrides = {"data": str(GOLDEN / data), "moe_eval_capacity_token_fraction": None}
    (model,), *_ = checkpoint_utils.load_model_ensemble_and_task([path], overrides)
    tokens = torch.randint(4, 80, (3, 12), generator=torch.Generator().manual_seed(1))
    args = (tokens, torch.tensor([12] * 3), tokens[:, :7]) if "translation" in run else (tokens,)
    return {**content(path), "logits": numbers(model.eval()(*args)[0])}


def tools(files, name, kinds):
    """Sets that the tools make of a stored one; what they only move is the same to the bit."""
    path, load = path_of(files, name), str(files / "expert_load.jsonl")
    cut, shared = growth.Upcycling(4, granularity=2), growth.Upcycling(2, shared=True)
    make = {
        "merge": lambda out: checkpoint.merge(path, out, with_optimizer=True),
        "reshard": lambda out: checkpoint.reshard(path, out, 4),
        "grow": lambda out: growth.grow(path, out, 8),
        "shrink": lambda out: growth.shrink(path, out, 2, load=load),
        "dense": lambda out: growth.to_dense(path, out, load=load),
        "upcycle": lambda out: growth.upcycle(path, out, cut),
        "upcycle-two": lambda out: growth.upcycle([path, path], out, shared),
        "merge-lora": lambda out: run_main("checkpoint", "merge-lora", path, out),
    }
    made = {tool: scratch(files, "x.pt") for tool in kinds}
    for tool, out in made.items():
        make[tool](out)
    return {t: content(out, exact=t in ("merge", "reshard")) for t, out in made.items()}


def exported(files, name):
    """A stored folder, and an export of today: tensors, config, and what is imported of them."""
    from safetensors.torch import load_file

    from fairseq_tutel.export import TokenizerFiles, export_huggingface

    today = export_huggingface(files / f"{name}.pt", scratch(files, "m"), TokenizerFiles(files))
    found = {}
    for kind, folder in (("stored", files / f"{name}_folder"), ("today", Path(today))):
        (weights,) = folder.glob("*.safetensors")
        out = scratch(files, "y.pt")
        run_main("checkpoint", "import", str(folder), out)
        found[kind] = {"tensors": digest(load_file(weights)), "imported": content(out)}
        found[kind]["config"] = json.loads((folder / "config.json").read_text())
    return found


@torch.no_grad()
def in_transformers(files, name):
    """Logits of a stored folder, by the code in it or by transformers' own."""
    import transformers
    from helpers.training import make_batch
    from helpers.translation import make_pairs

    from fairseq_tutel.integrations.transformers import repair_nllb_moe

    folder, how = files / f"{name}_folder", {"trust_remote_code": True, "dtype": "auto"}
    if name != "mt":
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval()
        return numbers(model(make_batch(7)["net_input"]["src_tokens"]).logits)
    repair_nllb_moe()
    given = make_pairs(7)["net_input"]
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="auto").eval()
    options = {"decoder_input_ids": given["prev_output_tokens"]}
    options["attention_mask"] = given["src_tokens"].ne(1).long()
    return numbers(model(given["src_tokens"], **options).logits)


def described(files, kinds):
    """The description with which a layer is compiled for C++, and its twin's output."""
    from fairseq_tutel.export import describe_layer, layer_twin

    found = {}
    for name, options in kinds.items():
        layer = make_layer(options).eval()
        sizes = {"model_dim": M, "hidden_dim": F, "network": options.get("expert_network", "ffn")}
        text = dataclasses.asdict(describe_layer(layer.config, **sizes))
        load_layer(files, "layers", name, layer)
        with torch.no_grad():
            found[name] = {**text, "output": numbers(layer_twin(layer)(tokens()))}
    return found


def make_loop(kind: str, experts: int = 4, placement: str = "replicated"):
    """A model, itself wrapped on several ranks, and its optimizers."""
    from fairseq_tutel.training.adam16 import Adam16

    torch.manual_seed(1)
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


def loop(files, kind, experts, placement):
    """A loop goes on: mean losses of the ranks' equal parts of a batch in three more steps."""
    model, net, optimizers = make_loop(kind, experts, placement)
    if kind == "dcp":
        state = {"run": training.DistributedState(model, optimizers)}
        dcp.load(state, checkpoint_id=files / "dcp")
    else:
        at = training.load_checkpoint(path_of(files, kind), model, optimizers)
        assert at == {"step": 2}
    weights, losses = training.full_state_dict(model), torch.zeros(3)
    rank, ranks = process_world()
    for step in range(3):
        x = torch.randn(8, 3, DIM, generator=torch.Generator().manual_seed(2 + step))
        mine = x.chunk(ranks)[rank]
        loss = (net(mine) - mine.roll(1, -1)).square().mean()
        loss.backward()
        training.clip_grad_norm_(net, 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses[step] = loss.detach()
    if ranks > 1:
        torch.distributed.all_reduce(losses)
    return {"weights": digest(weights), "losses": (losses / ranks).tolist()}


def adapter(files, kind):
    """LoRA of the experts over the weights of a loop, before and after it is merged."""
    model, _, _ = make_loop("adamw")
    training.load_checkpoint(path_of(files, "adamw"), model)
    if kind == "lora_int8":
        training.add_lora(model, rank=2, alpha=4, storage="int8")
    training.load_lora(files / kind, model)
    x, found = torch.linspace(-1, 1, 8 * DIM).view(8, DIM), {}
    found["output"] = numbers(model(x))
    training.merge_lora(model)
    return {**found, "merged": numbers(model(x))}


def full_state(files):
    """A state dict of all ranks' experts, loaded on these ranks."""
    model, _, _ = make_loop("adamw")
    training.load_full_state_dict(model, torch.load(files / "full_state.pt"))
    return digest(training.full_state_dict(model))


def tokens(dim: int = M) -> torch.Tensor:
    seed = 5 + process_world()[0]
    return torch.randn(TOKENS, dim, generator=torch.Generator().manual_seed(seed))


def make_layer(options: dict, exchange: dict | None = None) -> MoELayer:
    """A layer on these ranks, in slices if there are more ranks than experts."""
    options = {name: OWN[name]() if name in OWN else value for name, value in options.items()}
    hidden_dim = None if {"experts", "expert_fn"} & options.keys() else F
    options = {"model_dim": M, "num_experts": E, "hidden_dim": hidden_dim, "seed": 1, **options}
    if process_world()[1] > 1:
        placement = "sliced" if options["num_experts"] == 1 else "replicated"
        options["groups"] = build_groups(options["num_experts"], placement=placement)
        options["exchange"] = ExchangeConfig(**(exchange or {}))
    return MoELayer(**options)


def load_layer(files, table, name, layer):
    state = torch.load(files / f"{table}.pt")[name]
    if process_world()[1] == 1:
        layer.load_state_dict(state)
    else:
        training.load_full_state_dict(layer, state)


def layer(files, table, name, options, exchange):
    """Outputs, losses and gradients of a layer with stored weights."""
    made = make_layer(options, exchange)
    load_layer(files, table, name, made)
    x_TM = tokens(made.model_dim)
    mask = torch.arange(TOKENS) >= TOKENS - 3
    if "expert_storage" in options:
        with torch.no_grad():
            return {"output": numbers(made.eval()(x_TM, pad_mask=mask))}
    y, aux = made(x_TM.clone().requires_grad_(), pad_mask=mask, return_aux=True)
    (y.square().mean() + 0.1 * aux.loss).backward()
    grads = {n: numbers(p.grad) for n, p in made.named_parameters() if p.grad is not None}
    found = {"output": numbers(y), "loss": aux.loss.item(), "load": aux.load_E.tolist()}
    with torch.no_grad():
        found["evaluated"] = numbers(made.eval()(x_TM))
    return {**found, "gradients": grads, "names": sorted(made.state_dict())}


def replaced(files):
    """A transformer of torch with experts by ``replace_ffn``, and its stored state dict."""
    from fairseq_tutel.moe import every_other, replace_ffn

    block = torch.nn.TransformerEncoderLayer(M, 2, 8, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(block, 2)
    names = every_other(model, r"layers\.\d+$")
    old = replace_ffn(model, names, 4, copy_weights=True, capacity_factor=0.0)
    model.load_state_dict(torch.load(files / "replaced.pt"))
    return {"blocks": sorted(old), "output": numbers(model(tokens().view(2, -1, M)))}


def tuner(files, name):
    """A tuner's file of choices decides, and its state goes on."""
    from fairseq_tutel.tuning import ExchangeTuner

    text = (files / name).read_text()
    made = [make_layer({})]
    choice = None
    if "open" not in name:
        choice = ExchangeTuner(made, pinned=text).agree(TOKENS, torch.float32).exchange
        choice = dataclasses.asdict(choice)
    goes_on = ExchangeTuner(made)
    goes_on.resume({"file": text})
    goes_on.agree(TOKENS, torch.float32)
    state = json.loads(goes_on.file())
    keys = [entry for each in (state, *state["others"]) for entry in each["keys"].items()]
    return {"choice": choice, "keys": dict(keys)}
