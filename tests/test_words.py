"""Docstrings begin with a verb or a noun, and sentences of pages are short."""

import ast
import re

from helpers.commands import PAGES, ROOT

MAX_WORDS = 40
# A docstring that begins so has its verb, or the thing that it describes, in the wrong place.
WRONG = r"(Of|What|Whose|As|That|In|On)\b"


def test_docstrings_begin_with_a_verb_or_a_noun():
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in (
        each for room in ("fairseq_tutel", "scripts") for each in ROOT.glob(f"{room}/**/*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            text = isinstance(node, documented) and ast.get_docstring(node) or ""
            assert not re.match(WRONG, text), f"{path}: {text}"


def test_sentences_of_pages_are_short():
    for path in PAGES:
        page = re.sub(
            r"^ *```.*?^ *```|<!--.*?-->",
            "\n",
            path.read_text("utf-8"),
            flags=re.DOTALL | re.MULTILINE,
        )
        page = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "CODE", page))
        for block in re.split(r"\n\s*\n|\n(?= *(?:[-*+]|\d+\.) )|\n(?=[|#])", page):
            for part in re.split("[|]|<br>", block) if block.startswith("|") else [block]:
                for text in re.split(r"(?<=[.!?])[)\"*_]*\s", part):
                    assert len(re.findall(r"\S*\w\S*", text)) <= MAX_WORDS, f"{path}: {text}"
