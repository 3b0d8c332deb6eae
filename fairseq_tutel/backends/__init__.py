"""Implementations of the operators, one room each; :mod:`fairseq_tutel.ops` chooses.

``torch`` runs anywhere and is tuned for CPUs; ``triton`` has the kernels for GPUs. A file has the
same name in both and in :mod:`fairseq_tutel.ops`.
"""
