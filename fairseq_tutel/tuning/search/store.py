"""State of a tuner as JSON text, for checkpoints and for ``--moe-tune-file``.

A key is ``train/float32/M512 F2048 E8/1``. Results under another signature (machines, versions) are
kept for runs with that signature.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from .halving import Choice, Search
from .tuner import Key, Tuner

_FORMAT = 1
_ENTRY = ("us", "baseline_us", "trials", "closed", "opened")


def dump(tuner: Tuner, signature: Mapping[str, Any], others: Sequence[dict] = ()) -> str:
    """Return the state of a tuner as text, without samples of the trials under way.

    ``others``: results under other signatures, from :func:`load`.
    """
    choices, keys, under_way = tuner.choices, {}, {}
    for key, search in tuner.searches.items():
        keys[str(key)] = {
            "choice": choices[search.best],
            **search.found,
            "closed": not search.round,
            "opened": search.opened,
        }
        if search.round:
            trials = [(choices[n], found) for n, each in search.trials.items() for found in each]
            under_way[str(key)] = {"start": choices[search.start], "history": trials}
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

    Keys with a choice that this run lacks are left out. Return results under other signatures, for
    the next :func:`dump`.
    """
    others = []
    for known in _parse(text):
        if known["signature"] != signature:
            others.append({"signature": known["signature"], "keys": known["keys"]})
            continue
        tuner.step = known.get("step", 0)
        tuner.run_time, tuner.lost_time = known.get("run_us", 0), known.get("lost_us", 0)
        for name, saved in known["keys"].items():
            search = _search(saved, known.get("open", {}).get(name), tuner)
            if search is not None:
                tuner.searches[Key.parse(name)] = search
    found = sorted((str(key), s.best, s.round) for key, s in tuner.searches.items())
    tuner.checksum = zlib.crc32(repr((tuner.step, found)).encode())
    return others


def _search(saved: Mapping, under_way: Mapping | None, tuner: Tuner) -> Search | None:
    """Return a search that is decided or goes on; None if this run lacks one of its choices."""
    number = tuner.choices.index
    try:
        if saved["closed"]:
            search = Search(tuner.near, number(saved["choice"]), saved["opened"])
            search.found, search.round = {name: saved[name] for name in search.found}, 0
        elif under_way is None:
            return None
        else:
            search = Search(tuner.near, number(under_way["start"]), saved["opened"])
            for choice, samples in under_way["history"]:
                search.trials.setdefault(number(choice), []).extend([samples] * bool(samples))
            search.plan()
    except (ValueError, KeyError, TypeError):
        return None
    return search


def read_pinned(
    text: str, choices: list[Choice], signature: Mapping[str, Any]
) -> dict[Key, Choice]:
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
    closed = {Key.parse(k): known["choice"] for k, known in made["keys"].items() if known["closed"]}
    if not closed:
        raise ValueError("it has no decided key: the run that wrote it ended before a search did")
    if lacking := [choice for choice in closed.values() if choice not in choices]:
        raise ValueError(f"its choice {lacking[0]} is none of this run's")
    return closed


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
    try:
        for known in found:
            dict(known["signature"])
            for name, entry in known["keys"].items():
                Key.parse(name), dict(entry["choice"]), [entry[field] for field in _ENTRY]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a damaged file of exchange choices: {error!r}") from None
    return found
