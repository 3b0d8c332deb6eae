"""State of a tuner as JSON text, for checkpoints and for ``--moe-tune-file``.

:func:`dump` writes format 1; a key is ``train/float32/M512 F2048 E8/1``. Results under another
signature (machines, versions) are kept for runs with that signature.
"""

import json
from collections.abc import Mapping
from typing import Any

from .search import Search, Space
from .tuner import Entry, Key, Tuner

_FORMAT = 1
_ENTRY = {"choice", "us", "baseline_us", "trials", "closed", "opened"}


def dump(tuner: Tuner, signature: Mapping[str, Any], others: list | tuple = ()) -> str:
    """Return the state of a tuner as text, without samples that are still awaited.

    ``others``: results under other signatures, from :func:`load`.
    """
    values, keys, under_way = tuner.space.values, {}, {}
    for key, entry in tuner.entries.items():
        keys[str(key)] = {
            "choice": values(entry.current),
            "us": entry.time,
            "baseline_us": entry.baseline,
            "trials": entry.trials,
            "closed": entry.search is None,
            "opened": entry.opened,
        }
        if entry.search is not None:
            under_way[str(key)] = {
                "start": values(entry.search.start),
                "history": [[values(choice), samples] for choice, samples in entry.search.history],
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
    """Fill a new tuner from :func:`dump`'s text; raise ValueError if it is invalid.

    Return results under other signatures, for the next :func:`dump`.
    """
    others = []
    for known in _parse(text):
        if known["signature"] != signature:
            others.append({"signature": known["signature"], "keys": known["keys"]})
            continue
        tuner.step = known.get("step", 0)
        tuner.run_time, tuner.lost_time = known.get("run_us", 0), known.get("lost_us", 0)
        for name, saved in known["keys"].items():
            entry = _entry(saved, known.get("open", {}).get(name), tuner.space)
            if entry is not None:
                tuner.entries[Key.parse(name)] = entry
    tuner.restart_checksum()
    return others


def _entry(saved: Mapping, search: Mapping | None, space: Space) -> Entry | None:
    """Build an entry; return None if this run chooses among other values."""
    times = saved["us"], saved["baseline_us"], saved["trials"], saved["opened"]
    try:
        entry = Entry(space.choice(saved["choice"]), None, *times)
        if saved["closed"]:
            return entry
        if search is None:
            return None
        history = [(space.choice(values), samples) for values, samples in search["history"]]
        entry.search = Search(space, space.choice(search["start"]), history)
    except ValueError:
        return None
    entry.samples = list(search["samples"])  # its next step is a first one again
    return entry


def read_pinned(text: str, space: Space, signature: Mapping[str, Any]) -> dict[Key, dict[str, Any]]:
    """Return the decided choices of a file, for a run that measures nothing.

    Raise ValueError if the text is invalid or its signature, decisions or choices are not this
    run's.
    """
    made = _parse(text)[0]
    for name, value in signature.items():
        if made["signature"].get(name) != value:
            raise ValueError(
                f"it was made with {name} = {made['signature'].get(name)}, and this run has {value}"
            )
    found = {
        Key.parse(name): space.values(space.choice(known["choice"]))
        for name, known in made["keys"].items()
        if known["closed"]
    }
    if not found:
        raise ValueError("it has no decided key: the run that wrote it ended before a search did")
    return found


def _parse(text: str) -> list[dict]:
    """Return the results under each signature, those of the run that wrote the file first."""
    try:
        state = json.loads(text)
        version = state["format"]
    except (ValueError, KeyError, TypeError):
        raise ValueError("not a file of exchange choices") from None
    if version != _FORMAT:
        raise ValueError(f"format {version!r} of exchange choices; this version reads {_FORMAT}")
    found = [state, *state.get("others", ())]
    for known in found:
        keys = known.get("keys") if isinstance(known, dict) else None
        if not isinstance(keys, dict) or not isinstance(known.get("signature"), dict):
            raise ValueError("not a file of exchange choices: signature or keys are missing")
        for name, entry in keys.items():
            whole = isinstance(entry, dict) and entry.keys() >= _ENTRY
            whole = whole and isinstance(entry["choice"], dict)
            if not (whole and name.rpartition("/")[2].isdigit()):
                raise ValueError(f"a damaged file of exchange choices: {name!r}: {entry!r}")
    return found
