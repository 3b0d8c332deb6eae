"""Launcher of a job's ranks: torch's elastic agent starts them, and each becomes its program."""
