"""Filters for warnings and log lines of fairseq's programs that a user can do nothing about."""

import logging
import re
import warnings

from ....command_line.quiet import wants_everything

# beginnings of messages: fairseq uses the APIs of Hydra, torch.amp and DDP of 2020, pins memory on
# a CPU, and gives attention a bool mask with a float mask
_WARNINGS = (
    r"\s*hydra\.experimental\.",
    r"\s*The version_base parameter",
    r"\s*The strict flag in the compose API",
    r"\s*'config' is validated against",
    r"\s*In 'config': Usage of deprecated",
    r"'pin_memory' argument is set",
    r"`torch\.cuda\.amp\.\w+\(args",
    r"`broadcast_buffers` is deprecated",
    r"Support for mismatched (src_)?key_padding_mask",
)
# logger -> whole lines; fairseq takes missing biases (None) for one shared parameter
_LINES = {
    "fairseq.tasks.fairseq_task": r"(can_reuse_epoch_itr|reuse_dataloader|rebuild_batches) = \w+",
    "fairseq.trainer": r"detected shared parameter: \S+\.bias <- \S+\.bias",
    # the whole config, which belongs to a training run
    **{f"fairseq_cli.{name}": r"\{.*\}|Namespace\(.*" for name in
       ("eval_lm", "interactive", "generate", "validate")},
}  # fmt: skip
# metrics that lines of --log-format simple within an epoch leave out; those of validations and of
# whole epochs have them, and so have json, TensorBoard and wandb (WATCHING.md)
_DETAILS = re.compile(
    r", (expert\d_balance_(top|bottom)|unused_expert\d_count|overflow_expert2|moe_util_rank"
    r"|moe_wire_error_\w+)=[^,]*"
)


def install() -> None:
    """Add the filters, unless the user wants to see everything."""
    if wants_everything():
        return
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name, line in _LINES.items():
        logging.getLogger(name).addFilter(
            lambda record, line=line: not re.fullmatch(line, record.getMessage(), re.DOTALL)
        )
    logging.getLogger("fairseq.logging.progress_bar").addFilter(_without_details)
    logging.getLogger("hydra").setLevel(logging.INFO)  # where it is used as a library


def _without_details(record: logging.LogRecord) -> bool:
    if record.name == "train_inner" and not record.args:
        record.msg = _DETAILS.sub("", record.msg)
    return True
