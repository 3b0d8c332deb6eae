"""Implementations of the operators; :mod:`fairseq_tutel.ops` chooses between them.

``torch`` runs anywhere and is tuned for CPUs. ``triton`` has kernels for GPUs. A file has the same
name in both and in :mod:`fairseq_tutel.ops`. ``triton`` lacks operators for which torch's own
products are best on a GPU too. The glossary in ``fairseq_tutel/README.md`` explains the letters of
shapes.
"""

# activation of a gated network -> activation of its gate
GATES = {"swiglu": "silu", "geglu": "gelu"}
