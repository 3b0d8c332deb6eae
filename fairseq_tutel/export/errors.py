"""The one error of this room."""


class ExportError(ValueError):
    """Something cannot be exported; the message names it, in one line."""
