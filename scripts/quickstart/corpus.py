"""The quickstart's text: the user's own files, or what every Python brings along.

A document is a file or a pydoc topic, or a section of one where there are only few. A document is
either train, valid or test, by a hash of its name, so the split is the same on every run; blocks
(text between blank lines) that occurred before are left out, so no text is on two sides of it.
"""

import hashlib
import importlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

# A block is one line of the corpus; this sign stands for the line breaks inside it.
LINE_BREAK = "↵"

TEXT_SUFFIXES = {".txt", ".md", ".rst", ".text", ".py"}
# Left out of the standard library: tests (large, repetitive), tables of numbers, pydoc's topics as
# source (they come as documents of their own), and what is no part of it.
LEFT_OUT_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "lib-dynload",
    "__pycache__",
    "ensurepip",
}
LEFT_OUT_PREFIXES = ("_sysconfigdata", "NEWS", "HISTORY")

# With fewer documents than this, a split by document would be a matter of luck.
FEW_DOCUMENTS = 50
SECTION_CHARS = 4_000
BLOCK_CHARS = 4_000
MIN_CHARS = 200_000
MAX_CHARS = 4_500_000
HELD_OUT_SHARE = 0.04
HELD_OUT_MAX_CHARS = 120_000
# No document is more than this share of valid or of test.
DOCUMENT_SHARE = 1 / 8


class CorpusError(Exception):
    """Something about the user's text; its message is the one line to show."""


@dataclass
class Split:
    """Lines (blocks) of one side of the split and how many characters they hold."""

    lines: list[str] = field(default_factory=list)
    documents: int = 0
    chars: int = 0


@dataclass
class Corpus:
    """The three sides of the split, and where the text came from."""

    source: str
    splits: dict[str, Split]

    def write(self, folder: Path) -> None:
        """Write ``train.txt``, ``valid.txt`` and ``test.txt`` (UTF-8, one block per line)."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, split in self.splits.items():
            text = "".join(f"{line}\n" for line in split.lines)
            (folder / f"{name}.txt").write_text(text, encoding="utf-8")


def build_corpus(paths: list[Path]) -> Corpus:
    """Collect, deduplicate and split the text of ``paths`` (files or folders; none: Python's).

    Raises:
        CorpusError: a path that is missing or cannot be read, or too little text.
    """
    if paths:
        source = ", ".join(str(path) for path in paths)
        documents = [document for path in paths for document in _user_documents(path)]
    else:
        library = Path(sysconfig.get_paths()["stdlib"])
        source = f"sources and documentation of the Python {sysconfig.get_python_version()} library"
        documents = [*_library_documents(library), *_pydoc_topics()]
    corpus = Corpus(source, _split(_in_blocks(documents)))
    _check_size(corpus)
    return corpus


def _user_documents(path: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of a file, or of every text file under a folder."""
    if not path.exists():
        raise CorpusError(f"no such file or folder: {path}")
    if path.is_file():
        yield str(path), _read(path)
        return
    files = [
        file
        for file in sorted(path.rglob("*"))
        if file.suffix.lower() in TEXT_SUFFIXES
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not files:
        known = " ".join(sorted(TEXT_SUFFIXES))
        raise CorpusError(f"no text found in {path} (looked for {known})")
    for file in files:
        yield str(file.relative_to(path)), _read(file)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{file} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise CorpusError(f"cannot read {file}: {error.strerror}") from None


def _library_documents(library: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of the readable sources and texts of the standard library."""
    for file in sorted(library.rglob("*")):
        parts = file.relative_to(library).parts
        if (
            file.suffix not in {".py", ".txt", ".rst"}
            or LEFT_OUT_FOLDERS.intersection(parts)
            or parts[-1].startswith(LEFT_OUT_PREFIXES)
        ):
            continue
        try:
            yield "/".join(parts), file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a handful of sources in other encodings; nothing depends on them


def _pydoc_topics() -> Iterator[tuple[str, str]]:
    """(name, text) of what ``help()`` prints about the language, where it is installed."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return
    for name, text in sorted(topics.items()):
        yield f"pydoc_data/topics/{name}", text


def _in_blocks(documents: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """(name, blocks) of every document, or of every section where there are few documents."""
    whole = [(name, list(_blocks(text))) for name, text in documents]
    if len(whole) >= FEW_DOCUMENTS:
        return whole
    return [section for name, blocks in whole for section in _sections(name, blocks)]


def _sections(name: str, blocks: list[str]) -> Iterator[tuple[str, list[str]]]:
    section, chars, number = [], 0, 0
    for block in blocks:
        section.append(block)
        chars += len(block)
        if chars >= SECTION_CHARS:
            yield f"{name}#{number}", section
            section, chars, number = [], 0, number + 1
    if section:
        yield f"{name}#{number}", section


def _blocks(text: str) -> Iterator[str]:
    """Text between blank lines, as one line each; long ones are cut at a line break."""
    text = text.replace(LINE_BREAK, "").expandtabs(4)
    lines: list[str] = []
    chars = 0
    for line in [*text.splitlines(), ""]:
        line = re.sub(r"\s", " ", line).rstrip()[:BLOCK_CHARS]
        if lines and (not line or chars + len(line) > BLOCK_CHARS):
            yield LINE_BREAK.join(lines)
            lines, chars = [], 0
        if line:
            lines.append(line)
            chars += len(line) + 1


def _split(documents: list[tuple[str, list[str]]]) -> dict[str, Split]:
    """Deal documents out to valid, test and train, in the order of a hash of their names.

    What does not fit on a side any more is left out, be it the rest of a document.
    """
    documents = sorted(documents, key=lambda document: _hash(document[0]))
    total = min(sum(len(block) for _, blocks in documents for block in blocks), MAX_CHARS)
    held_out = min(int(total * HELD_OUT_SHARE), HELD_OUT_MAX_CHARS)
    room = {"valid": held_out, "test": held_out, "train": total - 2 * held_out}
    splits = {name: Split() for name in ("train", "valid", "test")}
    seen: set[bytes] = set()
    for _, blocks in documents:
        name = next((name for name in room if splits[name].chars < room[name]), None)
        if name is None:
            break
        side, lines_before = splits[name], len(splits[name].lines)
        end = room[name] if name == "train" else side.chars + room[name] * DOCUMENT_SHARE
        for block in blocks:
            digest = _hash(" ".join(block.replace(LINE_BREAK, " ").split()))
            if side.chars < end and digest not in seen:
                seen.add(digest)
                side.lines.append(block)
                side.chars += len(block)
        side.documents += len(side.lines) > lines_before
    return splits


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _check_size(corpus: Corpus) -> None:
    chars = sum(split.chars for split in corpus.splits.values())
    if chars < MIN_CHARS or not all(split.lines for split in corpus.splits.values()):
        raise CorpusError(
            f"too little text: {chars:,} characters after removing repetitions in {corpus.source}; "
            f"at least {MIN_CHARS:,} are needed"
        )
