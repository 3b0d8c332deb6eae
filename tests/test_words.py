"""Docstrings begin with a verb or a noun, and sentences of pages are short."""

import ast
import re

import pytest
from helpers.commands import PAGES, ROOT

MAX_WORDS = 40
# A docstring that begins so has its verb, or the thing that it describes, in the wrong place.
FIRST_WORDS = ("Of", "What", "Whose", "As", "That", "In", "On")

CODE = sorted((ROOT / "fairseq_tutel").rglob("*.py")) + sorted((ROOT / "scripts").rglob("*.py"))


def name(path):
    return str(path.relative_to(ROOT))


def docstrings(source):
    """Yield the line and text of the docstring of every module, class and function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def wrong_beginnings(source):
    """Return a message for each docstring that begins with one of FIRST_WORDS."""
    return [
        f"line {line}: {text.splitlines()[0]}"
        for line, text in docstrings(source)
        if re.match(r"[A-Za-z]+", text) and re.match(r"[A-Za-z]+", text)[0] in FIRST_WORDS
    ]


def paragraphs(page):
    """Yield the paragraphs, list items and table cells of a page, without programs and links."""
    page = re.sub(r"^ *```.*?^ *```", "\n", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"<!--.*?-->", "\n", page, flags=re.DOTALL)
    page = re.sub(r"`[^`]*`", "CODE", page)
    page = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", page)
    for block in re.split(r"\n\s*\n|\n(?= *(?:[-*+]|\d+\.) )|\n(?=[|#])", page):
        yield from re.split("[|]|<br>", block) if block.startswith("|") else [block]


def long_sentences(page):
    """Return the sentences of a page that have more than MAX_WORDS words."""
    return [
        f"{len(words)} words: {' '.join(words)}"
        for paragraph in paragraphs(page)
        for sentence in re.split(r"(?<=[.!?])[)\"*_]*\s", paragraph)
        if len(words := re.findall(r"\S*\w\S*", sentence)) > MAX_WORDS
    ]


def wrong_files(paths, rule):
    """Return what a rule finds in each file that has to be clean."""
    found = {name(path): rule(path.read_text(encoding="utf-8")) for path in paths}
    return {file: wrong for file, wrong in found.items() if wrong}


def test_docstrings_begin_with_a_verb_or_a_noun():
    assert not wrong_files(CODE, wrong_beginnings)


def test_sentences_of_pages_are_short():
    assert not wrong_files(PAGES, long_sentences)


@pytest.mark.parametrize("text", ["Of a model", "What is left.", "As f", "On a CPU", "In turns."])
def test_docstrings_with_the_verb_elsewhere_are_noticed(text):
    assert wrong_beginnings(f'"""Good."""\ndef f():\n    """{text}"""')
    assert wrong_beginnings(f'class C:\n    def f(self):\n        """\n        {text}\n        """')
    assert not wrong_beginnings(f'"""Return: {text}"""')
    assert not wrong_beginnings('"""Once. Only the words themselves: Often, Ask, Index."""')


def test_long_sentences_are_noticed():
    long = " ".join(["word"] * (MAX_WORDS + 1)) + "."
    for page in (long, f"Short. {long}", f"- item\n- {long}", f"| a | {long} |", f"# T\n{long}"):
        assert len(long_sentences(page)) == 1, page
    short = " ".join(["word"] * 30) + "."
    for page in (f"{short} {short}", f"- {short}\n- {short}", f"| {short} | {short} |"):
        assert not long_sentences(page), page
    assert not long_sentences(f"```python\n{long}\n```\n[text](of/{short})\n`{long}`")
