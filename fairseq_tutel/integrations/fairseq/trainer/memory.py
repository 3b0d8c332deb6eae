"""Memory estimate of a run before it trains, and a clear error when memory runs out.

The planner counts the need. It imports this package, so ``register`` passes its function in
(:func:`count_memory_by`).
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ....moe.memory import StepMemory, free_memory
from ....training.out_of_memory import is_out_of_memory, memory_held, out_of_memory
from .sets import changed

logger = logging.getLogger(__name__)

# (fairseq's config, ranks, symbols of the dictionary, task) -> bytes by kind at the peak of a step;
# raises ValueError if it cannot count
CountMemory = Callable[[Any, int, int, Any], Mapping[str, int]]
_counters: list[CountMemory] = []
# kinds that exist before the first step; kinds that a step allocates and a CPU cannot measure
_BEFORE = ("weights", "fp32 copies")
_PASSING = ("activations", "logits", "working set of a layer", "buffers")


def count_memory_by(counter: CountMemory) -> None:
    """Set the function that counts what a step of a run needs."""
    _counters[:] = [counter]


class MemoryMixin:
    """Memory methods of :class:`~.trainer.MoETrainer`."""

    def memory_of_step(self, num_experts: int | None = None) -> StepMemory | None:
        """Estimate what a training step needs at its peak; None if the planner cannot.

        Of ``NAME_moe`` it is the least that a step needs: without activations. ``num_experts``:
        with so many experts instead, weights included.
        """
        model = self.cfg.model
        symbols = 0  # the planner builds NAME_moe for the task itself
        if not self._is_any_model:
            symbols = len(self.task.target_dictionary or self.task.source_dictionary or ())
        ranks = self.data_parallel_world_size
        if self._model.moe_groups.simulated:
            ranks = self._model.moe_groups.world_size
        other = {} if num_experts is None else {"moe_expert_count": num_experts}
        try:
            with changed(model, other) if other else contextlib.nullcontext():
                kinds = _counters[0](self.cfg, ranks, symbols, self.task)
        except (IndexError, KeyError, TypeError, AttributeError, ValueError) as error:
            logger.debug("the memory of a step is not counted: %s", error)
            return None
        free = free_memory(self.device)
        if num_experts is None:
            return StepMemory(kinds, free, held=_BEFORE)
        # in place of the present model
        mine = sum(memory_held(self._model.parameters()).values())
        return StepMemory(kinds, None if free is None else free + mine)

    def begin_epoch(self, epoch):
        """Begin an epoch; before the first one log what a step needs."""
        super().begin_epoch(epoch)
        if self._memory_logged or not (
            self.is_data_parallel_master and logger.isEnabledFor(logging.INFO)
        ):
            return
        self._memory_logged = True
        need = self.memory_of_step()
        if need is not None:
            level = logging.INFO if need.fits else logging.WARNING
            what = " without activations" if self._is_any_model else ""
            logger.log(level, "memory estimate%s: %s", what, need)
            if not need.fits:
                logger.warning("what helps: %s", "; ".join(self._what_helps()))

    _memory_logged = False

    @property
    def _is_any_model(self) -> bool:
        return hasattr(self._model, "moe_reports_are_collected")

    @contextlib.contextmanager
    def _explaining_memory(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(error, self._consumers(), self._what_helps()) from error

    def _log_oom(self, exc):
        """Log as stock does, which continues on a single rank, and add the line of the error."""
        super()._log_oom(exc)
        logger.warning("%s", out_of_memory(exc, self._consumers(), self._what_helps()))

    def _consumers(self) -> Mapping[str, int]:
        """Return what is held, measured; on a CPU also the estimate of what a step takes."""
        inner = None if self._optimizer is None else self._optimizer.optimizer
        kinds = memory_held(self._model.parameters(), inner)
        if not self.cuda and (need := self.memory_of_step()) is not None:
            kinds |= {name: need.kinds[name] for name in _PASSING if need.kinds.get(name)}
        return kinds

    def _what_helps(self) -> list[str]:
        model, sharding = self.cfg.model, self.cfg.distributed_training.zero_sharding
        sliced = str(getattr(model, "moe_expert_placement", "")) == "sliced"
        checkpoints = getattr(model, "checkpoint_activations", False)
        mode = str(getattr(model, "moe_activation_memory", "minimal"))
        is_on = {
            "--checkpoint-activations": checkpoints,
            "--moe-activation-memory lean": checkpoints or mode != "fast",
            "--moe-activation-memory minimal": checkpoints or mode != "lean",
            "--moe-expert-placement sliced (fewer experts than ranks)": sliced,
            "--zero-sharding os (several ranks)": sharding == "os",
        }
        found = [option for option, on in is_on.items() if not on]
        return found or ["fewer --max-tokens or --batch-size, with --update-freq; more ranks"]
