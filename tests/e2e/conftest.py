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
    parts = {"train": paragraphs[:700], "valid": paragraphs[700:780], "test": paragraphs[780:840]}
    command = ["--only-source", "--nwordssrc", "1000", "--destdir", str(folder / "bin")]
    for split, part in parts.items():
        file = folder / f"{split}.txt"
        file.write_text("".join(f"{' '.join(words)}\n" for words in part))
        command += [f"--{split}pref", str(file)]
    forked(programs, 1, "fairseq-preprocess", *command, "--workers", "1")
    return folder / "bin"
