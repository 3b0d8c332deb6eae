"""Plans of ``NAME_moe``: what the parameters of a run decide, counted on the model itself.

The model is built on the meta device by its own ``build_model``. What its layers compute beside the
experts is not known here, so there is no estimate of activations, operations, traffic and time.
"""

import contextlib
import copy
import functools
import warnings
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fairseq import models, tasks
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import DictConfig, open_dict

from ..config import GrowAt
from ..integrations.fairseq.models.any_architecture import WithExperts
from ..integrations.fairseq.models.stand_ins import OPTIONS, on_meta, stand_in_task
from ..integrations.fairseq.options.fields import TUNED
from ..integrations.fairseq.trainer.sets import changed
from .gpu_memory import memory_of_update
from .hardware import Hardware
from .parameters import Parameters, count_model, without_messages
from .settings import Run, read_run


@dataclass(frozen=True)
class ModelPlan:
    """Counts of a run, and what is left out."""

    settings: Run
    hardware: Hardware
    parameters: Parameters
    at_update: dict[str, int]  # bytes of a GPU while the weights are updated, by kind
    notes: tuple[str, ...]  # what was taken for granted

    @property
    def least_memory(self) -> int:
        """Bytes that a GPU needs at least."""
        return sum(self.at_update.values())


def is_any_model(arch: str | None) -> bool:
    """Return whether an architecture is a dense one with experts put in."""
    model: Any = ARCH_MODEL_REGISTRY.get(arch)
    return isinstance(model, type) and issubclass(model, WithExperts)


def plan_model(
    config: DictConfig,
    name: str,
    hardware: Hardware,
    gpus: int | None = None,
    vocabulary: int | None = None,
) -> ModelPlan:
    """Count the parameters of a run, and the memory that they decide.

    ``vocabulary`` is the size of all dictionaries (default None: set up the task, with its data).

    Raises:
        ValueError: the config contradicts itself, or the model or its task cannot be built here.
    """
    run, notes = read_run(config, name, gpus), ()
    if vocabulary is not None:
        notes = (f"all dictionaries have {vocabulary} symbols; what else the data decides, such as "
                 "the channels of filter banks, is fairseq's default",)  # fmt: skip
    parameters = _parameters(config, run, _builder(config, vocabulary))
    return ModelPlan(run, hardware, parameters, memory_of_update(run, parameters), notes)


def grown_model_plan(
    plan: ModelPlan, config: DictConfig, vocabulary: int | None
) -> ModelPlan | None:
    """Plan the run after ``--moe-grow-at``; return None without that option."""
    grow_at = GrowAt.of(plan.settings.model.moe_grow_at)
    if grow_at is None or not plan.settings.routing:
        return None
    after = {"moe_expert_count": grow_at.num_experts, "moe_grow_at": None}
    with changed(config.model, after):
        name, gpus = plan.settings.name, plan.settings.gpus
        return plan_model(config, name, plan.hardware, gpus, vocabulary)


def memory_of_model(config: DictConfig, ranks: int, task: Any) -> dict[str, int]:
    """Return bytes by kind that a rank needs at least, for a model of a task that is set up."""
    run = read_run(config, "", ranks)
    build = functools.partial(models.build_model, task=task)
    return memory_of_update(run, _parameters(config, run, build))


def _parameters(config: DictConfig, run: Run, build: Callable[[Any], Any]) -> Parameters:
    """Count the parameters of one rank's model; ``build`` makes it from the options."""
    model = copy.deepcopy(config.model)  # building fills in options
    with open_dict(model) if isinstance(model, DictConfig) else contextlib.nullcontext():
        model.moe_simulate_world_size = 0
        model.moe_benchmark = None if run.gpus == 1 else f"simulate_world_size={run.gpus}"
        for name in (*TUNED.values(), "moe_expert_count", "moe_tune_file"):
            setattr(model, name, getattr(run.model, name))
        model.moe_trace = None
    with (
        on_meta(),
        without_messages(),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of weights of a checkpoint, which go nowhere
        try:
            return count_model(build(model), run.gpus)
        except ValueError:
            raise
        except Exception as error:  # the code of the model decides which
            raise ValueError(f"{model._name} cannot be built without its data: {error}") from error


def _builder(config: DictConfig, vocabulary: int | None) -> Callable[[Any], Any]:
    """Return what builds a model from its options, with the task's data or without."""
    if vocabulary is None:
        try:
            return tasks.setup_task(config.task).build_model
        except (Exception, SystemExit) as error:  # whatever a task finds missing
            raise ValueError(
                f"the task {config.task._name} cannot be set up here ({error}): give vocabulary=N, "
                "the size of its dictionaries"
            ) from None
    words = Dictionary()
    words.symbols = [""] * vocabulary  # only the number of symbols matters
    task = stand_in_task(config.model._name, words)

    def build(model: Any) -> Any:
        for name, value in OPTIONS.items() if isinstance(model, Namespace) else ():
            if not hasattr(model, name):  # the task's data would say it
                setattr(model, name, value)
        return models.build_model(model, task)

    return build
