"""Carries envelopes between endpoints of one process: the same frames, checks and losses as the real transport, on any event loop.

Nothing here depends on time or chance but the loop's clock and the fault plan's seed, so a run replays exactly.
"""

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence

from bus.address import MEMORY
from bus.envelope import Envelope
from bus.errors import BadAddress, BadFrame, LinkRefused
from bus.faults import HEARTBEAT_S, FaultPlan, LinkFaults
from bus.link import Link
from bus.outbox import Frame
from bus.refusals import Refusals
from bus.transport import Delivery, Identity, Peer


class MemoryNetwork:
    """The wires between the endpoints of one event loop. Without a plan nothing goes wrong and nothing takes time."""

    def __init__(self, faults: FaultPlan | None = None) -> None:
        self._faults = faults
        self._endpoints: dict[str, MemoryTransport] = {}
        self._numbers = itertools.count(1)

    def kill(self, address: str) -> None:
        """End the endpoint as SIGKILL would: nothing is flushed, and whoever has a link to it hears of it."""
        endpoint = self._endpoints.pop(address, None)
        if endpoint is not None:
            endpoint.die()

    def bind(self, address: str, endpoint: "MemoryTransport") -> None:
        if self._endpoints.setdefault(address, endpoint) is not endpoint:
            raise BadAddress(f"{address} is taken by another endpoint of this network")

    def unbind(self, address: str) -> None:
        self._endpoints.pop(address, None)

    def connect(self, near: "End") -> "End | None":
        """Join `near` to whoever is bound at its peer's address; None when nobody is."""
        far_transport = self._endpoints.get(str(near.link.peer))
        if far_transport is None:
            return None
        number = next(self._numbers)
        # Five bytes that begin with zero: what a ROUTER calls a peer that chose no name.
        far = far_transport.accept(b"\0" + number.to_bytes(4, "big"))
        here, there = near.owner.identity.name, far.owner.identity.name
        near.join(far, self._faults.between(here, there, number) if self._faults else None)
        far.join(near, self._faults.between(there, here, number) if self._faults else None)
        return far


class End:
    """One end of a link and the direction that leads away from it: a queue that only ever loses its tail."""

    def __init__(self, owner: "MemoryTransport", link: Link) -> None:
        self.owner = owner
        self.link = link
        self.is_over = False
        self._far: End | None = None
        self._faults: LinkFaults | None = None
        self._flying: deque[tuple[float, Frame | str]] = deque()
        """When each lands, and what: a frame, or the reason why nothing follows."""
        self._last_due = 0.0
        self._timer: asyncio.Handle | None = None

    def join(self, far: "End", faults: LinkFaults | None) -> None:
        self._far = far
        self._faults = faults
        loop = self.owner.loop
        if faults is not None and (silent := faults.silent_at(loop.time())) < math.inf:
            loop.call_at(silent, self.snap, f"no heartbeat for {HEARTBEAT_S:g} s")

    def send(self, frame: Frame) -> None:
        """Let it fly: it arrives after all that flew before, one loop tick later at the earliest."""
        if self._faults is not None and self._faults.breaks(self.owner.loop.time()):
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
        far = self._far
        if far is None or self.is_over or far.is_over:
            return
        for end in (self, far):
            end._lose_suffix()
            end._flying.append((0.0, reason))
            end._land(everything=True)

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

    def _land(self, *, everything: bool = False) -> None:
        """Hand over what is due."""
        self._timer = None
        far = self._far
        now = self.owner.loop.time()
        while far is not None and not far.is_over and self._flying and (everything or self._flying[0][0] <= now):
            _, what = self._flying.popleft()
            if isinstance(what, str):
                far.is_over = True
                far.owner.lost(far.link, what)
            else:
                far.owner.arrived(far, what)
        if far is not None and not far.is_over and self._flying:
            self._wake(now)

    def _wake(self, now: float) -> None:
        if self._timer is None:
            due = self._flying[0][0]
            loop = self.owner.loop
            self._timer = loop.call_soon(self._land) if due <= now else loop.call_at(due, self._land)


