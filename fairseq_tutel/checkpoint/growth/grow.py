"""More experts or fewer: a set whose experts are chosen from another set."""

from collections.abc import Mapping
from typing import Any

import torch

from ..layout import CheckpointError
from ..state import MODEL, NAMED_STATE, OPTIMIZER, options_of
from .change import open_sparse, write_change
from .selection import Choice, Selection, copies, even_load, most_loaded, read_load, repeated

_LOAD_BIAS, _MASTER = "load_bias", "fp32_weight"


def grow(
    src: str,
    dst: str,
    num_experts: int,
    *,
    by: str = "uniform",
    load: str | None = None,
    noise: float = 0.01,
    seed: int = 1,
    ranks: int | None = None,
    force: bool = False,
    in_place: bool = False,
) -> str:
    """Write a set with more experts; CheckpointError if that cannot be done.

    Args:
        src: a set or merged file of any number of ranks.
        dst: X.pt of the new set.
        num_experts: E2 > E.
        by: ``uniform`` copies each expert equally often; ``load`` copies the most loaded first, in
            each layer separately.
        load: the run's ``expert_load.jsonl``; None: the one beside ``src``.
        noise: standard deviation of the noise on a copy's router row, relative to that of all rows.
        seed: seed of the noise.
        ranks: W of the new set; None: as many as ``src`` has rank files.
        force: replace what ``dst`` names.
        in_place: allow ``dst`` to be ``src``, which is replaced in one step.
    """
    source = open_sparse(src, None if in_place else dst, force)
    if num_experts <= source.num_experts:
        raise CheckpointError(
            f"{src}: has {source.num_experts} experts, {num_experts} are not more (see `shrink`)"
        )
    loads = read_load(source, load) if by == "load" else even_load(source)
    chosen = Selection(source, {layer: copies(each, num_experts) for layer, each in loads.items()})
    new = {layer: repeated(experts) for layer, experts in chosen.choice.items()}
    shared = chosen.shared_state()
    _add_noise(chosen, shared, new, noise, seed)
    how = "copies of the most loaded" if by == "load" else "copies of each in turn"
    return write_change(
        dst, source, shared, chosen.experts, ("grow", how, num_experts),
        ranks=ranks, options={"moe_expert_count": num_experts}, force=force, in_place=in_place,
    )  # fmt: skip


def shrink(
    src: str,
    dst: str,
    num_experts: int,
    *,
    load: str | None = None,
    ranks: int | None = None,
    force: bool = False,
) -> str:
    """Write a set with the K <= E2 < E most loaded experts of each layer; see :func:`grow`."""
    source = open_sparse(src, dst, force)
    top_k = options_of(source.shared).get("moe_top_k") or 1
    if not top_k <= num_experts < source.num_experts:
        raise CheckpointError(
            f"{src}: --num-experts {num_experts} must be at least {top_k}, which a token chooses, "
            f"and fewer than {source.num_experts}"
        )
    loads = read_load(source, load)
    choice = {layer: most_loaded(each, num_experts) for layer, each in loads.items()}
    chosen = Selection(source, choice)
    change = ("shrink", "the least loaded dropped", num_experts)
    return write_change(
        dst, source, chosen.shared_state(), chosen.experts, change,
        ranks=ranks, options={"moe_expert_count": num_experts}, force=force,
    )  # fmt: skip


def _add_noise(
    grown: Selection, shared: Mapping[str, Any], new: Choice, noise: float, seed: int
) -> None:
    """Add noise to the router rows of copies, in place; the same to a weight and its fp32 copy."""
    generator = torch.Generator().manual_seed(seed)
    named = (shared.get(OPTIMIZER) or {}).get(NAMED_STATE, {})
    for name, rows in shared[MODEL].items() if noise else ():
        layer = grown.router_of(name, rows, grown.num_experts)
        if layer is None or name.endswith(_LOAD_BIAS):
            continue
        copied, master = list(new[layer]), (named.get(name) or {}).get(_MASTER)
        exact = rows if master is None else master
        drawn = torch.randn((len(copied), *rows.shape[1:]), generator=generator)
        exact[copied] += (noise * float(exact.double().std()) * drawn).to(exact.dtype)
        rows[copied] = exact[copied].to(rows.dtype)
