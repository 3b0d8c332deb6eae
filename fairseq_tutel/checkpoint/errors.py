"""The one exception of this package."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message names the file and what to do."""
