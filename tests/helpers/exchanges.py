"""Algorithms of exchanges that tests look into, and sizes of their parts."""

import time

import torch

from fairseq_tutel.distributed.exchanges import Exchange, ExchangeAlgorithm
from fairseq_tutel.distributed.exchanges import exchange as module


class InlineStream:
    """A stream that does its work at once: nothing overlaps."""

    def submit(self, work):
        work()
        return lambda: None


class Around(ExchangeAlgorithm):
    """An algorithm around another one; a test says what differs."""

    def __init__(self, inner):
        super().__init__(inner.groups)
        self.inner, self.name = inner, inner.name

    def move(self, rows, received, direction, splits):
        self.inner.move(rows, received, direction, splits)

    @property
    def send_order(self):
        return self.inner.send_order

    def share_chunks(self, count_E, degree):
        return self.inner.share_chunks(count_E, degree)


class Failing(Around):
    """Fails in one direction."""

    def __init__(self, inner, direction):
        super().__init__(inner)
        self.direction = direction

    def move(self, rows, received, direction, splits):
        if direction is self.direction:
            raise ValueError("the link is down")
        super().move(rows, received, direction, splits)


class Recorded(Around):
    """Writes down the order of directions; nobody is in step by chance."""

    def __init__(self, inner):
        super().__init__(inner)
        self.log = []

    def move(self, rows, received, direction, splits):
        received.fill_(torch.nan)
        time.sleep(0.002 * ((len(self.log) + self.groups.rank) % 3))
        sizes = len(rows) + len(received) if splits is None else ""
        self.log.append(f"{direction.value} {sizes}")
        super().move(rows, received, direction, splits)


def with_algorithm(exchange, around, *args):
    """The exchange with ``around(its algorithm, *args)``."""
    return Exchange(around(exchange.algorithm, *args), exchange.codec, exchange.timed)


def splits_of(exchange, sent_P):
    """The splits where so many rows go to each rank, to its first expert. Collective."""
    count_Pe = torch.zeros(len(sent_P), exchange.groups.num_local_experts, dtype=torch.int64)
    count_Pe[:, 0] = torch.tensor(sent_P)
    [(_, splits)] = exchange.algorithm.share_chunks(count_Pe.flatten(), 1)
    return splits


def show_what_is_not_filled():
    """Memory that rows have not arrived in is NaN in this process, not what was there."""
    buffer = module._buffer
    module._buffer = lambda *args: buffer(*args).fill_(torch.nan)


def use_algorithm(layer, around, *args):
    """Let a layer exchange by :func:`with_algorithm`; return the choice that it had."""
    before = layer.exchange_choice
    layer.exchange_choice = before._replace(exchange=with_algorithm(before.exchange, around, *args))
    return before
