"""The quickstart's text: the user's own files, or what every Python brings along.

A line of the corpus is a block: text between blank lines. Sections, a few blocks each, are dealt
out to train, valid and test in the order of a hash, so that the split is the same on every run. A
block that occurred before is left out, so that none is on two sides.
"""

import hashlib
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

# A block is one line of the corpus; this sign stands for the line breaks inside it.
LINE_BREAK = "↵"
SUFFIXES = {".txt", ".md", ".rst", ".text", ".py"}
# Of the standard library: tests (large, repetitive), tables of numbers, and what is no part of it.
LEFT_OUT = {"test", "tests", "idle_test", "encodings", "pydoc_data", "ensurepip", "site-packages"}
SECTION_CHARS = BLOCK_CHARS = 4_000
MIN_CHARS, MAX_CHARS = 200_000, 4_500_000
HELD_OUT = {0: "valid", 16: "test"}  # of 32 sections

Section = tuple[str, ...]  # blocks


class CorpusError(Exception):
    """Something about the user's text; its message is the one line to show."""


def build_corpus(paths: list[Path]) -> dict[str, list[str]]:
    """Lines of train, valid and test, from ``paths`` (files or folders; none: Python's library).

    Raises:
        CorpusError: a path that is missing or cannot be read, or too little text.
    """
    texts = (_read(file) for path in paths for file in _files(path)) if paths else _library()
    sections = {section for text in texts for section in _sections(text)}
    sides: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    seen: set[str] = set()
    chars = 0
    for number, section in enumerate(sorted(sections, key=_hash)):
        side = sides[HELD_OUT.get(number % 32, "train")]
        for block in section:
            words = " ".join(block.replace(LINE_BREAK, " ").split())
            if words not in seen and chars < MAX_CHARS:
                seen.add(words)
                side.append(block)
                chars += len(block)
    if chars < MIN_CHARS:
        raise CorpusError(
            f"too little text: {chars:,} characters after removing repetitions; at least "
            f"{MIN_CHARS:,} are needed"
        )
    return sides


def _files(path: Path) -> list[Path]:
    """A file, or every text file below a folder."""
    if path.is_file():
        return [path]
    if not path.exists():
        raise CorpusError(f"no such file or folder: {path}")
    found = [file for file in sorted(path.rglob("*")) if _is_text(file, path)]
    if not found:
        raise CorpusError(f"no text found in {path} (looked for {' '.join(sorted(SUFFIXES))})")
    return found


def _is_text(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.suffix.lower() in SUFFIXES and not hidden and file.is_file()


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{file} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise CorpusError(f"cannot read {file}: {error.strerror}") from None


def _library() -> Iterator[str]:
    """Sources of the standard library, and what ``help()`` prints about the language."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for file in _files(folder):
        if LEFT_OUT.isdisjoint(file.relative_to(folder).parts):
            yield file.read_text(encoding="utf-8", errors="replace")
    yield from topics.values()


def _sections(text: str) -> Iterator[Section]:
    section: list[str] = []
    for block in _blocks(text):
        section.append(block)
        if sum(map(len, section)) >= SECTION_CHARS:
            yield tuple(section)
            section = []
    if section:
        yield tuple(section)


def _blocks(text: str) -> Iterator[str]:
    """Text between blank lines, as one line each; long ones are cut at a line break."""
    block = ""
    for line in [*text.replace(LINE_BREAK, "").expandtabs(4).splitlines(), ""]:
        line = re.sub(r"\s", " ", line).rstrip()[:BLOCK_CHARS]
        if block and (not line or len(block) + len(line) >= BLOCK_CHARS):
            yield block
            block = ""
        block += LINE_BREAK + line if block else line


def _hash(section: Section) -> bytes:
    return hashlib.sha256("\n".join(section).encode("utf-8", "surrogatepass")).digest()
