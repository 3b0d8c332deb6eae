"""Help texts of the options that this package adds to fairseq, for ``python -m fairseq_tutel``.

``fairseq-train --help`` ends before it looks at the options of an architecture or a criterion.
"""

from __future__ import annotations

import argparse
import dataclasses

from fairseq.criterions.cross_entropy import CrossEntropyCriterionConfig
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models.transformer_lm import TransformerLanguageModelConfig

from ...criterions.moe_cross_entropy import MoECrossEntropyCriterionConfig
from ...models import TransformerLMGPTMoEConfig

_COMMANDS = """other commands, each with --help:
  python -m fairseq_tutel.launch       start the ranks, or adopt those of SLURM, torchrun or MPI
  python -m fairseq_tutel.plan         parameters, memory and speed of a configuration, on paper
  python -m fairseq_tutel.checkpoint   inspect, merge and reshard checkpoints
"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Adds the default where the help text does not state it."""

    def _get_help_string(self, action):
        stated = action.default in (None, False, argparse.SUPPRESS) or "default" in action.help
        return action.help if stated else f"{action.help} (default: %(default)s)"


def _own_options(config: type, stock: type, name: str) -> type:
    """The dataclass of the fields that ``config`` adds to ``stock``."""
    inherited = {field.name for field in dataclasses.fields(stock)}
    own = [
        (f.name, f.type, dataclasses.field(default=f.default, metadata=f.metadata))
        for f in dataclasses.fields(config)
        if f.name not in inherited
    ]
    return dataclasses.make_dataclass(name, own, bases=(FairseqDataclass,))


def make_parser() -> argparse.ArgumentParser:
    """A parser whose help is that of the architecture's and the criterion's own options."""
    parser = argparse.ArgumentParser(
        prog="fairseq-train DATA --user-dir fairseq_tutel",
        usage="%(prog)s --arch transformer_lm_gpt_moe --criterion moe_cross_entropy [option ...]",
        description="Beside the options of fairseq's transformer_lm and of its trainer "
        "(fairseq-train --help):",
        epilog=_COMMANDS,
        formatter_class=_Formatter,
        add_help=False,
    )
    for title, config, stock in (
        (
            "--arch transformer_lm_gpt_moe",
            TransformerLMGPTMoEConfig,
            TransformerLanguageModelConfig,
        ),
        (
            "--criterion moe_cross_entropy",
            MoECrossEntropyCriterionConfig,
            CrossEntropyCriterionConfig,
        ),
    ):
        group = parser.add_argument_group(title)
        gen_parser_from_dataclass(group, _own_options(config, stock, "Options")())
    return parser
