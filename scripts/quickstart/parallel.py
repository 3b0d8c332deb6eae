"""The pairs of sentences of the quickstart for translation: numbers in words, or the user's files.

Held out are whole numbers (or lines): what is tested was in no pair of languages while training.
"""

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path

from corpus import CorpusError

LANGUAGES = ("en", "de", "es", "fr")  # every other one from and to the first
LARGEST = 9_999
SIDES = ("train", "valid", "test")
MIN_PAIRS, MAX_HELD_OUT = 1_000, 200
Pairs = dict[str, list[tuple[str, str]]]  # by side


def build_pairs(paths: list[Path]) -> dict[tuple[str, str], Pairs]:
    """Pairs of sentences by their two languages; ``paths``: parallel files (none: numbers).

    Raises:
        CorpusError: a library or a file that is missing or does not fit, or too few sentences.
    """
    return _from_files(paths) if paths else _numbers()


def _numbers() -> dict[tuple[str, str], Pairs]:
    try:
        from num2words import num2words
    except ImportError:
        raise CorpusError("num2words is missing: pip install num2words") from None

    def words(language: str) -> list[str]:
        return [num2words(number, lang=language) for number in range(LARGEST + 1)]

    texts = {language: words(language) for language in LANGUAGES}
    side_of = _sides(list(map(str, range(LARGEST + 1))))
    first, *others = LANGUAGES
    return {
        (first, other): _deal(zip(texts[first], texts[other], strict=True), side_of)
        for other in others
    }


def _from_files(paths: list[Path]) -> dict[tuple[str, str], Pairs]:
    found: dict[tuple[str, str], Pairs] = {}
    for one, other in _parallel(paths):
        first, second = _lines(one), _lines(other)
        if len(first) != len(second):
            raise CorpusError(f"{one} has {len(first):,} lines and {other} has {len(second):,}")
        lines = [pair for pair in dict.fromkeys(zip(first, second, strict=True)) if all(pair)]
        if len(lines) < MIN_PAIRS:
            raise CorpusError(
                f"{one}, {other}: {len(lines):,} different pairs of lines; at least {MIN_PAIRS:,} "
                "are needed"
            )
        languages = one.suffix[1:], other.suffix[1:]
        dealt = _deal(iter(lines), _sides(["\n".join(pair) for pair in lines]))
        for side, pairs in dealt.items():
            found.setdefault(languages, {}).setdefault(side, []).extend(pairs)
    return found


def _parallel(paths: list[Path]) -> Iterator[tuple[Path, Path]]:
    """Two files of one name and two languages each."""
    for path in paths:
        if not path.is_file():
            raise CorpusError(f"no such file: {path}")
    names = sorted(paths, key=lambda path: (str(path.with_suffix("")), path.suffix))
    for name, group in itertools.groupby(names, key=lambda path: path.with_suffix("")):
        files = list(group)
        if len(files) != 2 or not all(file.suffix for file in files):
            raise CorpusError(
                f"{name}: {', '.join(file.name for file in files)}: give two files of one name, "
                f"{name.name}.de and {name.name}.en, say"
            )
        yield files[0], files[1]


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8 text (byte {error.start})") from None
    return [" ".join(line.split()) for line in text.splitlines()]


def _sides(keys: list[str]) -> list[str]:
    """Deal keys to sides by a hash: a tenth is held out, at most MAX_HELD_OUT on each side."""
    order = sorted(range(len(keys)), key=lambda i: hashlib.sha256(keys[i].encode()).digest())
    held_out = min(MAX_HELD_OUT, len(keys) // 20)
    sides = ["train"] * len(keys)
    for place, i in enumerate(order[: 2 * held_out]):
        sides[i] = SIDES[1 + place % 2]
    return sides


def _deal(pairs: Iterator[tuple[str, str]], side_of: list[str]) -> Pairs:
    dealt: Pairs = {side: [] for side in SIDES}
    for side, pair in zip(side_of, pairs, strict=True):
        dealt[side].append(pair)
    return dealt
