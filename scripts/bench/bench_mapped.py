"""More experts than memory: evaluation and generation within a memory cgroup, experts on the disk.

    python scripts/bench/bench_mapped.py --limit-mb 600 --experts 64        # as root, on Linux

Writes a language model with random experts, takes it out of the page cache, and runs one process
inside a cgroup that has less memory than the experts need: with experts mapped from the file
(``moe_map_experts``), with experts copied as usual, and in int8. An rlimit cannot show this: it
counts what is mapped, not what is in memory. Anonymous pages are the process's own; file pages can
be given up at any time and are read again.
"""

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import runner
import torch
from ranks import Ranks
from record import ROOT, device_name, say, table
from runner import Report, add_defaults, command_line

DATA = ROOT / "tests" / "golden" / "data_world2"
CASES = {
    "mapped": {"moe_map_experts": True},
    "int8": {"moe_expert_dtype": "int8"},
    "copied": {},
}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    sizes = {"layers": (8, ""), "model-dim": (512, "M"), "hidden-dim": (2048, "F")}
    add_defaults(parser, {**sizes, "experts": (64, "of each sparse layer")})
    add_defaults(parser, {"limit-mb": (600, "of the cgroup, in MiB; 0: no cgroup")})
    add_defaults(parser, {"tokens": (24, "that are generated")})
    add = parser.add_argument
    add("--file", type=Path, default=Path("runs/bench/mapped.pt"), help="of the model")
    add("--inside", choices=list(CASES), help=argparse.SUPPRESS)
    add("--output", type=Path, help="JSON file (default: runs/bench/mapped.json)")
    return parser.parse_args(argv)


def write_model(options: argparse.Namespace) -> int:
    """A checkpoint as fairseq's trainer writes one, without optimizer; bytes of its experts."""
    from fairseq import options as fairseq_options
    from fairseq import tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from omegaconf import OmegaConf

    words = f"""{DATA} --task language_modeling --tokens-per-sample 128 --cpu --batch-size 4
        --arch transformer_lm_gpt_moe --criterion moe_cross_entropy
        --decoder-layers {options.layers}
        --decoder-embed-dim {options.model_dim} --decoder-ffn-embed-dim {options.hidden_dim}
        --decoder-attention-heads 8 --share-decoder-input-output-embed
        --moe-expert-count {options.experts}"""
    parser = fairseq_options.get_training_parser()
    args = fairseq_options.parse_args_and_arch(parser, input_args=words.split())
    config = convert_namespace_to_omegaconf(args)
    torch.manual_seed(1)
    model = tasks.setup_task(config.task).build_model(config.model)
    state = model.state_dict()
    plain = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}}
    whole = {
        "args": None,
        "cfg": plain,
        "model": state,
        "criterion": None,
        "optimizer_history": [{**history, "num_updates": 0}],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
        "last_optimizer_state": None,
    }
    options.file.parent.mkdir(parents=True, exist_ok=True)
    with open(options.file, "wb") as file:
        torch.save(whole, file)
        file.flush()
        os.fsync(file.fileno())
    return sum(value.nbytes for name, value in state.items() if ".experts." in name)


