"""Record what users have: ``python tests/corpus/make.py``, in an environment with transformers.

It was run at commit e821d35, on a CPU with torch 2.13. It writes, beside itself,

- ``files.tar.xz``: checkpoints of every form, exports and a tuner's files, all of tiny models;
- ``snippets.txt``: the Python programs of all pages;
- ``expected.json``: what the readers of ``test_what_users_have.py`` return for all of it.

``--expected`` records the values of entries that are new, and leaves the rest as it is.
``user_dir``, ``configs`` and ``data_381b71b`` are recorded too, and were written by hand or by an
older commit. A form of a later commit gets an archive of its own, ``files_COMMIT.tar.xz``.
To record again means to accept changes: compare expected.json with the one before.
"""

import argparse
import hashlib
import itertools
import json
import re
import sys
import tarfile
import tempfile
import uuid
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from forms import (  # noqa: E402
    EXCHANGES,
    LAYERS,
    LOOPS,
    RUNS,
    USERS,
    E,
    M,
    make_layer,
    make_loop,
    make_run,
    register_users,
    steps,
    train,
)
from helpers.distributed import run_ranks  # noqa: E402
from helpers.seeds import seed_all  # noqa: E402
from surface import inside  # noqa: E402

from fairseq_tutel import training  # noqa: E402

LOAD = {"update": 4, "layers": {"1": [10, 50, 30, 10]}}  # of the experts, for shrink
SYMBOLS = [f"w{number}" for number in range(28)]


def save_run(folder, name):
    """Train a model of fairseq for two updates and save it, as on the tasks that exports need."""
    from helpers.training import save

    if name == "lm_users":
        register_users()
    trainer, batches = make_run(name)
    train(trainer, batches, 0, 2)
    trainer.cfg.task = {"data": "data-bin", **(PAIRS if name == "mt" else LANGUAGE)}
    if "dense" in name:
        trainer.consolidate_optimizer()
    save(trainer, f"{folder}/{name}.pt", 2)


def alike(save, folder, *name):
    """Save with numbers in place of random identifiers and of times: another run gives the same."""
    from fairseq import trainer
    from fairseq.logging import meters

    seconds = itertools.count(1.0)
    clock = SimpleNamespace(**dict.fromkeys(("time", "perf_counter"), lambda: next(seconds)))
    ids = itertools.count(int.from_bytes(hashlib.sha256(repr(name).encode()).digest()[:6], "big"))
    with (
        mock.patch("secrets.token_hex", lambda size: f"{next(ids):0{2 * size}x}"),
        mock.patch("uuid.uuid4", lambda: uuid.UUID(int=next(ids))),
        mock.patch.object(trainer, "time", clock),
        mock.patch.object(meters, "time", clock),
    ):
        seed_all(repr(name))
        save(folder, *name)


LANGUAGE = {"_name": "language_modeling", "tokens_per_sample": 8, "add_bos_token": False}
PAIRS = {"_name": "translation_multi_simple_epoch", "langs": ["de", "en"]}


def save_loop(folder, kind):
    """Two steps of a loop, and its checkpoint."""
    model, net, optimizers = make_loop(kind)
    steps(net, optimizers, 0, 2)
    if kind == "dcp":
        state = {"run": training.DistributedState(model, optimizers)}
        with inside(folder):  # it notes the path
            dcp.save(state, checkpoint_id="dcp")
    else:
        training.save_checkpoint(f"{folder}/{kind}.pt", model, optimizers, {"step": 2})
    if kind == "adamw":
        state = training.full_state_dict(model)
        if state:
            torch.save(state, f"{folder}/full_state.pt")


def save_adapters(folder):
    """Low-rank updates after two steps, over weights as they are and in int8."""
    for kind, storage in (("lora", "same"), ("lora_int8", "int8")):
        model, _, _ = make_loop("adamw")
        training.load_checkpoint(f"{folder}/adamw.pt", model)
        updates = training.add_lora(model, rank=2, alpha=4, storage=storage, seed=5)
        training.prepare_data_parallel(model)
        steps(model, [torch.optim.AdamW(updates, lr=0.05)], 0, 2)
        training.save_lora(f"{folder}/{kind}", model)


