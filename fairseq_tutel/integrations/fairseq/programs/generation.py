"""Generation with experts: fairseq-generate, fairseq-interactive and ``from_pretrained``.

Each process has all experts by default. ``--model-overrides "{'moe_expert_parallel_size': N}"``
spreads them over N ranks of one job. Ranks decode different sentences in both cases, and rank 0
reports on the sentences of all.
"""

import ast
import functools
import io
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from fairseq import utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils

from ....command_line.starters import started
from ....distributed import gather_on_first, process_world
from ..models import SharedDecoding, is_spread
from . import evaluation, program, ranks

logger = logging.getLogger(__name__)

# Several threads speed up a step of generation if the largest matrix has this many elements.
_LARGE = 2**22


def generate(original, cfg):
    """Replace ``main`` of fairseq-generate: ranks that were started together become one job."""
    if isinstance(cfg, Namespace):
        cfg = convert_namespace_to_omegaconf(cfg)
    paths = utils.split_paths(cfg.common_eval.path or "")
    if not any(map(evaluation.is_moe_checkpoint, paths)):
        return original(cfg)
    evaluation.refuse_other_task(cfg, paths[0])
    if started(os.environ).world_size == 1:
        return original(cfg)
    if results := cfg.common_eval.results_path:
        raise ValueError(
            f"--results-path {results} is one file: start one process, or leave it out and "
            "redirect the output"
        )
    ranks.join_started_ranks(cfg)
    if cfg.distributed_training.distributed_init_method is None:  # the user shares out the data
        return original(cfg)
    _spread_on_request_only(cfg)
    return distributed_utils.call_main(cfg, ranks.meet_in_time(cfg, _together(original)))


def _spread_on_request_only(cfg) -> None:
    """Let each rank load all experts, unless ``--model-overrides`` spreads them."""
    try:
        given = ast.literal_eval(cfg.common_eval.model_overrides)
    except (SyntaxError, ValueError):
        return  # fairseq reports it
    if isinstance(given, dict) and (given.get("moe_expert_parallel_size") or 1) == 1:
        whole = {"moe_expert_parallel_size": 1, "moe_expert_placement": "replicated"}
        cfg.common_eval.model_overrides = repr({**given, **whole})
        # no tensor of a GPU travels: two ranks may have one GPU
        cfg.distributed_training.distributed_backend = "gloo"


def _together(main):
    """Return ``main`` for a rank of a job: rank 0 reports, after the others have ended."""

    @functools.wraps(main)
    def main_of_rank(cfg):
        global _corpus
        if isinstance(sys.stdout, io.TextIOWrapper):  # ranks may write to the same pipe
            sys.stdout.reconfigure(line_buffering=True, write_through=False)
        _corpus = _Corpus()
        try:
            return main(cfg)
        except _ShareDone:
            return None
        finally:
            _corpus = None

    return main_of_rank


class _ShareDone(Exception):
    """Ends ``main`` of a rank other than 0 after its sentences: rank 0 reports."""


class _Corpus:
    """Sentences, tokens and scored pairs of all ranks, which rank 0 reports together."""

    def __init__(self):
        gather_on_first(None)  # connects the ranks while all of them are here
        self.is_first = process_world()[0] == 0
        self._sentences = self._tokens = 0
        self._pairs: list[tuple[Any, Any]] = []
        self._add: Any = None

    def collect_pairs(self, scorer: Any) -> None:
        """Keep what this rank gives to its scorer, for the scorer of rank 0."""
        name = "add_string" if hasattr(scorer, "add_string") else "add"
        self._add = getattr(scorer, name)
        if not self.is_first:
            setattr(scorer, name, lambda *pair: self._pairs.append(pair))

    def count(self, sample: dict, hypotheses: list) -> None:
        """Count a batch of this rank as fairseq-generate does."""
        self._sentences += sample["id"].numel()
        self._tokens += sum(len(each[0]["tokens"]) for each in hypotheses)

    def batches(self, batches: Any, models: Any) -> Iterator[Any]:
        """Yield this rank's batches; rank 0 then gets one that stands for all of the others."""
        with SharedDecoding(models):  # after the last one, its experts serve the other ranks
            yield from batches
        parts = gather_on_first((self._sentences, self._tokens, self._pairs))
        if parts is None:
            raise _ShareDone
        for _, _, pairs in parts[1:]:
            for pair in pairs:
                self._add(*pair)
        sentences, tokens = (sum(part[i] for part in parts[1:]) for i in range(2))
        none = torch.zeros(0, 1, dtype=torch.int64)
        yield {"id": none, "target": none, "net_input": {}, "nsentences": sentences,
               "of_other_ranks": tokens}  # fmt: skip


