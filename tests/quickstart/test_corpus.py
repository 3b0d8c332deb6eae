"""The quickstart's corpus: a reproducible split without repetitions, and one-line errors."""

import random
import string

import pytest
from corpus import LINE_BREAK, MAX_CHARS, CorpusError, build_corpus


def write_text(path, seed, blocks=120, words=60):
    """A file of random words, in blocks of two lines each."""
    rng = random.Random(seed)
    word = lambda: "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 8)))  # noqa: E731
    line = lambda: " ".join(word() for _ in range(words // 2))  # noqa: E731
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(f"{line()}\n    {line()}" for _ in range(blocks)), "utf-8")
    return path


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
        for block in file.read_text("utf-8").split("\n\n")
    }
    chars = {name: sum(map(len, side)) for name, side in sides.items()}
    for name in ("valid", "test"):
        assert 0.02 < chars[name] / chars["train"] < 0.08


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda p: p / "missing.txt", "no such file or folder", id="missing"),
        pytest.param(lambda p: p, "no text found", id="folder-without-text"),
        pytest.param(lambda p: write_text(p / "a.txt", 0), "too little text", id="short"),
        pytest.param(
            lambda p: (p / "b.txt", (p / "b.txt").write_bytes(b"caf\xe9"))[0],
            "not UTF-8 text .byte 3.", id="latin-1",
        ),
    ],
)  # fmt: skip
def test_errors_are_one_line(tmp_path, make, message):
    with pytest.raises(CorpusError, match=message) as error:
        build_corpus([make(tmp_path)])
    assert "\n" not in str(error.value)
