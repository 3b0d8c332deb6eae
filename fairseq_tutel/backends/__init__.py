"""Implementations of the operators, one room each; :mod:`fairseq_tutel.ops` chooses.

``torch`` runs anywhere and is tuned for CPUs; ``triton`` has the kernels for GPUs. A file has the
same name in both and in :mod:`fairseq_tutel.ops`; the triton room lacks what torch's own products
compute best on a GPU too. The letters of shapes are those of the glossary in
``fairseq_tutel/README.md``.
"""

# name of a gated network's activation -> that of its gate
GATES = {"swiglu": "silu", "geglu": "gelu"}
