"""A sentencepiece model for the corpus, and the corpus in its pieces."""

from pathlib import Path

import sentencepiece
from corpus import LINE_BREAK

VOCAB_SIZE = 4000


def train(text: Path, model: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Train on the lines of ``text`` and write ``model`` (and, beside it, the same as .vocab).

    White space is kept as it is, since indentation is part of a source file, and the sign for a
    line break is a piece of its own. A short text may give fewer pieces than asked for.
    """
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(model.with_suffix("")),
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=0.9999,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=[LINE_BREAK],
        max_sentence_length=100_000,
        num_threads=2,
        minloglevel=2,
    )


def encode(model: Path, texts: dict[Path, Path]) -> dict[str, int]:
    """Write every text (key) as pieces (value), line by line; return pieces per file name."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    counts = {}
    for source, target in texts.items():
        # Not splitlines(): a line ends at "\n" only, for sentencepiece and fairseq alike.
        lines = source.read_text(encoding="utf-8").rstrip("\n").split("\n")
        pieces = processor.encode(lines, out_type=str)
        target.write_text("".join(" ".join(line) + "\n" for line in pieces), encoding="utf-8")
        counts[source.stem] = sum(len(line) + 1 for line in pieces)  # + 1: end of line
    return counts
