"""How fairseq trains, saves and evaluates a model with MoE layers.

Importing it makes fairseq know the models, the criterion and the optimizer's fp16 statistics;
:mod:`.hooks` is the one place that changes anything in fairseq.
"""

from . import criterions, hooks, models

__all__ = ["criterions", "models"]

hooks.install()
