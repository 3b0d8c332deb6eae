"""Three prompts, and what the trained model makes of them."""

import re
from pathlib import Path

from corpus import LINE_BREAK

COUNT = 3
# How functions, comments and paragraphs of the documentation begin in Python's library.
LIBRARY_PROMPTS = ["def __init__(self, name", "# This function returns", "The arguments of the"]
PROMPT_WORDS = 4


def choose_prompts(test_text: Path, library: bool) -> list[str]:
    """Fixed prompts for Python's library; for other text how three held-out blocks begin."""
    if library:
        return LIBRARY_PROMPTS
    blocks = [
        line.replace(LINE_BREAK, " ").split()
        for line in test_text.read_text(encoding="utf-8").splitlines()
    ]
    long_enough = [words for words in blocks if len(words) > 3 * PROMPT_WORDS] or blocks
    step = max(1, len(long_enough) // COUNT)
    return [" ".join(words[:PROMPT_WORDS]) for words in long_enough[::step][:COUNT]]


def parse(lines: list[str]) -> list[str]:
    """Texts of fairseq-interactive's output, in the order of the prompts."""
    found = [re.match(r"D-(\d+)\t[^\t]*\t(.*)", line) for line in lines]
    texts = {int(match[1]): match[2] for match in found if match}
    return [texts[number].replace(LINE_BREAK, "\n") for number in sorted(texts)]
