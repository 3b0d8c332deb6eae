"""Launcher of a job's ranks; its process imports neither torch nor fairseq."""

from ..command_line import EXIT_REQUEUE
