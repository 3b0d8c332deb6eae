"""Base class of expert banks: the experts of one rank, which map rows to as many rows.

A network of experts is one file: a class with a name, its options, its tensors, and what it
computes. :class:`StackedExperts` (stacked.py) does the rest if the tensors of all experts of a rank
are stacked, as those of the built-in networks are::

    from dataclasses import dataclass

    from torch.nn import functional

    from fairseq_tutel.config import at_least, option
    from fairseq_tutel.moe.experts import Options, Stacked, StackedExperts, register_experts

    @register_experts("mine")
    class MyExperts(StackedExperts):
        \"\"\"One line for the help text of --moe-expert-network.\"\"\"

        @dataclass(frozen=True)
        class Options(Options):
            slope: float = option(0.1, "of the activation left of 0", at_least(0))

        layout = {
            "up_weight": Stacked("FM", "up.weight"),
            "down_weight": Stacked("MF", "down.weight"),
        }

        def compute(self, prepared, rows, offsets):
            up, down = prepared.params
            hidden = self.product(rows, up, offsets)
            return self.product(functional.leaky_relu(hidden, self.options.slope), down, offsets)

That is all: ``MoELayer(..., expert_network="mine", expert_options={"slope": 0.2})``,
``--moe-expert-network mine --moe-mine-slope 0.2``, padded and ragged rows, overlap with exchanges,
placement in slices, every r, state dicts, checkpoints, ``torch.autocast`` and the planner have it
once the file has been imported. ``compute`` applies ``prepared.dropout`` itself. A network with
one or two first projections and a second one is shorter as a subclass of :class:`PlainExperts`
(plain.py), which has biases and dropout. With ``activation_memory="lean"`` or ``"minimal"`` the
rows and the outputs are kept, and the network is computed again in the backward pass.

A bank that keeps its parameters in another form (a list of modules: modules.py) is a subclass of
:class:`ExpertBank`. Its experts are not cut, and their weights do not travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from ... import ops
from ...config import Options
from ...distributed import ExpertParallelism, mark_expert


@dataclass(frozen=True)
class ExpertRows:
    """The rows of all local experts."""

    # [e, N, M] with N rows per expert, unused ones zero (padded); or [R, M] (ragged)
    rows: torch.Tensor
    # int32 [e], end of each expert's rows in a ragged buffer, the rest is unused; None if padded
    offsets: torch.Tensor | None = None


class PreparedExperts(NamedTuple):
    """Parameters and dropout with which a bank computes one batch."""

    params: tuple[torch.Tensor, ...]  # in the dtype of the rows, gathered from other ranks
    dropout: tuple[float, float] = (0.0, 0.0)  # after the activation, and of the output
    dropout_at_source: float = 0.0  # of the output, applied by the tokens' rank, not the bank
    part: int = 0  # number of the part of the hidden units that this rank computes
    network: Any = None  # computes the params without a call of the bank (network.py)


class ExpertBank(nn.Module):
    """Base class of banks. Its parameters differ between ranks."""

    Options: ClassVar[type[Options]] = Options
    # whether experts may be cut into slices and weights may travel (r != 1)
    can_be_gathered: ClassVar[bool] = False
    uses_activation: bool = True  # whether the network has the layer's ``activation``
    expert_ids: Sequence[int]  # global indices of the local experts
    hidden_slice: tuple[int, int] = (0, 1)  # (s, S): slice s of S of each expert's units is here
    memory: ops.ActivationMemory = ops.ActivationMemory()  # kept for the backward pass

    def __setstate__(self, state):
        super().__setstate__(state)
        self.mark()  # copied parameters have lost their marks

    def mark(self) -> None:
        """Mark the parameters as experts, with the number of ranks that have a copy of each."""
        for param in self.parameters():
            mark_expert(param)

    def forward(self, batch: ExpertRows, prepared: PreparedExperts | None = None) -> torch.Tensor:
        """Compute [e, N, M] (padded) or [R, M] (ragged) -> the same shape. Differentiable."""
        raise NotImplementedError

    def prepare(
        self,
        dtype: torch.dtype,
        parallelism: ExpertParallelism | None = None,
        travels: bool = False,
    ) -> PreparedExperts | None:
        """Return what :meth:`forward` needs for rows of this dtype; None if it needs nothing.

        Collective if ``parallelism`` gathers weights; only banks that can be gathered get one. With
        ``travels`` other ranks, with the same network, compute with the parameters too.
        """
        return None

    def set_up(self, compute: str, memory: ops.ActivationMemory) -> None:
        """Set the precision of products, ``same`` as the rows' or ``fp8``, and what is kept.

        Here the precision is only ``same``, and ``lean`` keeps values in the rows' format.
        """
        for name, value in (("expert_compute", compute), ("activation_storage", memory.storage)):
            if value != "same":
                raise ValueError(
                    f"{name}={value!r} is for the networks ffn, swiglu and geglu, "
                    f"not for {type(self).__name__}"
                )
        self.memory = memory

    def kept_per_row(self, model_dim: int) -> int:
        """Return how many numbers per row an expert saves at its activations; 0 if unknown."""
        return 0

    def single_names(self) -> dict[str, list[str]]:
        """Return the names ``{j}.LAYER.KIND`` in state dicts of each stacked parameter's parts."""
        return {}
