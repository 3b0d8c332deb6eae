"""A small data-bin of real text: the help topics that come with Python."""

import re
from pydoc_data.topics import topics

import pytest
from commands import forked


@pytest.fixture(scope="session")
def data_bin(tmp_path_factory, programs):
    """Folder made by fairseq-preprocess: train (700 paragraphs), valid (80), test (60)."""
    folder = tmp_path_factory.mktemp("text")
    paragraphs = [
        re.findall(r"[a-z]+|[.,;]", paragraph.lower())
        for text in topics.values()
        for paragraph in text.split("\n\n")
    ]
    paragraphs = [words for words in paragraphs if 3 < len(words) < 60]
    for split, part in (
        ("train", paragraphs[:700]),
        ("valid", paragraphs[700:780]),
        ("test", paragraphs[780:840]),
    ):
        lines = "\n".join(" ".join(words) for words in part)
        (folder / f"{split}.txt").write_text(lines + "\n")
    command = ["--only-source", "--nwordssrc", "1000"]
    for split in ("train", "valid", "test"):
        command += [f"--{split}pref", str(folder / f"{split}.txt")]
    command += ["--destdir", str(folder / "bin"), "--workers", "1"]
    forked(programs, 1, "fairseq-preprocess", *command)
    return folder / "bin"