_corpus: _Corpus | None = None  # while ranks generate together


def build_scorer(original, *args, **kwargs):
    """Replace fairseq's function: the scorer of rank 0 gets the sentences of all ranks."""
    scorer = original(*args, **kwargs)
    if _corpus is not None:
        _corpus.collect_pairs(scorer)
    return scorer


class _Batches:
    """Batches of this rank for one pass over the data."""

    def __init__(self, batches: Any, corpus: _Corpus, models: Any):
        self._batches, self._corpus, self._models = batches, corpus, models

    def __iter__(self) -> Iterator[Any]:
        return self._corpus.batches(self._batches, self._models)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)


def _share_batches(corpus: _Corpus, models, task) -> None:
    """Let the ranks of a generating program decode together."""
    make, infer = task.get_batch_iterator, task.inference_step

    def get_batch_iterator(*args, **kwargs):
        epoch = make(*args, **kwargs)
        begin = epoch.next_epoch_itr
        epoch.next_epoch_itr = lambda *a, **options: _Batches(begin(*a, **options), corpus, models)
        return epoch

    def inference_step(generator, models, sample, **options):
        if "of_other_ranks" in sample:
            return [[{"tokens": range(sample["of_other_ranks"])}]]
        try:
            hypotheses = infer(generator, models, sample, **options)
        except BaseException:
            for shared in {model.decoder.shared_decoding for model in models if is_spread(model)}:
                shared.tell_failure()
            raise
        corpus.count(sample, hypotheses)
        return hypotheses

    task.get_batch_iterator, task.inference_step = get_batch_iterator, inference_step


def _drop_nothing(model) -> None:
    """Let a model of any architecture generate without a capacity; ValueError if it cannot."""
    if model.moe_groups.needs_sync:
        raise ValueError(
            f"the experts of {type(model).__name__} are spread over ranks, which cannot generate "
            "together: leave moe_expert_parallel_size out of --model-overrides, or give 1"
        )

    def without_capacity(layer, args, kwargs):
        return args, {"capacity_factor": 0.0, **kwargs}

    for layer in model.moe_layers.values():
        layer.register_forward_pre_hook(without_capacity, with_kwargs=True)


def prepare_generation(models, task) -> None:
    """Warn of unknown words in prompts, share batches, use one thread for small models."""
    for model in models:
        scores = program() in ("fairseq-validate", "fairseq-eval-lm")
        if hasattr(model, "moe_reports_are_collected") and not scores:
            _drop_nothing(model)
    dictionary = task.source_dictionary
    if dictionary is not None:
        dictionary.encode_line = functools.partial(_encode_line, dictionary)
    if _corpus is not None:
        if not _corpus.is_first:  # fairseq-generate has turned rank 0's level on everywhere
            logging.getLogger().setLevel(logging.WARNING)
        _share_batches(_corpus, models, task)
    if program() in ("fairseq-generate", "fairseq-interactive"):
        _limit_threads(models)


_PIECES = (
    "; if the data was made of sentencepieces, give --bpe sentencepiece --sentencepiece-model FILE "
    "(from_pretrained: bpe=, sentencepiece_model=)"
)


def _encode_line(dictionary, line, *args, **kwargs):
    """Run ``dictionary.encode_line``, and warn of the first text with unknown words."""
    ids = type(dictionary).encode_line(dictionary, line, *args, **kwargs)
    words = line.split() if isinstance(line, str) else []
    unknown = [word for word in words if dictionary.index(word) == dictionary.unk()]
    if unknown:
        del dictionary.encode_line  # once
        logger.warning(
            "%d of the %d words of the text are not in the dictionary and become <unk> (%s)%s",
            len(unknown),
            len(words),
            ", ".join(map(repr, unknown[:5])),
            "" if "\u2581" in line else _PIECES,  # it begins a piece's word
        )
    return ids


def _limit_threads(models) -> None:
    """Use one thread for small models, unless OMP_NUM_THREADS is set: threads would mostly wait."""
    params = [param for model in models for param in model.parameters()]
    largest = max(param.shape[-2:].numel() for param in params)
    if "OMP_NUM_THREADS" not in os.environ and largest < _LARGE and torch.get_num_threads() > 1:
        logger.info("generation by one thread of the CPU (OMP_NUM_THREADS sets another number)")
        torch.set_num_threads(1)
