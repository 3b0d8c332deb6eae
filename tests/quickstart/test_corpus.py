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
    sides = build_corpus([folder]).splits
    lines = [line for side in sides.values() for line in side.lines]
    assert len(lines) == len(set(lines))
    originals = {
        block.replace("\n", LINE_BREAK)
        for file in folder.rglob("*.txt")
        for block in file.read_text("utf-8").split("\n\n")
    }
    assert set(lines) <= originals
    assert len(lines) > 0.9 * len(originals)  # held-out sides may cut a document short
    for name in ("valid", "test"):
        assert 0.02 < sides[name].chars / sides["train"].chars < 0.08
        assert sides[name].documents >= 4


def test_split_does_not_depend_on_the_order_of_files(folder):
    files = sorted(folder.rglob("*.txt"))
    one, other = build_corpus(files), build_corpus(files[::-1])
    assert {n: sorted(s.lines) for n, s in one.splits.items()} == {
        n: sorted(s.lines) for n, s in other.splits.items()
    }


def test_repeated_blocks_are_left_out(folder):
    before = build_corpus([folder])
    for file in sorted(folder.rglob("*.txt")):
        file.with_suffix(".rst").write_text(file.read_text("utf-8"), "utf-8")
    after = build_corpus([folder])
    count = [sum(len(side.lines) for side in c.splits.values()) for c in (before, after)]
    assert abs(count[1] - count[0]) < 0.1 * count[0]


def test_one_large_file_is_split_too(tmp_path):
    sides = build_corpus([write_text(tmp_path / "book.txt", 0, blocks=1500)]).splits
    assert all(side.documents >= 4 for side in sides.values())


def test_write_gives_one_line_per_block(folder, tmp_path):
    corpus = build_corpus([folder])
    corpus.write(tmp_path / "out")
    for name, side in corpus.splits.items():
        assert (tmp_path / "out" / f"{name}.txt").read_text("utf-8").split("\n")[:-1] == side.lines


def test_python_library_is_large_enough_and_capped():
    sides = build_corpus([]).splits
    assert 0.7 * MAX_CHARS < sum(side.chars for side in sides.values()) < 1.1 * MAX_CHARS


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
