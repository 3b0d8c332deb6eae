"""The steps that every change of a set shares: open the source, write the new set."""

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...config.options import as_flags
from ..layout import CheckpointError, check_same, count_rank_files, form
from ..reader import SetReader, read_set
from ..state import GROWTH, updates_done, with_options
from ..store import Experts, refuse_target, write_set

logger = logging.getLogger(__name__)

# entries of extra_state that a new number of experts makes invalid: load sums, tuned exchanges
_FOR_NUM_EXPERTS = ("moe_expert_load", "moe_tuner")


def open_sparse(path: str, dst: str | None, force: bool) -> SetReader:
    """Open the set with experts from which ``dst`` will be made; CheckpointError if it cannot."""
    if dst is not None:
        refuse_target(dst, path, force)  # before experts are read
    source = read_set(path)
    if not source.num_experts:
        raise CheckpointError(f"{path}: is dense; `upcycle` makes experts of its FFNs")
    return source


def check_ffn(ffn: Mapping[str, Tensor], where: str) -> None:
    """Raise CheckpointError unless tensors are an FFN of fairseq: weights and biases that fit."""
    weight = ffn.get("fc1.weight")
    if weight is None or weight.dim() != 2:
        found = "lacks it" if weight is None else f"it is {form(weight)}"
        raise CheckpointError(f"{where}fc1.weight: an FFN needs a matrix of this name, and {found}")
    (hidden, dim), dtype = weight.shape, str(weight.dtype).removeprefix("torch.")
    shapes = {"fc1.weight": [hidden, dim], "fc1.bias": [hidden]}
    shapes |= {"fc2.weight": [dim, hidden], "fc2.bias": [dim]}
    if not weight.is_floating_point():
        raise CheckpointError(f"{where}fc1.weight: weights are floating point, not {dtype}")
    expected = {f"{where}{name}": f"{shape} {dtype}" for name, shape in shapes.items()}
    found = {f"{where}{name}": form(value) for name, value in ffn.items()}
    check_same(found, expected, "an FFN", f"one with {hidden} hidden units of {dim} numbers")


def write_change(
    dst: str,
    source: SetReader,
    shared: Mapping[str, Any],
    experts: Experts,
    change: tuple[str, str, int],
    *,
    ranks: int | None,
    options: Mapping[str, Any] | None = None,
    more_flags: Mapping[str, Any] | None = None,
    force: bool = False,
    in_place: bool = False,
) -> str:
    """Write a set that was made of another; return its canonical path.

    ``change`` (its name, how it was made, experts then) is added to the history that ``inspect``
    shows. ``options`` replace options of the model; they and ``more_flags`` are logged as the flags
    to continue training with. ``ranks`` is by default the number of the source's rank files. Others
    are arguments of :func:`..store.write_set`.
    """
    what, how, after = change
    if ranks is None and after and source.kind == "set":
        ranks = source.num_rank_files
    state = with_options(shared, options or {})
    if isinstance(extra := state.get("extra_state"), Mapping):
        kept = {name: each for name, each in extra.items() if name not in _FOR_NUM_EXPERTS}
        state["extra_state"] = kept
    entry = {"what": what, "how": how, "before": source.num_experts, "after": after}
    state[GROWTH] = [*(state.get(GROWTH) or ()), {**entry, "update": updates_done(state)}]
    if ranks is not None:
        try:
            count_rank_files(after, ranks)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; --ranks chooses another number") from None
    written = write_set(
        dst, state, experts,
        num_experts=after, num_ranks=ranks, source=source, force=force, in_place=in_place,
    )  # fmt: skip
    if flags := {**(more_flags or {}), **(options or {})}:
        logger.info("continue training with: %s", as_flags(flags))
    return written
