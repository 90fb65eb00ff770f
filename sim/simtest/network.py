"""An in-memory network on which links are slow, silent and break, from a seed; only what ZeroMQ can do to us: no reordering, no duplicates on a link."""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from rubato.bus.link import Frame
from rubato.bus.memory import MemoryConnection, MemoryNetwork, MemoryTransport

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


class FaultyNetwork(MemoryNetwork):
    """What `plan` says goes wrong on every link. Faults may also be ordered while it runs; names are patterns."""

    def __init__(self, plan: FaultPlan, *, tap: Callable[[str, str, Frame | str], None] | None = None) -> None:
        super().__init__()
        self.tap = tap
        """Hears of every frame as it lands, and of every link's end: (sender, receiver, what)."""
        self._plan = plan
        self._cuts: list[Partition] = []
        self._connections: list[FaultyConnection] = []

    def joined(
        self, one: MemoryTransport, address: str, other: MemoryTransport, name: bytes
    ) -> "tuple[FaultyConnection, FaultyConnection]":
        number, here, there = int.from_bytes(name, "big"), one.identity.name, other.identity.name
        near = FaultyConnection(self, one, address, self._between(here, there, number))
        far = FaultyConnection(self, other, name, self._between(there, here, number))
        self._connections = [each for each in self._connections if not each.is_over] + [near, far]
        return near, far

    def cut(self, sender: str, receiver: str, seconds: float) -> None:
        """From now on nothing passes from `sender` to `receiver` for so long; links that bear no such silence break."""
        now = asyncio.get_running_loop().time()
        partition = Partition(sender=sender, receiver=receiver, start_s=now, end_s=now + seconds)
        self._cuts.append(partition)
        for connection in self.connections(sender, receiver):
            connection.faults.add(partition)
            connection.watch_silence()

    def snap(self, one: str, other: str, reason: str) -> None:
        """Every link between the two breaks now, and loses a suffix of what is in flight in each direction."""
        for connection in self.connections(one, other):
            connection.snap(reason)

    def lose_next(self, sender: str, receiver: str, until_s: float) -> None:
        """The next frame on each present link from `sender` to `receiver` is lost, and its link breaks."""
        for connection in self.connections(sender, receiver):
            connection.faults.lose_next(until_s)

    def silence(self, owner: MemoryTransport) -> None:
        """Its links bear no more of it: they break."""
        for connection in list(self._connections):
            if connection.owner is owner:
                connection.snap(f"no heartbeat for {HEARTBEAT_S:g} s")

    def connections(self, sender: str, receiver: str) -> "Iterator[FaultyConnection]":
        """The connections by which a living link leads from `sender` to `receiver`."""
        for each in list(self._connections):
            names = each.owner.identity.name, each.far.owner.identity.name
            if not each.is_over and fnmatchcase(names[0], sender) and fnmatchcase(names[1], receiver):
                yield each

    def _between(self, sender: str, receiver: str, number: int) -> LinkFaults:
        faults = self._plan.between(sender, receiver, number)
        for partition in self._cuts:
            faults.add(partition)
        return faults


class FaultyConnection(MemoryConnection):
    """What is sent lands when its faults let it."""

    def __init__(self, network: FaultyNetwork, owner: MemoryTransport, peer: str | bytes, faults: LinkFaults) -> None:
        super().__init__(owner, peer)
        self.faults = faults
        self._network = network
        self._due: deque[float] = deque()
        """When each that flies lands."""
        self._is_snapped = False
        self._timer: asyncio.Handle | None = None
        self._last_due = 0.0
        self.watch_silence()

    def send(self, data: bytes | bytearray, buffers: Any = ()) -> None:
        now = self.owner.loop.time()
        if self.faults.loses(now):
            self.snap("the link broke")
            return
        if self.faults.breaks(now):
            self.owner.loop.call_soon(self.snap, "the link broke")
        super().send(data, buffers)

    def snap(self, reason: str) -> None:
        """The link breaks under both ends; each loses a suffix of what the other had in flight."""
        if self.is_over or self.far.is_over or self._is_snapped:
            return
        for connection in (self, cast("FaultyConnection", self.far)):
            connection._is_snapped = True
            connection._lose_suffix()
            connection._flying.append(reason)
            connection._due.append(0.0)
            connection.owner.loop.call_soon(connection._land_all, context=connection.far.owner.context)

    def watch_silence(self) -> None:
        """Break when the silence in this direction is longer than the heartbeats bear."""
        loop = self.owner.loop
        if (silent := self.faults.silent_at(loop.time())) < math.inf:
            loop.call_at(silent, self.snap, f"no heartbeat for {HEARTBEAT_S:g} s")

    def _launch(self, what: Frame | str) -> None:
        now = self.owner.loop.time()
        self._last_due = max(self._last_due, now + self.faults.hold_s(now))
        self._flying.append(what)
        self._due.append(self._last_due)
        self._wake(now)

    def _lose_suffix(self) -> None:
        survivors = self.faults.survivors(len(self._flying), self.owner.loop.time())
        while len(self._flying) > survivors:
            self._flying.pop()
            self._due.pop()

    def _hand_over(self, what: Frame | str) -> None:
        if self._network.tap is not None and not self.far.is_over:
            self._network.tap(self.owner.identity.name, self.far.owner.identity.name, what)
        super()._hand_over(what)

    def _land_all(self) -> None:
        self._land(everything=True)

    def _land(self, *, everything: bool = False) -> None:
        """Hand over what is due. Runs in the receiver's context: one that stands still receives nothing."""
        self._timer = None
        now = self.owner.loop.time()
        while not self.far.is_over and self._flying and (everything or self._due[0] <= now):
            self._due.popleft()
            self._hand_over(self._flying.popleft())
        if not self.far.is_over and self._flying:
            self._wake(now)

    def _wake(self, now: float) -> None:
        if self._timer is None:
            loop, context, due = self.owner.loop, self.far.owner.context, self._due[0]
            if due <= now:
                self._timer = loop.call_soon(self._land, context=context)
            else:
                self._timer = loop.call_at(due, self._land, context=context)
