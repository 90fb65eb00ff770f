"""Who waits for an engine: in lanes, so that those who wait for engines of one kind hold up nobody who may use another."""

from collections import deque
from typing import Generic, NamedTuple, Protocol, TypeVar

EXACT, PASSED, USUAL = 0, 1, 2
"""Ranks of lanes, the first served first: evaluations; those at whose turn only engines had room that are held at an older version; others."""


class CameAt(Protocol):
    began: float


T = TypeVar("T", bound=CameAt)


class Lane(NamedTuple):
    """Its members are served in order."""

    rank: int
    name: str
    """What its members have in common as to the engines that they may use."""


class Line(Generic[T]):
    """The lanes that somebody stands in."""

    def __init__(self) -> None:
        self._lanes: dict[Lane, deque[T]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def __contains__(self, lane: Lane) -> bool:
        return lane in self._lanes

    def add(self, lane: Lane, one: T, *, first: bool = False) -> None:
        members = self._lanes.setdefault(lane, deque())
        if first:
            members.appendleft(one)
        else:
            members.append(one)

    def lanes(self) -> list[Lane]:
        """By rank, and of equal rank those whose first came earliest."""
        if len(self._lanes) <= 1:
            return list(self._lanes)
        return sorted(self._lanes, key=lambda lane: (lane.rank, self._lanes[lane][0].began))

    def first(self, lane: Lane) -> T:
        return self._lanes[lane][0]

    def take(self, lane: Lane) -> T:
        """The first of the lane, which leaves."""
        members = self._lanes[lane]
        one = members.popleft()
        if not members:
            del self._lanes[lane]
        return one

    def remove(self, one: T) -> bool:
        """False where it stands in no lane."""
        lane = next((lane for lane, members in self._lanes.items() if one in members), None)
        if lane is None:
            return False
        self._lanes[lane].remove(one)
        if not self._lanes[lane]:
            del self._lanes[lane]
        return True
