"""Launcher of a job's ranks: ``python -m fairseq_tutel.launch [options] -- COMMAND``.

It starts or adopts ranks. It needs nothing but the standard library; neither torch nor fairseq is
imported in this process.
"""

from ..command_line import EXIT_REQUEUE

__all__ = ["EXIT_REQUEUE"]