def drop_from_cache(path: Path) -> None:
    """Let the kernel forget the file's pages."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[Path | None]:
    """A cgroup of so many bytes, version 1 or 2, removed afterwards; None without a limit.

    Raises ValueError where this process may not make one.
    """
    if not limit:
        yield None
        return
    one = Path("/sys/fs/cgroup/memory")
    root, name = (one, "memory.limit_in_bytes") if one.is_dir() else (one.parent, "memory.max")
    group = root / f"fairseq-tutel-{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(str(limit), encoding="ascii")
    except OSError as error:
        raise ValueError(f"{group}: no memory cgroup can be made here ({error})") from None
    try:
        yield group
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def counters(group: Path | None) -> dict[str, int]:
    """What the cgroup counted, in bytes; "times": how often it was at its limit."""
    found = {}
    for name in ("memory.max_usage_in_bytes", "memory.peak", "memory.failcnt"):
        if group is not None and (group / name).exists():
            found[name] = int((group / name).read_text(encoding="ascii"))
    return found


def run_inside(group: Path | None, options: argparse.Namespace, case: str) -> dict[str, Any]:
    """One case in a process of its own, inside the group."""
    sizes = ["--tokens", str(options.tokens), "--threads", str(torch.get_num_threads())]
    command = [sys.executable, __file__, "--inside", case, "--file", str(options.file), *sizes]

    def join():
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

    drop_from_cache(options.file)
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=join)
    found = counters(group)
    if done.returncode:
        by = "killed by the kernel" if done.returncode == -9 else done.stderr[-2000:]
        return {"failed": f"exit code {done.returncode}: {by}", "cgroup": found}
    return {**json.loads(done.stdout.splitlines()[-1]), "cgroup": found}


def measure_inside(options: argparse.Namespace) -> dict[str, Any]:
    """Load, first token, further tokens, perplexity of the validation set; pages of each kind."""
    import fairseq_tutel
    from fairseq_tutel.integrations.fairseq.models import TransformerLMGPTMoE

    fairseq_tutel.register()
    found: dict[str, Any] = {"before": _pages()}
    begin = time.perf_counter()
    folder, name = str(options.file.parent), options.file.name
    lm = TransformerLMGPTMoE.from_pretrained(folder, name, str(DATA), **CASES[options.inside])
    found["load_s"] = time.perf_counter() - begin
    found["loaded"] = _pages()
    prompt = [torch.tensor([5, 6, 7])]

    def generate(count):
        begin = time.perf_counter()
        hypotheses = lm.generate(prompt, beam=1, min_len=count, max_len_a=0, max_len_b=count)
        return time.perf_counter() - begin, hypotheses[0][0]["tokens"].tolist()

    found["first_token_s"] = generate(1)[0]
    found["first_token"] = _pages()
    seconds, found["tokens"] = generate(options.tokens)
    found["ms_per_step"] = 1e3 * seconds / (options.tokens + 1)
    found["generated"] = _pages()
    lm.task.load_dataset("valid")
    model, bits, count = lm.models[0], 0.0, 0
    begin = time.perf_counter()
    with torch.no_grad():
        for block in (lm.task.dataset("valid")[i] for i in range(len(lm.task.dataset("valid")))):
            scores = model(block["source"][None])[0][0].double().log_softmax(-1)
            bits -= float(scores.gather(1, block["target"][:, None]).sum())
            count += len(block["target"])
    found["evaluation_s"] = time.perf_counter() - begin
    found["perplexity"] = float(torch.tensor(bits / count).exp())
    found["evaluated"] = _pages()
    return found


def _pages() -> dict[str, int]:
    """Bytes of this process in memory, by kind, and the pages that it waited for."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    sizes = {line.split(":")[0]: line.split()[1] for line in text.splitlines() if " kB" in line}
    kinds = {"anonymous": "RssAnon", "file": "RssFile"}
    found = {kind: 1024 * int(sizes[name]) for kind, name in kinds.items()}
    return found | {"major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt}


def show(result: dict[str, Any]) -> None:
    """A row for each case."""
    size = result["expert_bytes"] / 2**20
    say(f"experts of {size:.0f} MiB, limit {result['limit_mib']} MiB, on {device_name(result)}")
    rows = []
    for name, case in result["results"].items():
        if "failed" in case:
            rows.append({"case": name, **dict.fromkeys(("load", "first", "step", "ppl"), "-")})
            rows[-1] |= {"anonymous": "-", "file": case["failed"][:40]}
            continue
        pages = {k: f"{case['evaluated'][k] / 2**20:.0f}" for k in ("anonymous", "file")}
        rows.append({"case": name, "load": f"{case['load_s']:.2f}", **pages,
                     "first": f"{case['first_token_s']:.2f}", "step": f"{case['ms_per_step']:.1f}",
                     "ppl": f"{case['perplexity']:.4f}"})  # fmt: skip
    shown = {
        "experts": "{case}",
        "load s": "{load}",
        "first token s": "{first}",
        "ms per step": "{step}",
        "perplexity": "{ppl}",
        "anonymous MiB": "{anonymous}",
        "file MiB": "{file}",
    }
    say(table(rows, shown))


def run(options: argparse.Namespace, ranks: Ranks) -> None:
    """Write the model, measure, print and write."""
    if options.inside:
        print(json.dumps(measure_inside(options)))  # for the process that started this one
        return
    import fairseq_tutel

    fairseq_tutel.register()
    path = options.output or Path("runs/bench/mapped.json")
    size = write_model(options)
    about = {"limit_mib": options.limit_mb, "expert_bytes": size}
    report = Report("mapped", ranks, path, **about)
    results = {}
    for case in CASES:
        with memory_cgroup(options.limit_mb << 20) as group:
            results[case] = run_inside(group, options, case)
    options.file.unlink()
    report.finish({"results": results}, show)


main = runner.program(parse_arguments, run)


if __name__ == "__main__":
    sys.exit(main())
