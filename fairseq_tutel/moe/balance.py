"""Balance loss over the tokens of all ranks: of one forward pass, or of a whole update."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..distributed import sum_tensor_over_ranks_
from .recomputation import recalled
from .reports import MoEAux
from .torch_modes import outside_checkpoints, untraced
from .update_load import UpdateLoad


def balance_over_ranks(reports: Iterable[MoEAux]) -> list[MoEAux]:
    """Add the balance loss over the tokens of all ranks to reports.

    A rank's loss is ``E * sum_e F_e * mean_t(p_te)``, with p of its own tokens. F is the share of
    the choices of all ranks: in this forward pass (``balance_scope="global"``), or in the passes of
    the update up to and including this one (``"update"``). Weighted by the ranks' tokens and
    summed, a pass's loss with ``"global"`` has the gradient of one process with all tokens (Qiu et
    al., arXiv 2501.11873, eq. 3). With ``"update"`` the same holds for the update's last pass.
    Dummy batches of fairseq count; passes without gradient do not.

    Collective in training with these options: one all-reduce of integers. Reports come in the same
    order on all ranks; others are returned unchanged. A pass that activation checkpointing
    recomputes is not counted again.
    """
    reports = list(reports)
    waiting = [aux for aux in reports if aux.balance_counts is not None]
    if not waiting:
        return reports
    pairs_L = iter(_pairs_untraced(waiting))
    return [aux if aux.balance_counts is None else _finish(aux, next(pairs_L)) for aux in reports]


def _pairs_of_all_ranks(waiting: Sequence[MoEAux]) -> list[torch.Tensor]:
    """Return the counts of each report's loss, int64 [E + 1]."""
    mine: list[Any] = [aux.balance_counts for aux in waiting]
    # what a recomputation repeats is known already, and later passes do not change it
    loads = tuple(aux.update_load for aux in waiting)
    if any(loads):
        return recalled(loads, lambda: _sums(mine, loads))
    return _sums(mine, loads)


def _sums(mine: Sequence[torch.Tensor], loads: Sequence[UpdateLoad | None]) -> list[torch.Tensor]:
    sums = sum_tensor_over_ranks_(torch.cat(list(mine))).split([len(each) for each in mine])
    return [s if load is None else load.add(s) for s, load in zip(sums, loads, strict=True)]


_pairs_untraced = untraced(_pairs_of_all_ranks)  # a trace sees neither collectives nor state


def _finish(aux: MoEAux, pairs: torch.Tensor) -> MoEAux:
    """Return a report with its balance loss."""
    pairs = pairs.double()
    assert aux.mean_prob_E is not None  # it comes with the counts
    share_E = (pairs[:-1] / pairs[-1].clamp(min=1)).to(aux.mean_prob_E.dtype)
    # kept and not recomputed: later passes of the update have other shares
    with outside_checkpoints():
        loss = aux.loss + len(share_E) * torch.dot(aux.mean_prob_E, share_E)
    return aux._replace(loss=loss, mean_prob_E=None, balance_counts=None, update_load=None)
