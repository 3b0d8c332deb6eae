"""Tells a run that resumes on another number of ranks how to keep the tokens of an update."""

from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import DictConfig

from ....checkpoint.state import options_of

# option that bounds a rank's batch -> what it counts
_SIZES = {"batch_size": "sentences", "max_tokens": "tokens"}


def other_update_size(
    state: Mapping[str, Any], cfg: DictConfig, saved_by: int, world_size: int
) -> str | None:
    """Return a line about updates of another size than those of ``saved_by`` ranks, or None."""
    dataset, optimization = options_of(state, "dataset"), options_of(state, "optimization")
    passes = _passes(optimization.get("update_freq")), _passes(cfg.optimization.update_freq)
    option = next((name for name in _SIZES if dataset.get(name) and cfg.dataset[name]), None)
    if saved_by == world_size or option is None or None in passes:
        return None
    size, unit = cfg.dataset[option], _SIZES[option]
    then, now = saved_by * passes[0] * dataset[option], world_size * passes[1] * size
    if then == now:
        return None
    flag = f"--{option.replace('_', '-')}"
    if then % (world_size * size) == 0:
        advice = f"--update-freq {then // (world_size * size)} keeps {then:,}"
    else:
        own = max(1, round(then / (world_size * passes[1])))
        keeps = "keeps" if own * world_size * passes[1] == then else "comes nearest to"
        advice = f"{flag} {own} {keeps} {then:,}"
    return (
        f"an update of {saved_by} ranks had up to {then:,} {unit}, one of {world_size} has {now:,} "
        f"({flag} {size} --update-freq {passes[1]}): {advice}"
    )


def _passes(update_freq: Any) -> int | None:
    """Return the batches per update; the last number if ``--update-freq`` has one per epoch."""
    if isinstance(update_freq, Iterable) and not isinstance(update_freq, str):
        by_epoch = list(update_freq)
        return by_epoch[-1] if by_epoch else None
    return update_freq if isinstance(update_freq, int) else None
