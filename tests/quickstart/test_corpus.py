"""The quickstart's data: splits without repetitions, own files, and one-line errors."""

import random
import string
import sys
from types import ModuleType

import parallel
import pytest
from corpus import LINE_BREAK, MAX_CHARS, CorpusError, build_corpus


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_text(path, seed, blocks=120, words=60):
    """A file of random words, in blocks of two lines each."""
    rng = random.Random(seed)
    word = lambda: "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 8)))  # noqa: E731
    line = lambda: " ".join(word() for _ in range(words // 2))  # noqa: E731
    return write(path, ["\n\n".join(f"{line()}\n    {line()}" for _ in range(blocks))])


@pytest.fixture
def folder(tmp_path):
    for number in range(12):
        write_text(tmp_path / "text" / f"{number % 3}" / f"{number}.txt", number)
    return tmp_path / "text"


def test_split_covers_the_text_once_and_keeps_line_breaks(folder):
    sides = build_corpus([folder])
    lines = [line for side in sides.values() for line in side]
    assert len(lines) == len(set(lines))
    assert set(lines) == {
        block.replace("\n", LINE_BREAK)
        for file in folder.rglob("*.txt")
        for block in file.read_text("utf-8").strip().split("\n\n")
    }
    chars = {name: sum(map(len, side)) for name, side in sides.items()}
    assert all(0.02 < chars[name] / chars["train"] < 0.08 for name in ("valid", "test"))


def test_repetitions_and_the_order_of_files_change_nothing(folder):
    files = sorted(folder.rglob("*.txt"))
    one, other = build_corpus(files), build_corpus(files[::-1])
    assert one == other
    for file in files:
        file.with_suffix(".rst").write_text(file.read_text("utf-8"), "utf-8")
    assert build_corpus([folder]) == one


def test_python_library_is_large_enough_and_capped():
    sides = build_corpus([])
    assert 0.7 * MAX_CHARS < sum(len(x) for side in sides.values() for x in side) < 1.1 * MAX_CHARS


def test_a_number_is_on_one_side_in_every_pair_of_languages(monkeypatch):
    module = ModuleType("num2words")
    module.num2words = lambda number, lang: f"{lang} {number}"
    monkeypatch.setitem(sys.modules, "num2words", module)
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


def test_own_files_are_paired_by_their_names(tmp_path):
    count = parallel.MIN_PAIRS
    paths = [
        write(tmp_path / f"{name}.{language}", [f"{language} {name} {i}" for i in range(count)])
        for name in ("talks", "news")
        for language in ("en", "de")
    ]
    ((languages, sides),) = parallel.build_pairs(paths).items()
    assert languages == ("de", "en")
    pairs = [pair for side in sides.values() for pair in side]
    assert len(set(pairs)) == 2 * count and len(sides["test"]) == 2 * (count // 20)
    assert all(a.removeprefix("de ") == b.removeprefix("en ") for a, b in pairs)


TEXT, PAIRS = build_corpus, parallel.build_pairs


@pytest.mark.parametrize("build, files, message", [
    (TEXT, {"missing.txt": None}, "no such file or folder"),
    (TEXT, {"": None}, "no text found"),
    (TEXT, {"a.txt": 9}, "too little text"),
    (TEXT, {"b.txt": b"caf\xe9"}, "not UTF-8 text .byte 3."),
    (PAIRS, {"a.de": 1000}, "a.de: give two files of one name, a.de and a.en, say"),
    (PAIRS, {"a.de": 1000, "a.en": 999}, "a.de has 1,000 lines and .*a.en has 999"),
    (PAIRS, {"a.de": 9, "a.en": 9}, "9 different pairs of lines; at least 1,000 are needed"),
    (PAIRS, {"missing.de": None}, "no such file: .*missing.de"),
    (PAIRS, {}, "^num2words is missing: pip install num2words$"),
])  # fmt: skip
def test_errors_are_one_line(tmp_path, monkeypatch, build, files, message):
    monkeypatch.setitem(sys.modules, "num2words", None)
    for name, content in files.items():
        if isinstance(content, int):
            write(tmp_path / name, range(content))
        elif content:
            (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message) as error:
        build([tmp_path / name for name in files])
    assert "\n" not in str(error.value)
