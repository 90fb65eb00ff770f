"""Which row of a data set a group gets: shuffled epochs, in each of which every row is given exactly once."""

import hashlib
from collections.abc import Callable, Sequence

ORDERS_KEPT = 2
"""Epochs whose order is remembered: rows are drawn forwards, and a restart looks back no further."""


def shuffled(num: int, seed: int, epoch: int) -> list[int]:
    """0 … num - 1 in the order of one epoch: the same for the same seed, another one for each epoch."""

    def place(row: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{epoch}/{row}".encode(), digest_size=8).digest()

    return sorted(range(num), key=place)


class Epochs:
    """The rows of a data set in the order in which they are given, epoch after epoch. The same number always gives the same row."""

    def __init__(self, order: Callable[[int], Sequence[int]]) -> None:
        """`order` gives an epoch's rows in their order; it is called again for the same epoch and must then say the same. None may be empty."""
        self._order = order
        self._starts = [0]
        """Number of the first row of each epoch that is known."""
        self._orders: dict[int, Sequence[int]] = {}

    def row(self, number: int) -> int:
        """The row that is given as the `number`-th, from 0."""
        epoch = len(self._starts) - 1
        while number >= self._starts[epoch] + len(self._rows(epoch)):
            self._starts.append(self._starts[epoch] + len(self._rows(epoch)))
            epoch += 1
        while number < self._starts[epoch]:
            epoch -= 1
        return self._rows(epoch)[number - self._starts[epoch]]

    def _rows(self, epoch: int) -> Sequence[int]:
        if epoch not in self._orders:
            self._orders[epoch] = self._order(epoch)
            while len(self._orders) > ORDERS_KEPT:
                del self._orders[next(iter(self._orders))]
        return self._orders[epoch]
