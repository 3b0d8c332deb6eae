"""Words that fairseq-eval-lm logs on several ranks (--output-word-probs, --output-word-stats)."""

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any

from fairseq.utils import move_to_cpu

from ....distributed import gather_on_first, process_world

_SUMS = ("count", "log_prob", "next_word_prob", "missing_next_words")


class _Words(logging.Filter):
    """Filter of fairseq-eval-lm's log that keeps what a rank says of its own share."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []  # of ranks other than 0
        self.stats: dict[str, Any] = {}  # fairseq's WordStat by word
        self._is_first = process_world()[0] == 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is logged at once."""
        said: Any = record.msg
        if hasattr(said, "missing_next_words"):
            self.stats[said.word] = said
        elif self._is_first:
            return not str(said).startswith("Evaluated ")
        elif re.match(r"\d+ ", str(said)):
            self.lines.append(said)
        return record.levelno > logging.INFO


@contextlib.contextmanager
def words_of_all_ranks() -> Iterator[None]:
    """Log the words of all ranks on rank 0, and no number of tokens of one rank. Collective."""
    log, words = logging.getLogger("fairseq_cli.eval_lm"), _Words()
    gather_on_first(None)  # connects the ranks while all of them are here
    level = log.level
    log.setLevel(logging.INFO)  # of ranks other than 0 it is higher
    log.addFilter(words)
    try:
        yield
    finally:
        log.removeFilter(words)
        log.setLevel(level)
    mine = [(type(each), move_to_cpu(vars(each))) for each in words.stats.values()]
    parts = gather_on_first((words.lines, mine))
    for lines, stats in (parts or ())[1:]:
        for line in lines:
            log.info(line)
        for kind, values in stats:
            total = words.stats.setdefault(values["word"], kind(values["word"], values["is_bpe"]))
            for name in _SUMS:
                setattr(total, name, getattr(total, name) + values[name])
    if parts is not None:
        for total in sorted(words.stats.values(), key=lambda each: -each.count):
            log.info(total)
