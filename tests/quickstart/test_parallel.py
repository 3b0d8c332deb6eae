"""The quickstart's pairs of sentences: numbers held out whole, own files, and one-line errors."""

import sys
from types import ModuleType

import parallel
import pytest
from corpus import CorpusError


@pytest.fixture
def words(monkeypatch):
    """A num2words that is quick."""
    module = ModuleType("num2words")
    module.num2words = lambda number, lang: f"{lang} {number}"
    monkeypatch.setitem(sys.modules, "num2words", module)


def test_a_number_is_on_one_side_in_every_pair_of_languages(words):
    corpus = parallel.build_pairs([])
    assert list(corpus) == [("en", other) for other in parallel.LANGUAGES[1:]]
    numbers = []
    for (one, other), sides in corpus.items():
        found = {}
        for side, pairs in sides.items():
            assert all(a.split()[1] == b.split()[1] for a, b in pairs)
            assert {(a.split()[0], b.split()[0]) for a, b in pairs} == {(one, other)}
            found[side] = {int(a.split()[1]) for a, _ in pairs}
        assert sum(map(len, found.values())) == len(set().union(*found.values())) == 10_000
        assert len(found["valid"]) == len(found["test"]) == parallel.MAX_HELD_OUT
        numbers.append(found["test"])
    assert numbers[0] == numbers[1] == numbers[2] and max(numbers[0]) > 9000 > min(numbers[0])


def test_without_the_library_it_says_so_in_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "num2words", None)
    with pytest.raises(CorpusError, match="^num2words is missing: pip install num2words$"):
        parallel.build_pairs([])


def write(folder, name, lines):
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_own_files_are_paired_by_their_names(tmp_path):
    count = parallel.MIN_PAIRS
    paths = [
        write(tmp_path, f"{name}.{language}", [f"{language} {name} {i}" for i in range(count)])
        for name in ("talks", "news")
        for language in ("en", "de")
    ]
    ((languages, sides),) = parallel.build_pairs(paths).items()
    assert languages == ("de", "en")
    pairs = [pair for side in sides.values() for pair in side]
    assert len(set(pairs)) == 2 * count and len(sides["test"]) == 2 * (count // 20)
    assert all(a.removeprefix("de ") == b.removeprefix("en ") for a, b in pairs)


@pytest.mark.parametrize(
    "files, message",
    [
        ({"a.de": 1000}, "a.de: give two files of one name, a.de and a.en, say"),
        ({"a.de": 1000, "a.en": 999}, "a.de has 1,000 lines and .*a.en has 999"),
        ({"a.de": 9, "a.en": 9}, "9 different pairs of lines; at least 1,000 are needed"),
        ({}, "no such file: .*missing.de"),
    ],
)
def test_errors_are_one_line(tmp_path, files, message):
    paths = [write(tmp_path, name, map(str, range(count))) for name, count in files.items()]
    with pytest.raises(CorpusError, match=message) as error:
        parallel.build_pairs(paths or [tmp_path / "missing.de"])
    assert "\n" not in str(error.value)
