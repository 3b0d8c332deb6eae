"""Docstrings begin with a verb or a noun, and sentences of pages are short."""

import ast
import re

from helpers.commands import PAGES, ROOT

MAX_WORDS = 40
# A docstring that begins so has its verb, or the thing that it describes, in the wrong place.
WRONG = r"(Of|What|Whose|As|That|In|On)\b"
CODE = [path for room in ("fairseq_tutel", "scripts") for path in (ROOT / room).rglob("*.py")]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def wrong_beginnings(source):
    """Return the first line of each docstring that begins with a wrong word."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    texts = [ast.get_docstring(node) or "" for node in nodes]
    return [text.splitlines()[0] for text in texts if re.match(WRONG, text)]


def long_sentences(page):
    """Return the sentences of paragraphs, list items and cells that have more than MAX_WORDS."""
    page = re.sub(r"^ *```.*?^ *```|<!--.*?-->", "\n", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "CODE", page))
    found = []
    for block in re.split(r"\n\s*\n|\n(?= *(?:[-*+]|\d+\.) )|\n(?=[|#])", page):
        for part in re.split("[|]|<br>", block) if block.startswith("|") else [block]:
            found += re.split(r"(?<=[.!?])[)\"*_]*\s", part)
    return [text for text in found if len(re.findall(r"\S*\w\S*", text)) > MAX_WORDS]


def wrong_files(paths, rule):
    found = {str(path.relative_to(ROOT)): rule(path.read_text("utf-8")) for path in paths}
    return {file: wrong for file, wrong in found.items() if wrong}


def test_docstrings_begin_with_a_verb_or_a_noun():
    assert not wrong_files(CODE, wrong_beginnings)
    assert wrong_beginnings('"""Good."""\ndef f():\n    """Of a model"""') == ["Of a model"]
    assert not wrong_beginnings('"""Once. Only the words themselves: Often, Ask, Index."""')


def test_sentences_of_pages_are_short():
    assert not wrong_files(PAGES, long_sentences)
    long, short = ("word " * count + "end." for count in (MAX_WORDS, 30))
    for page in (long, f"Short. {long}", f"- item\n- {long}", f"| a | {long} |", f"# T\n{long}"):
        assert len(long_sentences(page)) == 1, page
    fine = f"- {short}\n- {short}\n\n{short} {short}\n| {short} | {short} |"
    assert not long_sentences(f"{fine}\n```python\n{long}\n```\n[text](of/{short})\n`{long}`")
