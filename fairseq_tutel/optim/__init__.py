"""Optimizers for fairseq: Adam with fp16 statistics that needs no apex."""

from .fairseq_adam import install

__all__ = ["install"]
