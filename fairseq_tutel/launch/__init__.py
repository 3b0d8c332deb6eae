"""Starts or adopts the ranks of a job: ``python -m fairseq_tutel.launch [options] -- COMMAND``.

Needs nothing but the standard library; neither torch nor fairseq is imported in this process.
"""

from ..command_line import EXIT_REQUEUE

__all__ = ["EXIT_REQUEUE"]
