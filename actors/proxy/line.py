"""Who waits for an engine: in lanes, so that those who wait for engines of one kind hold up nobody who may use another."""

from collections import deque
from itertools import count
from typing import Generic, NamedTuple, TypeVar

EXACT, PASSED, USUAL = 0, 1, 2
"""Ranks of lanes, the first served first: evaluations; those at whose turn only engines had room that are held at an older version; others."""


T = TypeVar("T")


class Lane(NamedTuple):
    """Its members are served in order."""

    rank: int
    name: str
    """What its members have in common as to the engines that they may use."""


class Line(Generic[T]):
    """The lanes that somebody stands in."""

    def __init__(self) -> None:
        self._lanes: dict[Lane, deque[tuple[int, T]]] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def __contains__(self, lane: Lane) -> bool:
        return lane in self._lanes

    def add(self, lane: Lane, one: T, *, first: bool = False) -> None:
        """Stand at the lane's end, or, `first`, before everybody of its rank."""
        members, number = self._lanes.setdefault(lane, deque()), next(self._numbers)
        if first:
            members.appendleft((-number, one))
        else:
            members.append((number, one))

    def lanes(self) -> list[Lane]:
        """By rank, and of equal rank those whose first came earliest: without anybody who is held up, that is the order of a single line."""
        if len(self._lanes) <= 1:
            return list(self._lanes)
        return sorted(self._lanes, key=lambda lane: (lane.rank, self._lanes[lane][0][0]))

    def first(self, lane: Lane) -> T:
        return self._lanes[lane][0][1]

    def take(self, lane: Lane) -> T:
        """The first of the lane, which leaves."""
        members = self._lanes[lane]
        _, one = members.popleft()
        if not members:
            del self._lanes[lane]
        return one

    def remove(self, one: T) -> bool:
        """False where it stands in no lane."""
        for lane, members in self._lanes.items():
            entry = next((entry for entry in members if entry[1] is one), None)
            if entry is not None:
                members.remove(entry)
                if not members:
                    del self._lanes[lane]
                return True
        return False
