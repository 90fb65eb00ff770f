"""Decides what goes wrong on an in-memory network, from a seed; only what ZeroMQ can do to us: no reordering, no duplicates on a link."""

import math
import random
from dataclasses import dataclass
from fnmatch import fnmatchcase

HEARTBEAT_S = 6.0
"""A link that carried nothing for so long is dead: the same bound as the ZMTP heartbeats of the real transport."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Nothing passes from `sender` to `receiver` (patterns of actor names) in [start_s, end_s) of loop time; the way back stays open."""

    sender: str
    receiver: str
    start_s: float
    end_s: float

    def cuts(self, sender: str, receiver: str) -> bool:
        return fnmatchcase(sender, self.sender) and fnmatchcase(receiver, self.receiver)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Rates are chances per frame; ranges are (least, most), drawn evenly. After `until_s` of loop time nothing more goes wrong."""

    seed: int
    delay_s: tuple[float, float] = (0.0, 0.0)
    stall_rate: float = 0.0
    """The link holds everything back for a while, then goes on in order."""
    stall_s: tuple[float, float] = (0.1, 1.0)
    break_rate: float = 0.0
    """The link breaks and loses a suffix of what was in flight, in each direction."""
    partitions: tuple[Partition, ...] = ()
    until_s: float = math.inf

    def between(self, sender: str, receiver: str, number: int) -> "LinkFaults":
        """What happens to frames from `sender` to `receiver` on the `number`-th link of the network."""
        return LinkFaults(self, sender, receiver, number)


class LinkFaults:
    """One direction of one link. Its chances come from its own generator, so traffic elsewhere does not change them."""

    def __init__(self, plan: FaultPlan, sender: str, receiver: str, number: int) -> None:
        self._plan = plan
        self._sender, self._receiver = sender, receiver
        self._rng = random.Random(f"{plan.seed}/{sender}>{receiver}/{number}")
        self._cuts: list[tuple[float, float]] = []
        self._loses_until = -math.inf
        for partition in plan.partitions:
            self.add(partition)

    def add(self, partition: Partition) -> None:
        """A partition that was not in the plan."""
        if partition.cuts(self._sender, self._receiver):
            self._cuts.append((partition.start_s, min(partition.end_s, self._plan.until_s)))

    def lose_next(self, until_s: float) -> None:
        """The link breaks under the next frame that is sent before `until_s`, and the frame is lost."""
        self._loses_until = until_s

    def loses(self, now: float) -> bool:
        """Whether a frame sent now is the one that `lose_next` meant."""
        if now >= self._loses_until:
            return False
        self._loses_until = -math.inf
        return True

    def hold_s(self, now: float) -> float:
        """How long a frame sent at `now` is held back."""
        if now >= self._plan.until_s:
            return 0.0
        held = self._rng.uniform(*self._plan.delay_s)
        if self._rng.random() < self._plan.stall_rate:
            held += self._rng.uniform(*self._plan.stall_s)
        return max([held, *(end - now for start, end in self._cuts if start <= now < end)])

    def breaks(self, now: float) -> bool:
        """Whether the link breaks when this frame is sent."""
        return now < self._plan.until_s and self._rng.random() < self._plan.break_rate

    def silent_at(self, now: float) -> float:
        """When a link opened at `now` dies because this direction is cut for longer than the heartbeats bear; infinity if never."""
        deaths = (max(now, start) + HEARTBEAT_S for start, end in self._cuts if end - max(now, start) >= HEARTBEAT_S)
        return min(deaths, default=math.inf)

    def survivors(self, in_flight: int, now: float) -> int:
        """How many frames, from the oldest on, still arrive when the link breaks at `now`: none through a cut."""
        if any(start <= now < end for start, end in self._cuts):
            return 0
        return self._rng.randint(0, in_flight)