class MemoryTransport:
    """The Transport of tests, simulation and embedded actors."""

    def __init__(self, identity: Identity, network: MemoryNetwork) -> None:
        self.identity = identity
        self.refusals = Refusals()
        self.public_address = ""
        self.loop: asyncio.AbstractEventLoop
        self._network = network
        self._address = f"{MEMORY}://{identity.name}.{identity.incarnation}"
        self._ends: dict[Peer, End] = {}
        self._dirty: list[End] = []
        self._is_running = False
        self._deliver: Callable[[Delivery], None]
        self._down: Callable[[Peer, str], None]

    @property
    def address(self) -> str:
        """Where peers reach us; known once `start` has returned."""
        return self._address

    async def start(self, deliver: Callable[[Delivery], None], down: Callable[[Peer, str], None]) -> None:
        """See Transport."""
        self.loop = asyncio.get_running_loop()
        self._deliver, self._down = deliver, down
        self._network.bind(self._address, self)
        self._is_running = True

    def post(self, peer: Peer, envelope: Envelope, buffers: Sequence[memoryview | bytes] = ()) -> None:
        """See Transport. What is posted to a link that a peer opened and that is gone, is lost with it."""
        if not self._is_running:
            return
        end = self._ends.get(peer)
        if end is None:
            if isinstance(peer, bytes):
                return
            end = self._ends[peer] = End(self, Link(peer, self.identity, accepted=False))
            if self._network.connect(end) is None:
                self.loop.call_soon(self.lost, end.link, f"nobody listens at {peer}")
        end.link.outbox.add(envelope, buffers)
        self._mark(end)

    def disconnect(self, address: str) -> None:
        """See Transport."""
        end = self._ends.pop(address, None)
        if end is not None:
            end.hang_up("the peer disconnected", keep=False)

    async def close(self) -> None:
        """See Transport."""
        if self._is_running:
            self._flush()
            self._stop(keep=True)
            self._network.unbind(self._address)

    def die(self) -> None:
        """End without a word, as a killed process does."""
        self._stop(keep=False)

    def accept(self, peer: bytes) -> End:
        end = self._ends[peer] = End(self, Link(peer, self.identity, accepted=True))
        return end

    def arrived(self, end: End, frame: Frame) -> None:
        """A frame landed here."""
        link = end.link
        if not self._is_running or link.is_refused:
            return
        was_open = link.is_open
        try:
            envelopes = link.arrived(frame.data)
        except (BadFrame, LinkRefused) as error:
            self._refuse(end, str(error), was_open=was_open)
            return
        if not was_open:
            self._mark(end)
        last = len(envelopes) - 1
        for index, envelope in enumerate(envelopes):
            buffers = [memoryview(b).toreadonly() for b in frame.buffers] if index == last else ()
            self._deliver(Delivery(link.peer, envelope, buffers))

    def lost(self, link: Link, reason: str) -> None:
        """A link ended under us: forget it, and say so once, if it is one the runtime knows."""
        end = self._ends.get(link.peer)
        if not self._is_running or end is None or end.link is not link:
            return
        del self._ends[link.peer]
        end.is_over = True
        if link.is_open or isinstance(link.peer, str):
            self._down(link.peer, reason)

    def _refuse(self, end: End, reason: str, *, was_open: bool) -> None:
        if isinstance(end.link.peer, str):
            end.hang_up(reason, keep=False)
            self.lost(end.link, reason)
            return
        end.link.refuse(reason)
        self._mark(end)
        if was_open:
            self._down(end.link.peer, reason)

    def _mark(self, end: End) -> None:
        if not self._dirty:
            self.loop.call_soon(self._flush)
        self._dirty.append(end)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        for end in dirty:
            for frame in [] if end.is_over else end.link.outbox.take():
                end.send(frame)

    def _stop(self, *, keep: bool) -> None:
        self._is_running = False
        self._dirty.clear()
        for end in self._ends.values():
            end.hang_up("the peer closed the connection or died", keep=keep)
        self._ends.clear()
