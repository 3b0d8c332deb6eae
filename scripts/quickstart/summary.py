"""The closing table and summary.json."""

import json
from pathlib import Path

Row = tuple[str, str]
HINT = "--moe-load-bias quantile --moe-overflow-rerouting 4   (fairseq_tutel/models/README.md)"


def write(summary: dict, file: Path) -> None:
    """Write ``summary.json``."""
    file.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def table(summary: dict) -> str:
    """The table that ends a run."""
    valid, training = summary["valid_perplexity"], summary["training"]
    model, files = summary["model"], summary["files"]
    end = f"after {training['updates']} updates"
    rows: list[Row] = [
        ("valid perplexity, untrained", f"{valid['start']:,.1f}"),
        (f"valid perplexity, {end}", f"{valid['end']:,.1f}   ({valid['fall']:,.0f} times less)"),
        ("valid perplexity, fairseq-eval-lm", f"{valid['eval_lm']:,.1f}   (1 process)"),
        ("test perplexity, fairseq-eval-lm", f"{summary['test_perplexity']['eval_lm']:,.1f}"),
        ("training", f"{training['tokens_per_second']:,.0f} tokens/s on {training['ranks']}"),
        (
            "experts",
            f"{model['experts']} in each of {model['moe_layers']} MoE layers, "
            f"{model['experts_per_rank']} per rank",
        ),
        *_utilisation(summary["utilisation"]),
        ("time", minutes(sum(summary["seconds"].values()))),
        ("pictures", "  ".join(name for name in files if name.endswith(".png"))),
    ]
    width = max(len(name) for name, _ in rows)
    rule = "-" * (width + 48)
    body = "\n".join(f"{name:<{width}}   {value}" for name, value in rows)
    return f"{rule}\n{body}\n{rule}"


def _utilisation(used: dict) -> list[Row]:
    """Of the last quarter of training, beside what even but independent choices give."""
    names = {
        "moe_util_slot": ("experts: rows in use", "%"),
        "moe_util_load": ("experts: mean load / largest", "%"),
        "moe_drop": ("experts: choices dropped", "%"),
        "moe_dead": ("experts: unused", " of a layer"),
    }
    return [
        (
            label,
            f"{used['late'][name]:.1f}{unit}   (even but independent choice: "
            f"{used['independent'][name]:.1f}{unit})",
        )
        for name, (label, unit) in names.items()
        if name in used["late"]
    ] + [("experts: to use more of them", HINT)]


def minutes(seconds: float) -> str:
    """As in ``4 min 05 s``."""
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def list_files(folder: Path) -> list[str]:
    """Every file of the run that is of use afterwards, relative to ``folder``."""
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
