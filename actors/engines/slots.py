"""Which slot of the KV cache belongs to which request, and which idle ones still hold a session's history."""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile


class SlotTable:
    """`num_slots` slots: free, busy, or idle with a session's tokens. Idle ones are reused, oldest first, when none is free."""

    def __init__(self, num_slots: int, *, prefix_cache: bool) -> None:
        self._free = list(range(num_slots))
        self._idle: OrderedDict[str, tuple[int, list[int]]] = OrderedDict()
        self._prefix_cache = prefix_cache

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def take(self, session: str, tokens: Sequence[int]) -> tuple[int, int] | None:
        """(slot, how many of `tokens` its cache already holds), or None when every slot is busy.

        At least the last token is left to compute: sampling needs its logits.
        """
        if session in self._idle:
            slot, cached = self._idle.pop(session)
            return slot, min(_common(cached, tokens), len(tokens) - 1)
        if self._free:
            # Lowest first: busy slots stay close together, and attention reads them as one range.
            return heapq.heappop(self._free), 0
        if self._idle:
            return self._idle.popitem(last=False)[1][0], 0
        return None

    def give_back(self, slot: int, session: str, cached: list[int]) -> None:
        """The request ended; `cached` is what the slot holds, and is kept for the session's next turn if it can be."""
        if not (self._prefix_cache and session and cached):
            heapq.heappush(self._free, slot)
            return
        if session in self._idle:
            heapq.heappush(self._free, self._idle.pop(session)[0])
        self._idle[session] = (slot, cached)

    def drop_idle(self) -> None:
        """Forget every kept history, as when the weights that made it are replaced."""
        while self._idle:
            heapq.heappush(self._free, self._idle.popitem()[1][0])


def _common(cached: list[int], tokens: Sequence[int]) -> int:
    """Length of the longest common prefix; the usual case, that `tokens` extend `cached`, is one comparison."""
    if list(tokens[: len(cached)]) == cached:
        return len(cached)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(cached, tokens, strict=False)))
