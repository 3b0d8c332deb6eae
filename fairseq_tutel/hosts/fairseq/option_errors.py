"""One line for an option that fairseq's parser refuses.

argparse puts up to 199 lines of usage before its error. In fairseq's programs only the error is
printed, with a hint: which option was meant, or which architecture, task or criterion has it.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from typing import NoReturn

from fairseq.criterions.cross_entropy import CrossEntropyCriterionConfig
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from fairseq.tasks.language_modeling import LanguageModelingConfig

from ...criterions.moe_cross_entropy import MoECrossEntropyCriterionConfig
from ...exit_codes import EXIT_USAGE
from ...models import TransformerLMGPTMoEConfig

_LISTS = "--help lists fairseq's options, python -m fairseq_tutel this package's"
_CHOICE = r"(?P<start>.*: invalid choice: '(?P<value>.*?)') \(choose from (?P<all>.*)\)"
_MANY = 20  # choices, above which only the closest are listed


def install() -> None:
    """For every parser of the process; to be called in fairseq's programs only."""
    argparse.ArgumentParser.error = _error


def _error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    text = message.replace("invalid <lambda> value", "cannot read")
    if choice := re.match(_CHOICE, text):
        text = _without_most_choices(choice, text)
    elif message.startswith("unrecognized arguments: "):
        text += _whose(parser, message.partition(": ")[2].split())
    parser.exit(EXIT_USAGE, f"{parser.prog}: error: {text} ({_LISTS})\n")


def _without_most_choices(choice: re.Match, text: str) -> str:
    names = re.findall(r"[^\s',]+", choice["all"])
    if len(names) <= _MANY:
        return text
    close = difflib.get_close_matches(choice["value"], names, 3)
    return f"{choice['start']}, " + (
        f"did you mean {' or '.join(close)}?" if close else f"none of {len(names)} names"
    )


def _flags(config: type, beside: type | None = None) -> set[str]:
    """Options of a dataclass that ``beside`` has not."""
    names = set(config.__dataclass_fields__) - set(getattr(beside, "__dataclass_fields__", ()))
    return {"--" + name.replace("_", "-") for name in names}


def _owners() -> dict[str, str]:
    """Every option whose parser fairseq adds only for a choice, with that choice."""
    return {
        **dict.fromkeys(_flags(TransformerLanguageModelConfig), "--arch transformer_lm_gpt_moe"),
        **dict.fromkeys(_flags(LanguageModelingConfig), "--task language_modeling"),
        **dict.fromkeys(
            _flags(TransformerLMGPTMoEConfig, TransformerLanguageModelConfig),
            "--arch transformer_lm_gpt_moe",
        ),
        **dict.fromkeys(
            _flags(MoECrossEntropyCriterionConfig, CrossEntropyCriterionConfig),
            "--criterion moe_cross_entropy",
        ),
    }


def _whose(parser: argparse.ArgumentParser, words: list[str]) -> str:
    """What to add to the error about unknown options: whose they are, or which were meant."""
    owners = _owners()
    unknown = [word.partition("=")[0] for word in words if word.startswith("--")]
    for flag in unknown:
        if flag in owners:
            choice, _, _ = owners[flag].partition(" ")
            given = [
                f"{choice} {after}"
                for word, after in zip(sys.argv, sys.argv[1:], strict=False)
                if word == choice
            ]
            instead = given[-1] if given else f"no {choice}"
            if not given and choice == "--task":
                instead += " (fairseq's default is translation)"
            return f"; {flag} belongs to {owners[flag]}, but the command has {instead}"
    options = [*parser._option_string_actions, *owners]
    for flag in unknown:
        close = difflib.get_close_matches(flag, options, 1)
        if close:
            return f"; for {flag}, did you mean {close[0]}?"
    return ""
