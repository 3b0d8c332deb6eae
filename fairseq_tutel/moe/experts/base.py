"""What an expert bank is: the experts of one rank; their rows in, as many rows out.

A network of experts is one file: a class with a name, its options, its tensors, and what it
computes. :class:`StackedExperts` (stacked.py) does all else, if the tensors of all experts of a
rank are stacked, as those of the built-in networks are::

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

        def compute(self, call, rows, offsets):
            up, down = call.params
            hidden = self.product(rows, up, offsets)
            return self.product(functional.leaky_relu(hidden, self.options.slope), down, offsets)

That is all: ``MoELayer(..., expert_network="mine", expert_options={"slope": 0.2})``,
``--moe-expert-network mine --moe-mine-slope 0.2``, padded and ragged rows, overlap with exchanges,
placement in slices, every r, state dicts, checkpoints, ``torch.autocast`` and the planner have it
once the file has been imported. A network whose weight gradients should be computed once over all
chunks of an overlapped exchange also gives the three methods ``chunk*`` of :class:`ExpertBank`.

A bank that keeps its parameters otherwise (a list of modules: modules.py) is a subclass of
:class:`ExpertBank`. Its experts are computed whole where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from ...config import Options
from ...distributed import ExpertParallelism, mark_expert
from ..chunks import ExpertRows


class ExpertCall(NamedTuple):
    """A call of a bank without its rows: what is computed now."""

    # in the dtype of the rows; with those of other ranks where parallelism gathers them
    params: tuple[torch.Tensor, ...]
    dropout: tuple[float, float] = (0.0, 0.0)  # probabilities inside the network, of its output
    dropout_at_source: float = 0.0  # of the output, where the rank of the tokens applies it
    part: int = 0  # of the hidden units, where other ranks compute others


class ExpertBank(nn.Module):
    """Base class of banks. Parameters are experts' ones: each rank has its own.

    Attributes:
        can_be_gathered: whether experts may be in slices, and weights travel (r other than 1).
        uses_activation: whether the network has the activation that a layer is given.
    """

    Options: ClassVar[type[Options]] = Options
    can_be_gathered: ClassVar[bool] = False
    uses_activation: ClassVar[bool] = True
    expert_ids: Sequence[int]
    hidden_slice: tuple[int, int] = (0, 1)

    def mark(self) -> None:
        """Mark the parameters as experts, with the number of ranks that have a copy of each."""
        for param in self.parameters():
            mark_expert(param)

    def forward(self, batch: ExpertRows, call: ExpertCall | None = None) -> torch.Tensor:
        """[e, N, M] (padded) or [R, M] (ragged) -> the same shape. Differentiable."""
        raise NotImplementedError

    def call(
        self, dtype: torch.dtype, parallelism: ExpertParallelism | None = None
    ) -> ExpertCall | None:
        """What is computed now, on rows of this dtype; None: by :meth:`forward` alone.

        Collective where ``parallelism`` gathers weights, which is for banks that can be gathered.
        """
        return None

    def kept_per_row(self, model_dim: int) -> int:
        """Numbers of a row that a whole expert keeps for its backward pass, in and out of its
        activations: each matrix has as many at one of its ends. 0 where it is unknown.
        """
        return 0

    def single_names(self) -> dict[str, list[str]]:
        """Stacked parameter -> its parts in state dicts, ``{j}.LAYER.KIND`` of local expert j."""
        return {}

    @property
    def computes_chunks(self) -> bool:
        """Whether ``chunk*`` take the place of :meth:`forward` for rows in chunks."""
        return False

    def chunk(
        self, call: ExpertCall, rows: torch.Tensor, offsets: torch.Tensor | None, keep: bool
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        """:meth:`forward` without autograd on the rows of one chunk: the output, and what the
        backward pass needs if ``keep``, as many entries in each call.
        """
        raise NotImplementedError

    def chunk_bwd(
        self, call: ExpertCall, d_out: torch.Tensor, state: Sequence[Any], needs_rows: bool
    ) -> tuple[torch.Tensor | None, Any]:
        """The gradient of a chunk's rows, and what :meth:`chunks_bwd_params` needs beside."""
        raise NotImplementedError

    def chunks_bwd_params(
        self, call: ExpertCall, states: Sequence[Sequence[Any]], gradients: Sequence[Any]
    ) -> tuple[torch.Tensor, ...]:
        """Gradients of ``call.params``, summed over all rows of all chunks."""
        raise NotImplementedError
