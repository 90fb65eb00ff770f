"""One end of a link between two endpoints of a MemoryNetwork: what flies, when it lands, and what a break loses of it."""

import asyncio
import math
from collections import deque
from typing import TYPE_CHECKING

from bus.faults import HEARTBEAT_S, LinkFaults, Partition
from bus.link import Link
from bus.outbox import Frame

if TYPE_CHECKING:
    from bus.memory import MemoryTransport


class LinkEnd:
    """One end of a link and the direction that leads away from it: a queue that only ever loses its tail."""

    def __init__(self, owner: "MemoryTransport", link: Link) -> None:
        self.owner = owner
        self.link = link
        self.is_over = False
        self.far: LinkEnd | None = None
        self._is_snapped = False
        self._faults: LinkFaults | None = None
        self._flying: deque[tuple[float, Frame | str]] = deque()
        """When each lands, and what: a frame, or the reason why nothing follows."""
        self._last_due = 0.0
        self._timer: asyncio.Handle | None = None

    @property
    def far_name(self) -> str:
        return self.far.owner.identity.name if self.far is not None else ""

    def join(self, far: "LinkEnd", faults: LinkFaults | None) -> None:
        self.far = far
        self._faults = faults
        self._watch_silence()

    def cut(self, partition: Partition) -> None:
        """The network is cut in this direction."""
        if self._faults is not None:
            self._faults.add(partition)
            self._watch_silence()

    def lose_next(self, until_s: float) -> None:
        if self._faults is not None:
            self._faults.lose_next(until_s)

    def send(self, frame: Frame) -> None:
        """Let it fly: it arrives after all that flew before, one loop tick later at the earliest."""
        now = self.owner.loop.time()
        if self._faults is not None and self._faults.loses(now):
            self.snap("the link broke")
            return
        if self._faults is not None and self._faults.breaks(now):
            self.owner.loop.call_soon(self.snap, "the link broke")
        self._launch(frame)

    def hang_up(self, reason: str, *, keep: bool) -> None:
        """Our side is over; the other side hears `reason` after what still flies. Without `keep` a suffix of that is lost."""
        self.is_over = True
        if not keep:
            self._lose_suffix()
        self._launch(reason)

    def snap(self, reason: str) -> None:
        """The link breaks under both ends; each loses a suffix of what the other had in flight."""
        far = self.far
        if far is None or self.is_over or far.is_over or self._is_snapped:
            return
        for end, other in ((self, far), (far, self)):
            end._is_snapped = True
            end._lose_suffix()
            end._flying.append((0.0, reason))
            end.owner.loop.call_soon(end._land_all, context=other.owner.context)

    def _launch(self, what: Frame | str) -> None:
        now = self.owner.loop.time()
        held = self._faults.hold_s(now) if self._faults is not None else 0.0
        self._last_due = max(self._last_due, now + held)
        self._flying.append((self._last_due, what))
        self._wake(now)

    def _lose_suffix(self) -> None:
        faults, in_flight = self._faults, len(self._flying)
        survivors = faults.survivors(in_flight, self.owner.loop.time()) if faults is not None else 0
        while len(self._flying) > survivors:
            self._flying.pop()

    def _watch_silence(self) -> None:
        loop = self.owner.loop
        if self._faults is not None and (silent := self._faults.silent_at(loop.time())) < math.inf:
            loop.call_at(silent, self.snap, f"no heartbeat for {HEARTBEAT_S:g} s")

    def _land_all(self) -> None:
        self._land(everything=True)

    def _land(self, *, everything: bool = False) -> None:
        """Hand over what is due. Runs in the receiver's context: one that stands still receives nothing."""
        self._timer = None
        far = self.far
        now = self.owner.loop.time()
        while far is not None and not far.is_over and self._flying and (everything or self._flying[0][0] <= now):
            _, what = self._flying.popleft()
            self.owner.tap(far.owner, what)
            if isinstance(what, str):
                far.is_over = True
                far.owner.lost(far.link, what)
            else:
                far.owner.arrived(far, what)
        if far is not None and not far.is_over and self._flying:
            self._wake(now)

    def _wake(self, now: float) -> None:
        if self._timer is None and self.far is not None:
            due = self._flying[0][0]
            loop, context = self.owner.loop, self.far.owner.context
            if due <= now:
                self._timer = loop.call_soon(self._land, context=context)
            else:
                self._timer = loop.call_at(due, self._land, context=context)
