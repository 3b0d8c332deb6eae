"""Exchanges of one process: nothing to send, or a copy in place of what would be sent."""

from __future__ import annotations

from .base import Exchange, Wrapper


class NoExchange(Exchange):
    """All experts are on this rank: rows stay where they are, uncopied."""

    name = "none"

    @property
    def communicates(self) -> bool:
        """Never."""
        return False

    def move(self, rows, received, leg, parts):
        """A copy; ``forth`` and ``back`` do without."""
        received.copy_(rows)

    def forth(self, rows, parts=None):
        """The rows themselves."""
        return rows

    def back(self, rows, parts=None):
        """The rows themselves."""
        return rows

    def share_counts(self, count_E):
        """[1, E], nothing read by the host."""
        return count_E[None], None


class LocalCopy(Wrapper):
    """Copies as many bytes as the inner exchange would send; gradients are copied, too.

    For simulations (one process plays one rank of many) and benchmarks without communication
    (``--dummy-a2a``); the results are wrong. A rank's own rows take the place of those it would
    receive: its local experts get what it would send to all.
    """

    @property
    def communicates(self) -> bool:
        """Never."""
        return False

    @property
    def send_order(self) -> list[int] | None:
        """Rank order."""
        return None

    def move(self, rows, received, leg, parts):
        """A copy."""
        received.copy_(rows)

    def share_counts(self, count_E):
        """As if every rank w sent what this rank sends to rank w."""
        return Exchange.share_counts(self, count_E)

    def share_chunks(self, count_E, degree):
        """As if every rank w sent what this rank sends to rank w."""
        return Exchange.share_chunks(self, count_E, degree)

    def parts(self, sent_W, received_W):
        """Without the steps of the inner exchange."""
        return Exchange.parts(self, sent_W, received_W)

    def _receive_counts(self, count_E):
        return count_E.view(self.groups.ep_size, -1)
