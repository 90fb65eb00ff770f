"""Continuous batching: which requests have a slot of the KV cache, which of their tokens go into the next step, and what its results mean."""

import heapq
from collections import OrderedDict, abc, deque
from itertools import takewhile
from typing import NamedTuple

from actors.engines.sequence import Sequence


class Row(NamedTuple):
    """Tokens [start, end) of one sequence. One is sampled after them when they reach the sequence's end."""

    sequence: Sequence
    start: int
    end: int


class Scheduler:
    """First come, first served: a request waits for a slot, is prefilled in pieces that fit a step, then decodes token by token.

    Prefill and decode share a step of at most `max_batch_tokens` tokens; decode comes first, so nobody who runs is starved.
    """

    def __init__(self, num_slots: int, max_batch_tokens: int, *, prefix_cache: bool = True) -> None:
        self._slots = SlotTable(num_slots, prefix_cache=prefix_cache)
        self._max_batch_tokens = max(max_batch_tokens, num_slots)
        self._waiting: deque[Sequence] = deque()
        self._running: dict[str, Sequence] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that is not finished."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; its slot is free for others, or kept for its session."""
        if self._running.pop(sequence.work.request_id, None) is not None:
            self._release(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def schedule(self) -> list[Row]:
        """The next step's rows; empty when nothing can run."""
        self._admit()
        left = self._max_batch_tokens
        rows: list[Row] = []
        prefilling: list[Sequence] = []
        for sequence in self._running.values():
            if len(sequence.tokens) - sequence.num_cached == 1:
                rows.append(Row(sequence, sequence.num_cached, sequence.num_cached + 1))
                left -= 1
            else:
                prefilling.append(sequence)
        for sequence in prefilling:
            if left <= 0:
                break
            end = min(len(sequence.tokens), sequence.num_cached + left)
            rows.append(Row(sequence, sequence.num_cached, end))
            left -= end - sequence.num_cached
        return rows

    def computed(self, rows: abc.Sequence[Row]) -> list[Sequence]:
        """Note that the step cached `rows`; returns the sequences a token is sampled for, in the rows' order."""
        for sequence, _, end in rows:
            sequence.num_cached = end
        return [sequence for sequence, _, end in rows if end == len(sequence.tokens)]

    def retire(self, sequences: abc.Iterable[Sequence]) -> None:
        """Free the slots of sequences that finished."""
        for sequence in sequences:
            del self._running[sequence.work.request_id]
            self._release(sequence)

    def forget_caches(self) -> None:
        """The weights changed: idle histories are dropped, running sequences are computed again from their first token."""
        self._slots.drop_idle()
        for sequence in self._running.values():
            sequence.num_cached = 0

    def _admit(self) -> None:
        while self._waiting:
            sequence = self._waiting[0]
            found = self._slots.take(sequence.session, sequence.tokens)
            if found is None:
                return
            sequence.slot, sequence.num_cached = found
            self._running[sequence.work.request_id] = self._waiting.popleft()

    def _release(self, sequence: Sequence) -> None:
        self._slots.give_back(sequence.slot, sequence.session, sequence.tokens[: sequence.num_cached])
        sequence.slot = -1


class SlotTable:
    """`num_slots` slots: free, busy, or idle with a session's tokens. Idle ones are reused, oldest first, when none is free."""

    def __init__(self, num_slots: int, *, prefix_cache: bool) -> None:
        self._free = list(range(num_slots))
        self._idle: OrderedDict[str, tuple[int, list[int]]] = OrderedDict()
        self._prefix_cache = prefix_cache

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def take(self, session: str, tokens: abc.Sequence[int]) -> tuple[int, int] | None:
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


def _common(cached: list[int], tokens: abc.Sequence[int]) -> int:
    """Length of the longest common prefix; the usual case, that `tokens` extend `cached`, is one comparison."""
    if list(tokens[: len(cached)]) == cached:
        return len(cached)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(cached, tokens, strict=False)))
