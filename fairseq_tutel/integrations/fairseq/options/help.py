"""Help of the options that this package adds to fairseq, for ``python -m fairseq_tutel``."""

import dataclasses
import enum
import re
import textwrap
from collections.abc import Iterable, Iterator

from ..criterions import CRITERIONS
from ..models import ARCHITECTURES
from . import command_line

# the options that matter most
_FIRST = ("moe_expert_count", "moe_freq", "moe_top_k", "moe_capacity_factor", "moe_gate_loss_wt")
_TITLES = {
    "first": "Begin with these",
    "size": "Size: layers and experts",
    "routing": "Routing: experts of a token, and dropping",
    "balance": "Balance: equally many tokens per expert",
    "communication": "Communication between ranks",
    "debugging": "Running, measuring and debugging",
}
_META_FLAGS = {
    "accepted without effect": command_line.ACCEPTED | command_line.ACCEPTED_IN_EVALUATION,
    "refused by language models": command_line.REFUSED_BY_LANGUAGE_MODELS,
    "refused": command_line.REFUSED,
}
_DEFAULT = re.compile(r"(.*?)(?: \(default: (.*)\))?")
_WORDS = {"None": "none", "False": "off"}
RECIPE = """\
  --moe-top-k 2 --moe-second-expert-policy all --moe-capacity-factor 1.0
  --moe-load-bias quantile --moe-overflow-rerouting 4 --moe-gate-loss-wt 0.001
"""
_USAGE = """\
usage: fairseq-train DATA --user-dir fairseq_tutel --arch {names}
         --criterion moe_cross_entropy [option ...]

Beside the options of fairseq's own models and of its trainer (fairseq-train --help):
"""
_OTHERS = """
balanced experts, in one recipe (the next best experts, a bias that follows the load, another try
if an expert is full, and a small balance loss):
{recipe}
other commands, each with --help:
  python -m fairseq_tutel.launch       start the ranks, or adopt those of SLURM, torchrun or MPI
  python -m fairseq_tutel.plan         parameters, memory and speed of a configuration, on paper
  python -m fairseq_tutel.checkpoint   inspect, merge and reshard checkpoints; more or fewer experts
  python -m fairseq_tutel.export       models for transformers, and for C++ without Python
  python -m fairseq_tutel.picture      loss, expert load and exchange choices of a run
"""


_PAGE = """\
# All options

Every option that this package adds to fairseq, by topic. Search them by a word:

```bash
python -m fairseq_tutel options capacity
```

If `MoELayer` in Python has another default, the table names both.
`python -m fairseq_tutel options FLAG` says why a flag of Meta's branches has no effect, or what to
give instead. Options that contradict each other, and values out of range, are refused before work
starts.

<!-- this page is what `python -m fairseq_tutel table` prints -->

"""


def own_options() -> dict[str, list[dataclasses.Field]]:
    """Return the options of all architectures and criterions by title of their group."""
    configs = [row.schema for row in ARCHITECTURES.values()]
    configs += [row.config for row in CRITERIONS.values()]
    # options of fairseq's own dataclasses are in no group
    own: dict[str, dataclasses.Field] = {}
    for field in (field for config in configs for field in dataclasses.fields(config)):
        if field.metadata.get("group"):
            own.setdefault(field.name, field)
    groups = {"first": [own.pop(name) for name in _FIRST]}
    for name in _TITLES:
        groups.setdefault(name, [f for f in own.values() if f.metadata["group"] == name])
    return {_TITLES[name]: fields for name, fields in groups.items()}


def _rows(fields: list[dataclasses.Field]) -> Iterator[tuple[str, str, str]]:
    """Yield flag with choices, default and meaning of each option."""
    for field in fields:
        flag = f"--{field.name.replace('_', '-')}"
        if isinstance(field.type, enum.EnumMeta):
            flag += f" {{{','.join(choice.value for choice in field.type)}}}"
        text, stated = _DEFAULT.fullmatch(field.metadata["help"]).groups()
        yield flag, stated or _WORDS.get(str(field.default), str(field.default)), text


def plain_text(everything: bool = True) -> str:
    """Return the options for a terminal: all (default), or those to begin with."""
    parts = [_USAGE.format(names="|".join(ARCHITECTURES))]
    for title, fields in own_options().items():
        parts += [title, *map(_entry, _rows(fields)), ""]
        if not everything:
            parts.append("all options: python -m fairseq_tutel options [WORD ...]\n")
            break
    return "\n".join(parts) + _OTHERS.format(recipe=RECIPE)


def _entry(row: tuple[str, str, str]) -> str:
    flag, default, text = row
    text = textwrap.fill(text, 90, break_on_hyphens=False)
    return f"  {flag} (default: {default})\n{textwrap.indent(text, ' ' * 8)}"


def matching(*words: str) -> str:
    """Return the options, Meta's flags included, whose flag or text has every word in any case."""
    found = []
    for title, fields in own_options().items():
        entries = [_entry(row) for row in _rows(fields) if _has(words, row[0], row[2])]
        found += [title, *entries, ""] if entries else []
    for what, flags in _META_FLAGS.items():
        for flag, reason in flags.items():
            if _has(words, flag, reason):
                found.append(f"{flag} of Meta's branches is {what}: {reason}")
    return "".join(f"{line}\n" for line in found)


def _has(words: Iterable[str], *texts: str) -> bool:
    text = "\n".join(texts).lower().replace("_", "-")
    return all(word.lower().replace("_", "-") in text for word in words)


def markdown() -> str:
    """Return the page ``TABLE.md``: the options, and Meta's flags without a meaning."""
    lines = []
    for title, fields in own_options().items():
        lines += [f"**{title}**", "", "| option | default | meaning |", "|---|---|---|"]
        lines += [f"| `{flag}` | {default} | {text} |" for flag, default, text in _rows(fields)]
        lines.append("")
    lines.append("**Flags of Meta's branches without a meaning here**")
    for what, flags in _META_FLAGS.items():
        names = ", ".join(f"`{flag}`" for flag in flags)
        lines += ["", f"{what.capitalize()}: {names}."]
    return _PAGE + "\n".join([*lines, ""])
