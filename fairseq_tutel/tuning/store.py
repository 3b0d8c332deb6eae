"""A tuner's state as JSON text: in checkpoints, and as a file that a run can be pinned to.

Format 1::

    {"format": 1, "signature": {...}, "step": 900, "run_us": 1, "lost_us": 0,
     "keys": {"train/float32/M512 F2048 E8/1":
         {"choice": {"algorithm": "2dh", "overlap_degree": 4}, "us": 3100, "baseline_us": 4400,
          "trials": 9, "closed": true, "opened": 0}},
     "open": {"train/float32/M512 F2048 E8/2":
         {"start": {...}, "near": true, "history": [[{...}, [3100, 3090]], [{...}, null]],
          "samples": [3050]}},
     "others": [{"signature": {...}, "keys": {...}}]}

What was found under another signature (machines, versions) says nothing about this run; it is kept
for the runs that it is of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .search import Search
from .space import Space
from .tuner import Entry, Key, Tuner

_FORMAT = 1
_ENTRY = {"choice", "us", "baseline_us", "trials", "closed", "opened"}


def dump(tuner: Tuner, signature: Mapping[str, Any], others: list | tuple = ()) -> str:
    """All of a tuner but the samples that are on their way.

    Args:
        tuner: any.
        signature: what the times depend on.
        others: what :func:`load` returned, to be kept.
    """
    keys, under_way = {}, {}
    for key, entry in tuner.entries.items():
        keys[str(key)] = {
            "choice": tuner.space.values(entry.current),
            "us": entry.time,
            "baseline_us": entry.baseline,
            "trials": entry.trials,
            "closed": entry.search is None,
            "opened": entry.opened,
        }
        if entry.search is not None:
            under_way[str(key)] = {
                "start": tuner.space.values(entry.search.start),
                "near": entry.search.near,
                "history": [
                    [tuner.space.values(choice), samples]
                    for choice, samples in entry.search.history
                ],
                "samples": entry.samples,
            }
    state = {
        "format": _FORMAT,
        "signature": dict(signature),
        "step": tuner.step,
        "run_us": tuner.run_time,
        "lost_us": tuner.lost_time,
        "keys": keys,
        "open": under_way,
        "others": list(others),
    }
    return json.dumps(state, indent=1)


def load(text: str, tuner: Tuner, signature: Mapping[str, Any]) -> list[dict]:
    """Go on from a state; a new tuner stays as it is where the state has another signature.

    Args:
        text: of :func:`dump`.
        tuner: new; filled in place.
        signature: of this run.

    Returns:
        What is known under other signatures, for :func:`dump`.

    Raises:
        ValueError: not such a text.
    """
    state = _parse(text)
    others = [other for other in state["others"] if other["signature"] != dict(signature)]
    if state["signature"] != dict(signature):
        known = {"signature": state["signature"], "keys": state["keys"]}
        mine = [other for other in state["others"] if other["signature"] == dict(signature)]
        for other in mine:
            _fill(tuner, other["keys"], {})
        tuner.reseal()
        return [*others, known]
    tuner.step, tuner.run_time, tuner.lost_time = state["step"], state["run_us"], state["lost_us"]
    _fill(tuner, state["keys"], state["open"])
    tuner.reseal()
    return others


def _fill(tuner: Tuner, keys: Mapping, under_way: Mapping) -> None:
    space = tuner.space
    for text, known in keys.items():
        try:
            choice = space.choice(known["choice"])
        except ValueError:
            continue  # the run may choose among less, or more
        if not known["closed"] and text not in under_way:
            continue
        entry = Entry(
            choice,
            None,
            time=known["us"],
            baseline=known["baseline_us"],
            trials=known["trials"],
            opened=known["opened"],
        )
        if not known["closed"]:
            one = under_way[text]
            try:
                history = [(space.choice(each), samples) for each, samples in one["history"]]
                start = space.choice(one["start"])
                entry.search = Search(space, start, near=one["near"], history=history)
            except ValueError:
                continue
            entry.samples = list(one["samples"])  # its next step is a first one again
        tuner.entries[Key.parse(text)] = entry


class Pinned:
    """The choices of a file, for a run that measures nothing.

    Args:
        text: of :func:`dump`.
        space: what this run may choose.

    Attributes:
        signature: of the run that made the file.

    Raises:
        ValueError: not such a text, or a choice that this run cannot choose.
    """

    def __init__(self, text: str, space: Space):
        state = _parse(text)
        self.signature: dict = state["signature"]
        self._plans = {
            Key.parse(key): space.values(space.choice(known["choice"]))
            for key, known in state["keys"].items()
            if known["closed"]
        }
        if not self._plans:
            raise ValueError("it has no decided key")

    @property
    def kinds(self) -> set[str]:
        """Of all keys that it has a choice for."""
        return {key.kind for key in self._plans}

    def choice(self, key: Key) -> dict[str, Any] | None:
        """That of the key, or of the nearest one of its kind; None: there is none."""
        near = [other for other in self._plans if other.kind == key.kind]
        nearest = min(near, key=lambda o: (abs(o.bucket - key.bucket), o.bucket), default=None)
        return None if nearest is None else self._plans[nearest]


def _parse(text: str) -> dict:
    try:
        state = json.loads(text)
        version = state["format"]
    except (ValueError, KeyError, TypeError):
        raise ValueError("not a file of exchange choices") from None
    if version != _FORMAT:
        raise ValueError(f"format {version!r} of exchange choices; this version reads {_FORMAT}")
    state = {"open": {}, "others": [], "step": 0, "run_us": 0, "lost_us": 0, **state}
    for known in (state, *state["others"]):
        _check(known)
    return state


def _check(known: Mapping) -> None:
    """Refuse what :func:`dump` does not write, by its place."""
    keys = known.get("keys") if isinstance(known, dict) else None
    if not isinstance(keys, dict) or not isinstance(known.get("signature"), dict):
        raise ValueError("not a file of exchange choices: signature or keys are missing")
    for text, entry in keys.items():
        whole = isinstance(entry, dict) and entry.keys() >= _ENTRY
        if not whole or not isinstance(entry["choice"], dict) or not text.split("/")[-1].isdigit():
            raise ValueError(f"a damaged file of exchange choices: {text!r}: {entry!r}")
