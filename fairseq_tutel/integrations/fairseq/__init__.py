"""How fairseq trains, saves and evaluates a model with MoE layers.

:func:`register` makes fairseq know the models, the criterion and the optimizer's fp16 statistics;
:mod:`.hooks` is the one place that changes anything in fairseq.
"""

from . import criterions, models  # noqa: F401  (importing registers them)
from .hooks import install as register

__all__ = ["register"]
