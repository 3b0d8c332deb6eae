"""Generation with experts: fairseq-generate, fairseq-interactive and ``from_pretrained``.

Each process has all experts by default. ``--model-overrides "{'moe_expert_parallel_size': N}"``
spreads them over N ranks of one job. Ranks decode different sentences in both cases.
"""

import ast
import functools
import logging
import os
from argparse import Namespace
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils

from ....command_line.starters import started
from ..models import SharedDecoding, is_spread
from . import program, ranks

logger = logging.getLogger(__name__)

# Several threads speed up a step of generation if the largest matrix has this many elements.
_LARGE = 2**22


def generate(original, cfg):
    """Replace ``main`` of fairseq-generate, so that ranks that share experts become one job."""
    if isinstance(cfg, Namespace):
        cfg = convert_namespace_to_omegaconf(cfg)
    if started(os.environ).world_size == 1 or not _spreads_experts(cfg.common_eval.model_overrides):
        return original(cfg)
    ranks.join_started_ranks(cfg)
    return distributed_utils.call_main(cfg, ranks.meet_in_time(cfg, original))


def _spreads_experts(overrides: str) -> bool:
    try:
        given = ast.literal_eval(overrides)
    except (SyntaxError, ValueError):
        return False  # fairseq reports it
    return isinstance(given, dict) and (given.get("moe_expert_parallel_size") or 1) > 1


class _SharedBatches:
    """Batches of this rank. After the last one, this rank's experts serve the other ranks."""

    def __init__(self, batches: Iterable[Any], models: Iterable[Any]):
        self._batches, self._models = batches, models

    def __iter__(self) -> Iterator[Any]:
        with SharedDecoding(self._models):
            yield from self._batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)


def _share_batches(models, task) -> None:
    """Let the ranks of a generating program decode together."""
    make, infer = task.get_batch_iterator, task.inference_step

    def get_batch_iterator(*args, **kwargs):
        epoch = make(*args, **kwargs)
        begin = epoch.next_epoch_itr
        epoch.next_epoch_itr = lambda *a, **options: _SharedBatches(begin(*a, **options), models)
        return epoch

    def inference_step(*args, **kwargs):
        try:
            return infer(*args, **kwargs)
        except BaseException:
            for shared in {model.decoder.shared_decoding for model in models} - {None}:
                shared.tell_failure()
            raise

    task.get_batch_iterator, task.inference_step = get_batch_iterator, inference_step


def prepare_generation(models, task) -> None:
    """Warn of unknown words in prompts, share batches, use one thread for small models."""
    dictionary = task.source_dictionary
    if dictionary is not None:
        dictionary.encode_line = functools.partial(_encode_line, dictionary)
    if program() == "fairseq-generate" and any(map(is_spread, models)):
        _share_batches(models, task)
    if program() in ("fairseq-generate", "fairseq-interactive"):
        _limit_threads(models)


def _encode_line(dictionary, line, *args, **kwargs):
    """Run ``dictionary.encode_line``, and warn of the first text with unknown words."""
    ids = type(dictionary).encode_line(dictionary, line, *args, **kwargs)
    words = line.split() if isinstance(line, str) else []
    unknown = [word for word in words if dictionary.index(word) == dictionary.unk()]
    if unknown:
        del dictionary.encode_line  # once
        logger.warning(
            "%d of the %d words of the text are not in the dictionary and become <unk> (%s); if "
            "the data was made of sentencepieces, give --bpe sentencepiece --sentencepiece-model "
            "FILE (from_pretrained: bpe=, sentencepiece_model=)",
            len(unknown),
            len(words),
            ", ".join(map(repr, unknown[:5])),
        )
    return ids


def _limit_threads(models) -> None:
    """Use one thread for small models, unless OMP_NUM_THREADS is set: threads would mostly wait."""
    params = [param for model in models for param in model.parameters()]
    largest = max(param.shape[-2:].numel() for param in params)
    if "OMP_NUM_THREADS" not in os.environ and largest < _LARGE and torch.get_num_threads() > 1:
        logger.info("generation by one thread of the CPU (OMP_NUM_THREADS sets another number)")
        torch.set_num_threads(1)
