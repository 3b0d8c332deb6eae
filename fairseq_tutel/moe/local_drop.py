"""Local drop: training steps in which a layer's tokens stay on their rank.

Gating dropout (arXiv 2205.14336), ``--moe-local-drop`` of NLLB: with a probability, per layer and
step, nothing is exchanged. The rows for expert l of every rank are computed by this rank's own
expert l: with e local experts, those of expert ``r * e + l`` by ``rank * e + l``. Routing,
capacity, losses and weights are as ever.

The ranks of an exchange have to draw alike. The number that they draw from travels with what they
agree on (:class:`~fairseq_tutel.distributed.StepAgreement`), so that a recomputation draws the
same, and costs no message of its own.
"""

from __future__ import annotations

import random

from ..distributed import Exchange, StepAgreement
from ..distributed.exchanges import LocalCopy
from .call import LayerCall


def stays_local(call: LayerCall, step: StepAgreement, layer_index: int) -> bool:
    """Whether the rows of this call are computed where they are; never in evaluation, nor where
    nothing would travel.
    """
    probability = call.config.local_drop
    if not (call.training and probability > 0 and call.communicates) or step.draw is None:
        return False
    # a text as the seed: hashed, so that neighbouring layers draw independently
    return random.Random(f"{step.draw} {layer_index}").random() < probability


def without_exchange(call: LayerCall) -> Exchange:
    """The exchange of a call whose rows stay: as many, in the same places."""
    usual = call.choice.exchange
    return Exchange(LocalCopy(usual.groups, usual.name), None, False)
