"""Flags of Meta's branches on fairseq's command lines, and rules for parsed arguments.

Commands for Meta's branches ``moe`` and ``nllb`` run unchanged. A flag without a meaning here is
accepted, with a line that says why. A flag that would change the result is refused, with what to do
instead. Architectures add the training flags, hooks.py those of the evaluation programs.
"""

import argparse
import dataclasses
import importlib.util
import logging
from typing import Any

from ....config.options import as_flag, check_needs, option
from ..criterions.conditional_routing import BudgetOptions
from . import data_tags
from .bundles import expand
from .options import run_options

logger = logging.getLogger(__name__)

_SEEN = "_meta_flags"  # of the namespace, until the rules report them
_CMR = "conditional routing needs an encoder-decoder, --arch transformer_moe"
_ONE_STACK = "a language model has one stack of layers: give --moe-freq"
_BY_FILES = "models with experts are recognised by their files"

# flag, with a word for its value if it takes one -> why it has no effect
ACCEPTED = {
    "--use-tutel-moe": "every MoE layer has operators of its own; Tutel is not needed",
    "--init-model-on-gpu": "models are initialised on the CPU, then moved",
    "--pass-tokens-transformer-layer": "it is for metrics by language; none are logged",
    "--cmr-log-lang-gates": "no metrics by language are logged",
    "--train-with-epoch-remainder-batch": "the last batch of an epoch is trained on if its size is "
    "a multiple of --required-batch-size-multiple (1: always)",
    "--replication-count N": "a checkpoint has every expert once, whatever the number of ranks",
    "--log-nvidia-smi": "the log has the memory of the GPU, as fairseq's does",
}
# of the evaluation programs
ACCEPTED_IN_EVALUATION = {"--is-moe": _BY_FILES, "--moe-generation": _BY_FILES}
# options of transformer_moe that language models refuse -> what to do instead
REFUSED_BY_LANGUAGE_MODELS = {
    "--encoder-moe-freq N": _ONE_STACK,
    "--decoder-moe-freq N": _ONE_STACK,
    "--alternate-ffn-embed-dim N": "give --alternate-decoder-ffn-embed-dim",
    "--moe-cmr": _CMR,
    "--cmr-gate-drop P": _CMR,
}
# flags that all models refuse -> what to do instead
REFUSED = {
    "--moe-eval-capacity-max-seqlen": "a capacity of evaluation follows the tokens of the batch: "
    "leave it out, and nothing is dropped, or give --moe-eval-capacity-factor",
    "--no-best-checkpoints": "give --keep-best-checkpoints to bound their number",
    "--no-save-optimizer-state-on-training-finished": "give --no-save-optimizer-state, or leave it "
    "out",
    "--symlink-best-and-last-checkpoints": "every name is a set of files of its own",
    "--s3-upload-path PATH": "nothing is uploaded: copy the folder of --save-dir",
    "--block-wise": "give --fp16-adam-stats, whose statistics have a scale per block",
}
_ALL_REFUSED = REFUSED | REFUSED_BY_LANGUAGE_MODELS
# tasks of pairs of sentences that cannot train such a model
REFUSED_TASKS = {
    "multilingual_translation": "it trains fairseq's own multilingual models; give "
    "translation_multi_simple_epoch",
    "translation_from_pretrained_bart": "it cannot load its data, with any model; give "
    "translation and --restore-file with the pretrained model",
}


class _MetaFlag(argparse.Action):
    """Refuse the flag, or remember it for :func:`apply_rules`."""

    def __call__(self, parser, namespace, values, option_string=None):
        if self.const in _ALL_REFUSED:
            flag = self.option_strings[0]
            parser.error(f"{flag} of Meta's branches: {_ALL_REFUSED[self.const]}")
        vars(namespace).setdefault(_SEEN, set()).add(self.const)


def add_meta_flags(parser: Any) -> None:
    """Add the training flags to a parser or a group of it, without help texts."""
    _add_data_tags(parser)
    for entry in (*ACCEPTED, *_ALL_REFUSED):
        flag, *value = entry.split()
        if flag not in parser._option_string_actions:
            hidden = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            parser.add_argument(flag, action=_MetaFlag, nargs=len(value), const=entry, **hidden)


def _add_data_tags(parser: Any) -> None:
    if data_tags.FLAG not in parser._option_string_actions:
        parser.add_argument(data_tags.FLAG, action="store_true", help=data_tags.HELP)


def with_evaluation_flags(config: type) -> type:
    """Return fairseq's dataclass of evaluation options with Meta's flags added."""
    fields = [
        (flag.lstrip("-").replace("-", "_"), bool, option(False, f"accepted, but: {reason}"))
        for flag, reason in ACCEPTED_IN_EVALUATION.items()
    ]
    fields.append((data_tags.KEY, bool, option(False, data_tags.HELP)))
    return dataclasses.make_dataclass(config.__name__, fields, bases=(config,))


def apply_rules(row: Any, args: argparse.Namespace) -> None:
    """Adapt parsed arguments to an ``Architecture``, or end the program if they do not fit."""
    _refuse_task(row, args)
    if vars(args).get(data_tags.KEY) and args.task != data_tags.TASK:
        raise SystemExit(f"error: {data_tags.FLAG} is an option of --task {data_tags.TASK}")
    lines = _replace_meta_flags(args)
    if getattr(args, "distributed_rank", 0) == 0:
        for line in lines:
            logger.warning(line)
    without_tpu(args)
    defaults = {field.name: field.default for field in dataclasses.fields(row.schema)}
    try:
        expand(args, row.schema)
        run_options(argparse.Namespace(**{**defaults, **vars(args)}), row.config)
        # not in run_options: a checkpoint's options, of which some were switched off, stay loadable
        for config in (row.config, BudgetOptions):
            check_needs(args, config, as_flag)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


def without_tpu(args: argparse.Namespace) -> None:
    """Undo that --bf16 makes stock fairseq look for a TPU."""
    if getattr(args, "bf16", False) and importlib.util.find_spec("torch_xla") is None:
        args.tpu = False


def _refuse_task(row: Any, args: argparse.Namespace) -> None:
    task = getattr(args, "task", None)
    refused = REFUSED_TASKS.get(task)
    if task == "translation" and "encoder_layers" not in row.config.__dataclass_fields__:
        refused = "it is a language model; give --task language_modeling (translation: the default)"
    if refused:
        raise SystemExit(f"error: --task {task} is not for --arch {args.arch}: {refused}")


def _replace_meta_flags(args: argparse.Namespace) -> list[str]:
    """Remove or replace flags without a meaning; return a line about each."""
    lines = [
        f"{entry.split()[0]} of Meta's branches has no effect: {ACCEPTED[entry]}"
        for entry in sorted(vars(args).pop(_SEEN, ()))
    ]
    if getattr(args, "ddp_backend", None) == "fully_sharded":
        args.ddp_backend = "legacy_ddp"
        states = "--zero-sharding os shards their optimizer statistics, with the same results"
        if getattr(args, "zero_sharding", "none") == "os":
            states = "their optimizer statistics are sharded (--zero-sharding os)"
        lines.append(
            "--ddp-backend fully_sharded: experts are spread over the ranks in any case; the dense "
            f"parameters are replicated (legacy_ddp); {states}"
        )
    return lines
