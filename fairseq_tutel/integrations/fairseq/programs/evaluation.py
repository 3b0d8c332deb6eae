"""Loads and runs fairseq's evaluation programs with sharded experts."""

import contextlib
import difflib
import inspect
import logging
import os
import re
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, utils
from fairseq.dataclass.utils import omegaconf_no_object_check, overwrite_args_by_name
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import DictConfig, OmegaConf

from ....checkpoint import check_complete, find_checkpoint, load_file, load_for_rank, read_set
from ....checkpoint.state import options_of
from ....distributed import any_rank, process_world, sum_over_ranks
from ..criterions import CRITERIONS
from ..models import ARCHITECTURES, MoETransformerDecoder, name_with_experts
from ..options.fields import use_present_names
from ..options.options import EXPERT_DTYPES, moe_frequencies
from .trace import leave_out_next
from .words import words_of_all_ranks

logger = logging.getLogger(__name__)

# Overrides that fairseq's moe branch documents for its hub interface; nothing here needs them.
_WITHOUT_EFFECT = {"moe_disable_padding"}
_LISTED = 10  # most checkpoints that an error lists


def is_moe_checkpoint(path: str) -> bool:
    """Return whether ``path`` names a sharded set or a file with expert parameters."""
    kind, file = find_checkpoint(path) or ("merged", path)
    if kind == "set":
        return True
    if not os.path.exists(file):
        return False  # fairseq reports it, or fetches it from somewhere else
    model = load_file(file).get("model") or ()  # memory-mapped: reads no weights
    return any(".experts." in str(name) for name in model)


def checkpoints_beside(path: str) -> str:
    """Return a list of the checkpoints in the folder of ``path``, for an error message."""
    folder = Path(path).parent
    if "://" in path:
        return ""
    if not folder.is_dir():
        return f"; there is no folder {folder}"
    member = re.compile(r"(\.pt\.\w+)?-(shared|rank-\d+)\.pt$")
    names = sorted({member.sub(".pt", p.name) for p in folder.glob("*.pt")})
    if not names:
        return f"; {folder} holds no checkpoint"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"; {folder} holds {', '.join(names[:_LISTED])}{more}"


def load_state(path: str, arg_overrides: dict | None = None) -> dict[str, Any]:
    """Load a checkpoint like ``load_checkpoint_to_cpu``, with this rank's share of the experts.

    ValueError for an override that names no MoE option, which fairseq would ignore.
    """
    _check_overrides(arg_overrides, _options())
    # what these options were in the training run does not matter here
    arg_overrides = {
        "moe_expert_parallel_size": 0,
        "moe_expert_placement": "replicated",
        "moe_parallelism_r": 1,
        "moe_tune_file": None,
        "moe_expert_dtype": "same",
        "moe_map_experts": False,
        "moe_trace": None,
        **(arg_overrides or {}),
    }
    rank, world_size = process_world()
    state = load_for_rank(
        path,
        rank=rank,
        world_size=world_size,
        expert_parallel_size=arg_overrides["moe_expert_parallel_size"],
        with_optimizer=False,
        check_experts=not arg_overrides.get("moe_map_experts"),
    )
    return with_options_of_today(state, path, arg_overrides)


def with_options_of_today(
    state: dict[str, Any], path: str, arg_overrides: dict | None = None
) -> dict[str, Any]:
    """Return a checkpoint's state with a config that this fairseq and this package read.

    Checkpoints of Meta's branches, which name a dense architecture and MoE options, get the name of
    the architecture with experts.
    """
    arg_overrides = arg_overrides or {}
    check_complete(state, path)
    args = state.get("args")
    if args is not None:
        for name, value in arg_overrides.items():
            setattr(args, name, value)
        if any(moe_frequencies(args)):
            args.arch = name_with_experts(args.arch)
    if state.get("cfg") is not None:
        state["cfg"] = _as_config(state["cfg"])
        model, task = state["cfg"].model, state["cfg"].task
        # newer versions of fairseq drop options that the task lacks by themselves
        known = TASK_DATACLASS_REGISTRY.get(task.get("_name"))
        for name in set(task) - set(known.__dataclass_fields__ if known else task):
            del task[name]
        use_present_names(model)
        if model.get("moe_activation_storage") == "bf16":  # removed; evaluation keeps nothing
            model.moe_activation_storage = "same"
        for name in set(arg_overrides) & _options() - set(model):
            # fairseq overwrites present options only, and older checkpoints lack newer ones
            model[name] = None
        overwrite_args_by_name(state["cfg"], arg_overrides)
        if any(moe_frequencies(model)):
            named, model._name = model._name, name_with_experts(model._name)
            if named != model._name and "encoder_moe_freq" in model:
                _read_frequencies(model, state["model"])
    return checkpoint_utils._upgrade_state_dict(state)


def _options() -> set[str]:
    return {
        *(name for row in ARCHITECTURES.values() for name in row.schema.__dataclass_fields__),
        *(name for row in CRITERIONS.values() for name in row.config.__dataclass_fields__),
    }