def save_layers(folder):
    """State dicts of layers as one process has them, and of a model with replaced blocks."""
    from fairseq_tutel.moe import every_other, replace_ffn

    register_users()
    tables = {"layers": {name: (options, {}) for name, options in LAYERS.items()}}
    tables |= {"exchanges": EXCHANGES, "users": USERS}
    for table, kinds in tables.items():
        states = {}
        for name, (options, _) in kinds.items():
            seed_all(name)
            stored = {k: v for k, v in options.items() if k != "expert_storage"}
            states[name] = make_layer(stored).state_dict()
        torch.save(states, f"{folder}/{table}.pt")
    block = torch.nn.TransformerEncoderLayer(M, 2, 8, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(block, 2)
    replace_ffn(model, every_other(model, r"layers\.\d+$"), E, copy_weights=True)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    torch.save(model.state_dict(), f"{folder}/replaced.pt")


def save_tuner(folder):
    """A tuner's file in mid-search and one with a decision, by times that are not measured."""
    from fairseq_tutel.tuning import ExchangeTuner, exchange_tuner
    from fairseq_tutel.tuning.timer import RegionTimer

    layer = make_layer(*EXCHANGES["padded"])
    tuner = ExchangeTuner([layer], steps=2, max_loss=1.0)
    times = iter(range(10**9))
    clock = mock.Mock(perf_counter_ns=lambda: 10**8 * next(times))
    us = itertools.chain([1000, 700], itertools.repeat(900))
    of_timer = property(lambda timer: vars(timer).setdefault("us", next(us)))
    known = mock.patch.object(RegionTimer, "microseconds", of_timer)
    with known, mock.patch.object(exchange_tuner, "time", clock):
        for number in range(60):
            x = torch.ones(24, M, requires_grad=True)
            layer(x, step=tuner.agree(24, x.dtype)).sum().backward()
            if number == 2 and not torch.distributed.get_rank():
                Path(folder, "exchange_open.json").write_text(tuner.file())
    if not torch.distributed.get_rank():
        Path(folder, "exchange.json").write_text(tuner.file())


def change_sets(folder):
    """Sets that the tools made, one in NLLB's layout, and exports."""
    from fairseq_tutel import checkpoint
    from fairseq_tutel.checkpoint import growth
    from fairseq_tutel.export import TokenizerFiles, export_huggingface

    path, load = f"{folder}/lm.pt", f"{folder}/expert_load.jsonl"
    Path(load).write_text(json.dumps(LOAD) + "\n")
    checkpoint.merge(path, f"{folder}/lm_merged.pt", with_optimizer=True)
    growth.grow(path, f"{folder}/lm_grown.pt", 8)
    growth.grow(path, f"{folder}/lm_grown_exact.pt", 6, ramp=10)
    growth.shrink(path, f"{folder}/lm_shrunk.pt", 2, load=load)
    how = growth.Upcycling(4, granularity=2)
    growth.upcycle(f"{folder}/dense.pt", f"{folder}/lm_upcycled.pt", how)
    checkpoint.reshard(f"{folder}/mt.pt", f"{folder}/mt_nllb.pt", 4)
    for file in [Path(folder, "mt_nllb-shared.pt"), *Path(folder).glob("mt_nllb-rank-?.pt")]:
        state = torch.load(file, weights_only=False)
        state.pop("moe_checkpoint")  # which Meta's code does not write
        state.pop("last_optimizer_state", None)
        options = {**state["cfg"]["model"], "arch": "transformer_24_24", "replication_count": 2}
        state["args"], state["cfg"] = Namespace(**options), None
        if "rank" in file.name:  # each expert is on two ranks
            state["args"] = Namespace(moe_freq=2)
            rank = int(file.stem[-1])
            torch.save(state, file.with_stem(f"mt_nllb-rank-{rank + 4}"))
        torch.save(state, file)
    for name, symbols in (("", SYMBOLS), ("de.", SYMBOLS[:-2]), ("en.", SYMBOLS[:-2])):
        Path(folder, f"dict.{name}txt").write_text("".join(f"{s} 1\n" for s in symbols))
    for name in ("lm_swiglu", "mt"):
        files = TokenizerFiles(folder)
        export_huggingface(f"{folder}/{name}.pt", f"{folder}/{name}_folder", files)


def pack(folder):
    """Write the archive; the same files give the same bytes."""
    with tarfile.open(HERE / "files.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            member = tarfile.TarInfo(str(path.relative_to(folder)))
            member.size = path.stat().st_size
            with path.open("rb") as file:
                archive.addfile(member, file)


def write_snippets():
    """Copy the Python programs of all pages."""
    from helpers.commands import PAGES, ROOT

    parts = []
    for page in PAGES:
        found = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        name = str(page.relative_to(ROOT))
        parts += [f"=== {name}#{number}\n{text}" for number, text in enumerate(found, 1)]
    (HERE / "snippets.txt").write_text("".join(parts), encoding="utf-8")


def record(only_new):
    """Write what the readers return now."""
    import test_what_users_have as test

    target = HERE / "expected.json"
    known = json.loads(target.read_text()) if only_new else {}
    names = [name for name in test.ENTRIES if name not in known]
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "files")
        test.unpack(files)
        got: dict = {}
        for name in names:
            if name not in got:
                got |= test.read(files, name, names)
    failed = {name: value.text for name, value in got.items() if isinstance(value, test.Failure)}
    known |= {name: value for name, value in got.items() if name not in failed}
    lines = [f"{json.dumps(n)}: {json.dumps(known[n])}" for n in test.ENTRIES if n in known]
    target.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    if failed:
        sys.exit("\n".join(f"{name}: {text}" for name, text in failed.items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--expected", action="store_true", help="only values of new entries")
    only_new = parser.parse_args().expected
    if not only_new:
        with tempfile.TemporaryDirectory() as folder:
            jobs = [(save_run, ranks, name) for name, (ranks, *_) in RUNS.items()]
            jobs += [(save_loop, n, kind) for kind, (*_, n) in LOOPS.items() if "old" not in kind]
            jobs += [(save_adapters, 2), (save_tuner, 2), (save_layers, 1), (change_sets, 1)]
            for save, ranks, *name in jobs:
                run_ranks(alike, ranks, save, folder, *name)
            pack(folder)
        write_snippets()
    record(only_new)


if __name__ == "__main__":
    main()
