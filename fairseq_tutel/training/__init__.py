"""How fairseq trains, saves and evaluates a model with MoE layers.

:mod:`.hooks` is the one place that changes anything in fairseq; importing this package installs it.
"""

from .hooks import install

install()

__all__ = ["install"]