def _read_frequencies(model: DictConfig, names: Iterable[str]) -> None:
    """Read which layers have experts off parameter names: ``nllb`` does not follow its options."""
    for side in ("encoder", "decoder"):
        found = re.compile(rf"{side}\.layers\.(\d+)\.moe_layer\.")
        numbers = [int(match[1]) for name in names if (match := found.match(name))]
        model[f"{side}_moe_freq"] = min(numbers) + 1 if numbers else 0
    model.moe_freq = 0


def _check_overrides(overrides: Any, options: set[str]) -> None:
    if overrides is not None and not isinstance(overrides, dict):
        raise ValueError(f"--model-overrides {overrides}: expected a dict, as {{'moe_top_k': 1}}")
    of_moe = {name for name in options if name.startswith("moe_")} | _WITHOUT_EFFECT
    for name in overrides or ():
        if name.startswith("moe_") and name not in of_moe:
            close = difflib.get_close_matches(name, of_moe, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"override {name}: there is no such option{hint}")
    dtype = (overrides or {}).get("moe_expert_dtype", "same")
    if dtype not in EXPERT_DTYPES:
        known = ", ".join(EXPERT_DTYPES)
        raise ValueError(f"override moe_expert_dtype={dtype!r}: expected one of {known}")


def _as_config(saved: dict[str, Any]) -> DictConfig:
    """Return a checkpoint's config, which may hold objects, as fairseq's own loader makes it."""
    # Meta's translation models have a namespace inside
    saved = {name: vars(v) if isinstance(v, Namespace) else v for name, v in saved.items()}
    if "flags" in inspect.signature(OmegaConf.create).parameters:
        return OmegaConf.create(saved, flags={"allow_objects": True})
    with omegaconf_no_object_check():  # omegaconf 2.0, which fairseq 0.12.2 requires
        return OmegaConf.create(saved)


def refuse_other_task(cfg, path: str) -> None:
    """Raise ValueError if the default task, translation, would read a language model."""
    if cfg.task._name != "translation" or not is_moe_checkpoint(path):
        return
    options = options_of(read_set(path).shared, "task")
    name = options.get("_name") or options.get("task")
    known = TASK_DATACLASS_REGISTRY.get(name)
    if known is not None and "source_lang" not in known.__dataclass_fields__:
        raise ValueError(
            f"{path} is of another task than translation, the default: give --task {name}"
        )


def eval_lm(original, models, source_dictionary, batch_iterator, **options):
    """Replace fairseq's ``eval_lm`` function for a model whose experts are spread over ranks.

    The scores are summed over all ranks; stock reports those of rank 0 alone. Ranks that exchange
    tokens agree before each batch on whether any rank has one left. A rank that has none takes part
    with a single token, because the others need its experts.
    """
    groups = [m.moe_groups for m in models if getattr(m, "moe_groups", None) is not None]
    if not groups:
        return original(models, source_dictionary, batch_iterator, **options)
    for decoder in (getattr(model, "decoder", None) for model in models):
        if isinstance(decoder, MoETransformerDecoder):
            decoder.is_evaluated = True
    rank, world_size = process_world()
    scored: list[int] = []
    batches = _counted(batch_iterator, scored, source_dictionary, options)
    if any(each.needs_sync for each in groups):
        batches = _in_step(batches, models, source_dictionary.eos())
    with words_of_all_ranks() if world_size > 1 else contextlib.nullcontext():
        local = original(models, source_dictionary, batches, **options)
    device = next(models[0].parameters()).device
    score, tokens = sum_over_ranks([float(local["loss"]) * sum(scored), sum(scored)], device)
    if not tokens:  # stock reports a perplexity of 1
        raise ValueError("no token was evaluated: the subset is empty")
    if world_size == 1:
        return local
    if rank == 0:
        logger.info("All %d ranks together evaluated %s tokens", world_size, f"{tokens:,.0f}")
    loss = score / tokens
    return {"loss": loss, "perplexity": 2**loss}


def _counted(batches: Iterable, scored: list[int], source_dictionary, options):
    """Yield the batches, and append the number of scored tokens of each sentence to ``scored``."""
    pad = (options.get("target_dictionary") or source_dictionary).pad()
    unscored = int(options.get("remove_bos_token", False))
    continued = torch.tensor([])
    if options.get("post_process") in ("subword_nmt", "@@ "):
        mark = options["post_process"].rstrip()
        words = range(len(source_dictionary))
        continued = torch.tensor([i for i in words if source_dictionary[i].endswith(mark)])
    for batch in batches:
        if "net_input" not in batch:
            continue
        starts = batch.get("start_indices", [0] * len(batch["target"]))
        for row, start in zip(batch["target"], starts, strict=True):
            tokens = utils.strip_pad(row[int(start) :], pad)[unscored:]
            scored.append(len(tokens) - int(torch.isin(tokens[:-1], continued.to(tokens)).sum()))
        yield batch


def _in_step(batches: Iterable, models, filler: int):
    """Yield this rank's batches, then compute fillers until no rank has a batch left."""
    device = next(models[0].parameters()).device
    for batch in batches:
        any_rank(True, device)
        yield batch
    token = torch.full((1, 1), filler, dtype=torch.int64, device=device)
    while any_rank(False, device):
        for model in models:
            leave_out_next(model)
            with torch.no_grad():
                model(src_tokens=token, src_lengths=token.new_ones(1))
