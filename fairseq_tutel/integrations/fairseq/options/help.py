"""Help of the options that this package adds to fairseq, for ``python -m fairseq_tutel``."""

import dataclasses
import enum
import re
import textwrap
import typing
from collections.abc import Iterable, Iterator

from ....config import GATE_LOSS_WEIGHTS, PRESETS
from ....config.options import as_flag
from ..criterions import CRITERIONS
from ..models import ARCHITECTURES
from . import command_line
from .bundles import BUNDLES, keys_of, members

# what a first training may need
_FIRST = (
    *("moe_preset", "moe_expert_count", "moe_freq", "moe_expert_ffn_dim", "moe_expert_network"),
    *("moe_router", "moe_top_k", "moe_capacity_factor", "moe_eval_capacity_factor"),
    *("moe_gate_loss_wt", "moe_load_bias", "moe_batch_prioritized_routing"),
    *("moe_exchange", "moe_overlap_degree"),
)
_TITLES = {
    "first": "Begin with these",
    "size": "Size: layers and experts",
    "routing": "Routing: experts of a token, and dropping",
    "balance": "Balance: equally many tokens per expert",
    "communication": "Communication between ranks",
    "debugging": "Running, measuring and debugging",
}
_META_FLAGS = {
    "ignored": command_line.ACCEPTED,
    "ignored in evaluation": command_line.ACCEPTED_IN_EVALUATION,
    "refused by language models": command_line.REFUSED_BY_LANGUAGE_MODELS,
    "refused": command_line.REFUSED,
}
_DEFAULT = re.compile(r"(.*?)(?: \(default: (.*)\))?")
_WORDS = {"None": "none", "False": "off"}
_USAGE = """\
usage: fairseq-train DATA --user-dir fairseq_tutel --arch {names}
         --criterion moe_cross_entropy [option ...]

Beside the options of fairseq's own models and of its trainer (fairseq-train --help):
"""
_OTHERS = """
recommended for new models: --moe-preset balanced. It sets
  {preset}
unless you give one of them.

other commands, each with --help:
  python -m fairseq_tutel.launch       start the ranks, or adopt those of SLURM, torchrun or MPI
  python -m fairseq_tutel.plan         parameters, memory and speed of a configuration, on paper
  python -m fairseq_tutel.checkpoint   inspect, merge and reshard checkpoints; more or fewer experts
  python -m fairseq_tutel.export       models for transformers, and for C++ without Python
  python -m fairseq_tutel.picture      loss, expert load and exchange choices of a run
"""


_PAGE = """\
# All options

Every option that this package adds to fairseq, by topic. Search them by a word or a flag:

```bash
python -m fairseq_tutel options capacity
```

The table names the default of `MoELayer` in Python if it differs. Write the keys of an option as
`--moe-router-options gate_noise=0.1,eom=0.2`.

<!-- this page is what `python -m fairseq_tutel table` prints -->

"""


def every_option() -> dict[str, dataclasses.Field]:
    """Return the options of all architectures and criterions by name."""
    configs = [row.schema for row in ARCHITECTURES.values()]
    configs += [row.config for row in CRITERIONS.values()]
    # options of fairseq's own dataclasses are in no group
    own: dict[str, dataclasses.Field] = {}
    for field in (field for config in configs for field in dataclasses.fields(config)):
        if field.metadata.get("group"):
            own.setdefault(field.name, field)
    return own


def own_options() -> dict[str, list[dataclasses.Field]]:
    """Return the options by title of their group. Those of bundles are in the bundle's text."""
    own = every_option()
    for name in members():
        del own[name]
    groups = {"first": [own.pop(name) for name in _FIRST]}
    for name in _TITLES:
        groups.setdefault(name, [f for f in own.values() if f.metadata["group"] == name])
    return {_TITLES[name]: fields for name, fields in groups.items()}


def rows(fields: list[dataclasses.Field]) -> Iterator[tuple[str, str, str]]:
    """Yield flag with choices, default and meaning of each option; a line for each key."""
    for field in fields:
        flag = f"--{field.name.replace('_', '-')}{_choices(field)}"
        default, text = _default_and_text(field)
        if field.name in BUNDLES:
            text = "\n".join((text, *_keys(field.name)))
        yield flag, default, text


def _choices(field: dataclasses.Field) -> str:
    kind = next(iter(typing.get_args(field.type)), field.type)  # of an Optional
    is_choice = isinstance(kind, enum.EnumMeta)
    return f" {{{','.join(choice.value for choice in kind)}}}" if is_choice else ""


def _default_and_text(field: dataclasses.Field) -> tuple[str, str]:
    text, stated = _DEFAULT.fullmatch(field.metadata["help"]).groups()
    return stated or _WORDS.get(str(field.default), str(field.default)), text


def _keys(bundle: str) -> Iterator[str]:
    """Yield key with choices, default and meaning of each option of a bundle."""
    own = every_option()
    for key, name in keys_of(bundle).items():
        default, text = _default_and_text(own[name])
        text = re.sub(r"^--moe-[\w-]+ \w+: ", "", text)  # the key has the implementation's name
        yield f"`{key}`{_choices(own[name])} ({default}): {text}"


def plain_text(everything: bool = True) -> str:
    """Return the options for a terminal: all (default), or those to begin with."""
    parts = [_USAGE.format(names="|".join(ARCHITECTURES))]
    for title, fields in own_options().items():
        parts += [title, *map(_entry, rows(fields)), ""]
        if not everything:
            parts.append("all options: python -m fairseq_tutel options [WORD ...]\n")
            break
    return "\n".join(parts) + _OTHERS.format(preset=_preset())


def _preset() -> str:
    values = {**PRESETS["balanced"], "gate_loss_wt": GATE_LOSS_WEIGHTS["balanced"]}
    return " ".join(as_flag(f"moe_{name}", value) for name, value in values.items())


def _entry(row: tuple[str, str, str]) -> str:
    flag, default, text = row
    lines = [textwrap.fill(line, 90, break_on_hyphens=False) for line in text.split("\n")]
    text = "\n".join(lines)
    return f"  {flag} (default: {default})\n{textwrap.indent(text, ' ' * 8)}"


def matching(*words: str) -> str:
    """Return the options, Meta's flags included, whose flag or text has every word in any case."""
    found = []
    for title, fields in own_options().items():
        entries = [_entry(row) for row in rows(fields) if _has(words, row[0], row[2])]
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
        for flag, default, text in rows(fields):
            lines.append(f"| `{flag}` | {default} | {text.replace(chr(10), '<br>')} |")
        lines.append("")
    lines.append("**Flags of Meta's branches without a meaning here**")
    for what, flags in _META_FLAGS.items():
        names = ", ".join(f"`{flag}`" for flag in flags)
        lines += ["", f"{what.capitalize()}: {names}."]
    return _PAGE + "\n".join([*lines, ""])
