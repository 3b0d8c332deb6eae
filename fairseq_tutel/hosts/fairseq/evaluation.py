"""Loading for, and running of, fairseq's evaluation programs with sharded experts."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import os
from collections.abc import Iterable
from typing import Any

import torch
from fairseq import checkpoint_utils, utils
from fairseq.dataclass.utils import omegaconf_no_object_check, overwrite_args_by_name
from omegaconf import DictConfig, OmegaConf

from ...checkpoint import (
    check_complete,
    final_path,
    find_checkpoint,
    load_file,
    load_for_rank,
)
from ...criterions.moe_cross_entropy import MoECrossEntropyCriterionConfig
from ...distributed import any_rank, process_world, sum_over_ranks
from ...models import TransformerLMGPTMoEConfig

logger = logging.getLogger(__name__)

_ARCH = "transformer_lm_gpt_moe"
# what fairseq's moe branch documents for its hub interface and nothing here needs
_WITHOUT_EFFECT = {"moe_disable_padding"}


def is_moe_checkpoint(path: str) -> bool:
    """Whether ``path`` names a sharded set or a file with expert parameters.

    Raises:
        CheckpointError: a file that may not or cannot be read, whatever is in it: fairseq's own
            loader would run its code where ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1``, and does not
            name a damaged file.
    """
    path = final_path(path)
    kind, file = find_checkpoint(path) or ("merged", path)
    if kind == "set":
        return True
    if not os.path.exists(file):
        return False  # fairseq reports it, or fetches it from somewhere else
    model = load_file(file).get("model") or ()  # memory-mapped: reads no weights
    return any(".experts." in str(name) for name in model)


def load_state(path: str, arg_overrides: dict | None = None) -> dict[str, Any]:
    """What ``load_checkpoint_to_cpu`` returns, with this rank's share of the experts.

    Checkpoints of fairseq's ``moe`` branch name a dense architecture and MoE options; they become
    ``transformer_lm_gpt_moe``.

    Raises:
        ValueError: an override of an MoE option that there is not (fairseq ignores it).
    """
    options = {
        *TransformerLMGPTMoEConfig.__dataclass_fields__,
        *MoECrossEntropyCriterionConfig.__dataclass_fields__,
    }
    for name in set(arg_overrides or ()) - options - _WITHOUT_EFFECT:
        if name.startswith("moe_"):
            of_moe = [option for option in options if option.startswith("moe_")]
            close = difflib.get_close_matches(name, of_moe, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"override {name}: there is no such option{hint}")
    rank, world_size = process_world()
    # how the training run's ranks shared the experts says nothing about these
    arg_overrides = {
        "moe_expert_parallel_size": 0,
        "moe_expert_placement": "replicated",
        "moe_parallelism_r": 1,
        "moe_tune_file": None,
        **(arg_overrides or {}),
    }
    state = load_for_rank(
        final_path(path),
        rank=rank,
        world_size=world_size,
        expert_parallel_size=arg_overrides["moe_expert_parallel_size"],
        with_optimizer=False,
    )
    check_complete(state, path)
    args = state.get("args")
    if args is not None:
        for name, value in arg_overrides.items():
            setattr(args, name, value)
        if getattr(args, "moe_freq", 0) > 0:
            args.arch = _ARCH
    if state.get("cfg") is not None:
        state["cfg"] = _as_config(state["cfg"])
        for name in set(arg_overrides) & options - set(state["cfg"].model):
            # fairseq overwrites what is there, and older checkpoints lack newer options
            state["cfg"].model[name] = None
        overwrite_args_by_name(state["cfg"], arg_overrides)
        if state["cfg"].model.get("moe_freq", 0) > 0:
            state["cfg"].model._name = _ARCH
    return checkpoint_utils._upgrade_state_dict(state)


def _as_config(saved: dict[str, Any]) -> DictConfig:
    """A checkpoint's config, which may hold objects, as fairseq's own loader makes it."""
    if "flags" in inspect.signature(OmegaConf.create).parameters:
        return OmegaConf.create(saved, flags={"allow_objects": True})
    with omegaconf_no_object_check():  # omegaconf 2.0, which fairseq 0.12.2 requires
        return OmegaConf.create(saved)


def in_step(eval_lm):
    """Make fairseq's ``eval_lm`` function fit for a model whose experts are spread over ranks.

    Each rank scores its share of the data. Ranks run out of batches at different times, but their
    experts are needed until the last: before each batch the ranks agree on whether any still has
    one, and a rank that has none joins in with a single token. The scores are added over the
    ranks; stock reports those of rank 0 alone.

    Raises:
        ValueError: no token was scored (fairseq calls the perplexity of nothing 1).
    """

    @functools.wraps(eval_lm)
    def eval_lm_in_step(models, source_dictionary, batch_iterator, *args, **kwargs):
        if not any(hasattr(m, "moe_groups") for m in models):
            return eval_lm(models, source_dictionary, batch_iterator, *args, **kwargs)
        count = _TokenCount(source_dictionary, *args, **kwargs)
        spread = any(_spread(model) for model in models)
        batches = _counted(batch_iterator, count)
        if spread:
            batches = _in_step(batches, models, source_dictionary.eos())
        local = eval_lm(models, source_dictionary, batches, *args, **kwargs)
        if not spread:
            _check_scored_tokens(count.total)
            return local
        device = next(models[0].parameters()).device
        score, tokens = sum_over_ranks([float(local["loss"]) * count.total, count.total], device)
        _check_scored_tokens(tokens)
        rank, world_size = process_world()
        if rank == 0:
            logger.info("All %d ranks together evaluated %s tokens", world_size, f"{tokens:,.0f}")
        loss = score / tokens
        return {"loss": loss, "perplexity": 2**loss}

    return eval_lm_in_step


def _check_scored_tokens(tokens: float) -> None:
    if not tokens:
        raise ValueError("no token was evaluated: the subset is empty")


def on_one_rank(main):
    """Make ``fairseq-validate`` refuse experts on several ranks, where it would wait for ever.

    It passes over empty batches and adds up through CUDA; ``fairseq-eval-lm`` does neither.
    """

    @functools.wraps(main)
    def main_on_one_rank(cfg, **kwargs):
        _, world_size = process_world()
        if world_size > 1 and is_moe_checkpoint(cfg.common_eval.path):
            raise ValueError(
                f"fairseq-validate runs a model with experts on one process, not on {world_size}; "
                "fairseq-eval-lm runs on any number"
            )
        return main(cfg, **kwargs)

    return main_on_one_rank


def _spread(model) -> bool:
    groups = getattr(model, "moe_groups", None)
    return groups is not None and groups.agrees


def _counted(batches: Iterable, count):
    for batch in batches:
        if "net_input" in batch:
            count.add(batch)
            yield batch


def _in_step(batches: Iterable, models, filler: int):
    device = next(models[0].parameters()).device
    for batch in batches:
        any_rank(True, device)
        yield batch
    token = torch.full((1, 1), filler, dtype=torch.int64, device=device)
    while any_rank(False, device):
        for model in models:
            model(src_tokens=token, src_lengths=token.new_ones(1))


class _TokenCount:
    """How many tokens ``eval_lm`` divides by (it returns averages only); the same arguments."""

    def __init__(
        self,
        source_dictionary,
        post_process=None,
        output_word_probs=False,
        output_word_stats=False,
        target_dictionary=None,
        softmax_batch=0,
        remove_bos_token=False,
        device=None,
    ):
        self.total = 0
        self._pad = (target_dictionary or source_dictionary).pad()
        self._skip_first = int(remove_bos_token)
        self._continued = []
        if post_process in {"subword_nmt", "@@ "}:
            mark = post_process.rstrip()
            words = range(len(source_dictionary))
            self._continued = [i for i in words if source_dictionary[i].endswith(mark)]

    def add(self, batch):
        """Count the scored tokens of a batch."""
        starts = batch.get("start_indices", [0] * len(batch["target"]))
        for row, start in zip(batch["target"], starts, strict=True):
            tokens = utils.strip_pad(row[int(start) :], self._pad)[self._skip_first :]
            self.total += len(tokens)
            if self._continued:
                inside = torch.isin(tokens[:-1], torch.tensor(self._continued).to(tokens))
                self.total -= int(inside.sum())
