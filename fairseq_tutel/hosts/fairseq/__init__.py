"""How fairseq trains, saves and evaluates a model with MoE layers.

:mod:`.hooks` is the one place that changes anything in fairseq; :func:`fairseq_tutel.register`
installs it.
"""

from .hooks import install

__all__ = ["install"]
