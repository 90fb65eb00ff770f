"""Which prompt a group gets: of which task of a weighted mixture, and which row of its data, shuffled anew in each epoch."""

import hashlib
from collections.abc import Callable, Mapping, Sequence

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


def next_task(weights: Mapping[str, float], owed: Mapping[str, float]) -> tuple[str, dict[str, float]]:
    """The task of the next group, and what each task is owed after it, in groups; a task that `owed` does not know is owed nothing.

    Of every group each task is owed its share, which is its weight over the sum of all, and the one that is owed most gets it; of equals
    the first. So no task is ever ahead of its share by a whole group, and after weights have changed no task catches up with what the new
    ones would have given it before. The weights' sum must be above 0.
    """
    total = sum(weights.values())
    due = {name: owed.get(name, 0.0) + weight / total for name, weight in weights.items()}
    chosen = max((name for name, weight in weights.items() if weight > 0), key=due.__getitem__)
    return chosen, due | {chosen: due[chosen] - 1.0}
