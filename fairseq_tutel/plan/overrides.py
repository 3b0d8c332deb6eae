"""Overrides of a config, held against what fairseq-hydra-train would take.

Hydra lets an override change what the config file states and what fairseq's own schema has; a key
of the parts that fairseq only knows by name (model, task, criterion, ...) is added with a plus. The
schemata are read from the sources of the dataclasses: the planner imports nothing of fairseq.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from fairseq_tutel.config import ROUTERS

from .settings import DEFAULTS, PLAN_KEYS

_OWN_MODEL = Path(__file__).resolve().parents[1] / "models" / "options.py"


def check_overrides(config: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Notes on overrides that have nothing to do with the plan.

    Args:
        config: the file as it is, without the overrides.
        overrides: ``key=value``, ``+key=value``, ``++key=value`` or ``~key``.

    Raises:
        ValueError: fairseq-hydra-train would refuse one, or nothing reads it.
    """
    notes = (_check(config, override) for override in overrides)
    return [note for note in notes if note]


def _check(config: DictConfig, override: str) -> str | None:
    name = override.partition("=")[0]
    key = name.lstrip("+~")
    section = key.partition(".")[0]
    if section in ("hydra", "defaults") or "/" in key:
        return f"{override}: for Hydra itself, not part of the plan"
    known = _states(config, key) or key in _schema()
    if name.startswith("~") or name.startswith("++") and known:
        return None
    if name.startswith("+"):
        if known:
            raise ValueError(f"override {override!r}: {key} is there already: leave out the +")
        return _check_addition(override, section, key)
    if not known:
        raise ValueError(
            f"override {override!r}: neither the config file nor fairseq's schema has {key}; "
            + _hint(config, section, key)
        )
    return None


def _states(config: DictConfig, key: str) -> bool:
    """Whether the file has the key, be it null (``select`` of omegaconf 2.0 takes no default)."""
    if OmegaConf.select(config, key) is not None:
        return True
    parent, _, name = key.rpartition(".")
    section = OmegaConf.select(config, parent) if parent else config
    return isinstance(section, DictConfig) and name in section


def _check_addition(override: str, section: str, key: str) -> str | None:
    known = _addable(section)
    if key in known:
        return None
    close = difflib.get_close_matches(key, known, cutoff=0.8)
    complete = section == "model" or any(k.startswith(f"{section}.") for k in _schema())
    if close or complete:
        raise ValueError(f"override {override!r}: nothing reads {key}{_did_you_mean(close)}")
    return f"{override}: not part of the plan"


def _hint(config: DictConfig, section: str, key: str) -> str:
    addable = _addable(section)
    if key in addable:
        return f"add it with a plus: +{key}"
    own = config.get(section)
    stated = [f"{section}.{name}" for name in own] if isinstance(own, DictConfig) else []
    everything = {*stated, *addable, *_schema(), *PLAN_KEYS}
    close = difflib.get_close_matches(key, everything, cutoff=0.75)
    return f"a key that only its part's dataclass has needs a +{_did_you_mean(close)}"


def _did_you_mean(close: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _addable(section: str) -> set[str]:
    """Keys of a part that are known beside those that its config file states."""
    known = {f"{section}.{name}" for name in DEFAULTS.get(section, {})}
    if section == "model":
        known |= {f"model.{name}" for name in _model_fields()}
    if section == "task":
        known |= {"task._name", "task.data", "task.dict_size", "task.tokens_per_sample"}
    return known


@cache
def _fairseq() -> Path | None:
    spec = importlib.util.find_spec("fairseq")  # finds, does not import
    return Path(spec.origin).parent if spec and spec.origin else None


@cache
def _schema() -> frozenset[str]:
    """``section.key`` of FairseqConfig's typed sections; the planner's defaults without fairseq."""
    root = _fairseq()
    if root is None:
        typed = ("common", "dataset", "optimization", "distributed_training")
        return frozenset(f"{name}.{key}" for name in typed for key in DEFAULTS[name])
    classes = _dataclasses(root / "dataclass" / "configs.py")
    return frozenset(
        f"{section}.{key}"
        for section, kind in _fields("FairseqConfig", classes).items()
        for key in _fields(kind, classes)
    )


def _model_fields() -> frozenset[str]:
    """Those of the dataclass, and the options of the routers that there are by now."""
    classes = _dataclasses(_OWN_MODEL)
    root = _fairseq()
    if root is not None:
        classes = {**_dataclasses(root / "models" / "transformer_lm.py"), **classes}
    return frozenset({**_fields("TransformerLMGPTMoEConfig", classes), **ROUTERS.all_flags()})


def _dataclasses(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _fields(name: str, classes: dict[str, ast.ClassDef]) -> dict[str, str]:
    """Fields of a dataclass and its bases in `classes`, with the names of their types."""
    if name not in classes:
        return {}
    fields: dict[str, str] = {}
    for base in classes[name].bases:
        fields |= _fields(ast.unparse(base), classes)
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            fields[node.target.id] = ast.unparse(node.annotation)
    return fields
