"""Carries envelopes between endpoints of one process: the same frames, checks and losses as the real transport, on any event loop.

Nothing here depends on time or chance but the loop's clock and the fault plan's seed, so a run replays exactly.
"""

import asyncio
import contextvars
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

from bus.address import MEMORY
from bus.codec import Envelope
from bus.connection import GONE
from bus.errors import BadAddress, BadFrame, LinkRefused
from bus.faults import HEARTBEAT_S, FaultPlan, LinkFaults, Partition
from bus.link import Frame, Identity, Link, Peer, Refusals
from bus.transport import Delivery, FrameSeen


class MemoryNetwork:
    """The wires between the endpoints of one event loop. Without a plan nothing goes wrong and nothing takes time.

    Faults may also be ordered while it runs (`cut`, `snap`, `lose_next`; names are patterns); they need a plan, for its chances.
    """

    def __init__(
        self, faults: FaultPlan | None = None, *, tap: Callable[[str, str, Frame | str], None] | None = None
    ) -> None:
        self.tap = tap
        """Hears of every frame as it lands, and of every link's end: (sender, receiver, what)."""
        self._faults = faults
        self._endpoints: dict[str, MemoryTransport] = {}
        self._numbers = itertools.count(1)
        self._cuts: list[Partition] = []

    def kill(self, address: str) -> None:
        """End the endpoint as SIGKILL would: nothing is flushed, and whoever has a link to it hears of it."""
        endpoint = self._endpoints.pop(address, None)
        if endpoint is not None:
            endpoint.die()

    def bind(self, address: str, endpoint: "MemoryTransport") -> None:
        if self._endpoints.setdefault(address, endpoint) is not endpoint:
            raise BadAddress(f"{address} is taken by another endpoint of this network")

    def unbind(self, address: str, endpoint: "MemoryTransport") -> None:
        """Nothing happens where somebody else listens there by now."""
        if self._endpoints.get(address) is endpoint:
            del self._endpoints[address]

    def connect(self, near: "MemoryConnection") -> "MemoryConnection | None":
        """Join `near` to whoever is bound at its peer's address; None when nobody is."""
        far_transport = self._endpoints.get(str(near.link.peer))
        if far_transport is None:
            return None
        number = next(self._numbers)
        # Five bytes that begin with zero: what a ROUTER calls a peer that chose no name.
        far = far_transport.accept(b"\0" + number.to_bytes(4, "big"))
        here, there = near.owner.identity.name, far.owner.identity.name
        near.join(far, self._between(here, there, number))
        far.join(near, self._between(there, here, number))
        return far

    def cut(self, sender: str, receiver: str, seconds: float) -> None:
        """From now on nothing passes from `sender` to `receiver` for so long; links that bear no such silence break."""
        now = asyncio.get_running_loop().time()
        partition = Partition(sender=sender, receiver=receiver, start_s=now, end_s=now + seconds)
        self._cuts.append(partition)
        for connection in self._connections(sender, receiver):
            connection.cut(partition)

    def snap(self, one: str, other: str, reason: str) -> None:
        """Every link between the two breaks now, and loses a suffix of what is in flight in each direction."""
        for connection in self._connections(one, other):
            connection.snap(reason)

    def lose_next(self, sender: str, receiver: str, until_s: float) -> None:
        """The next frame on each present link from `sender` to `receiver` is lost, and its link breaks."""
        for connection in self._connections(sender, receiver):
            connection.lose_next(until_s)

    def _between(self, sender: str, receiver: str, number: int) -> LinkFaults | None:
        if self._faults is None:
            return None
        faults = self._faults.between(sender, receiver, number)
        for partition in self._cuts:
            faults.add(partition)
        return faults

    def _connections(self, sender: str, receiver: str) -> "Iterator[MemoryConnection]":
        """The connections by which a link leads from `sender` to `receiver`."""
        for endpoint in list(self._endpoints.values()):
            for connection in endpoint.connections():
                if connection.far is None or isinstance(connection.link.peer, bytes):
                    continue
                for each in (connection, connection.far):
                    if fnmatchcase(each.owner.identity.name, sender) and fnmatchcase(each.far_name, receiver):
                        yield each


class MemoryTransport:
    """The Transport of tests, simulation and embedded actors."""

    def __init__(self, identity: Identity, network: MemoryNetwork, address: str = "") -> None:
        """`address` is fresh per incarnation unless it is given."""
        self.identity = identity
        self.refusals = Refusals()
        self.tap: FrameSeen | None = None
        self.public_address = ""
        self.loop: asyncio.AbstractEventLoop
        self.context: contextvars.Context
        """The context it was started in; what arrives is handed over in it."""
        self._network = network
        self._address = address or f"{MEMORY}://{identity.name}.{identity.incarnation}"
        self._connections: dict[Peer, MemoryConnection] = {}
        self._dirty: list[MemoryConnection] = []
        self._is_running = False
        self._deliver: Callable[[Delivery], None]
        self._down: Callable[[Peer, str], None]

    @property
    def address(self) -> str:
        """Where peers reach us; known once `start` has returned."""
        return self._address

    async def start(self, deliver: Callable[[Delivery], None], down: Callable[[Peer, str], None]) -> None:
        """See Transport."""
        self.loop, self.context = asyncio.get_running_loop(), contextvars.copy_context()
        self._deliver, self._down = deliver, down
        self._network.bind(self._address, self)
        self._is_running = True

    def post(self, peer: Peer, envelope: Envelope, buffers: Sequence[memoryview | bytes] = ()) -> None:
        """See Transport. What is posted to a link that a peer opened and that is gone, is lost with it."""
        if not self._is_running:
            return
        connection = self._connections.get(peer)
        if connection is None:
            if isinstance(peer, bytes):
                return
            connection = self._connections[peer] = MemoryConnection(self, Link(peer, self.identity, accepted=False))
            if self._network.connect(connection) is None:
                self.loop.call_soon(self.lost, connection.link, f"nobody listens at {peer}")
        connection.link.outbox.add(envelope, buffers)
        self._mark(connection)

    async def close(self) -> None:
        """See Transport."""
        if self._is_running:
            self._flush()
            self._stop(keep=True)
            self._network.unbind(self._address, self)

    def die(self) -> None:
        """End without a word, as a killed process does."""
        self._stop(keep=False)
        self._network.unbind(self._address, self)

    def connections(self) -> "list[MemoryConnection]":
        """Our ends of the links it has."""
        return list(self._connections.values())

    def landed(self, receiver: "MemoryTransport", what: Frame | str) -> None:
        """Something of ours lands at `receiver`."""
        if self._network.tap is not None:
            self._network.tap(self.identity.name, receiver.identity.name, what)

    def accept(self, peer: bytes) -> "MemoryConnection":
        connection = self._connections[peer] = MemoryConnection(self, Link(peer, self.identity, accepted=True))
        return connection

    def arrived(self, connection: "MemoryConnection", frame: Frame) -> None:
        """A frame landed here."""
        link = connection.link
        if not self._is_running or link.is_refused:
            return
        was_open = link.is_open
        try:
            envelopes = link.arrived(frame.data)
        except (BadFrame, LinkRefused) as error:
            self._refuse(connection, str(error), was_open=was_open)
            return
        if self.tap is not None:
            self.tap(link, False, frame.data)
        if not was_open:
            self._mark(connection)
        last = len(envelopes) - 1
        for index, envelope in enumerate(envelopes):
            buffers = [memoryview(b).toreadonly() for b in frame.buffers] if index == last else ()
            self._deliver(Delivery(link.peer, envelope, buffers))

    def lost(self, link: Link, reason: str) -> None:
        """A link ended under us: forget it, and say so once, if it is one the runtime knows."""
        connection = self._connections.get(link.peer)
        if not self._is_running or connection is None or connection.link is not link:
            return
        del self._connections[link.peer]
        connection.is_over = True
        if link.is_open or isinstance(link.peer, str):
            self._down(link.peer, reason)

    def _refuse(self, connection: "MemoryConnection", reason: str, *, was_open: bool) -> None:
        if isinstance(connection.link.peer, str):
            connection.hang_up(reason, keep=False)
            self.lost(connection.link, reason)
            return
        connection.link.refuse(reason)
        self._mark(connection)
        if was_open:
            self._down(connection.link.peer, reason)

    def _mark(self, connection: "MemoryConnection") -> None:
        if not self._dirty:
            self.loop.call_soon(self._flush, context=self.context)
        self._dirty.append(connection)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        for connection in dirty:
            for frame in [] if connection.is_over else connection.link.outbox.take():
                if self.tap is not None:
                    self.tap(connection.link, True, frame.data)
                connection.send(frame)

    def _stop(self, *, keep: bool) -> None:
        self._is_running = False
        self._dirty.clear()
        for connection in self._connections.values():
            connection.hang_up(GONE, keep=keep)
        self._connections.clear()


class MemoryConnection:
    """One end of a link and the direction that leads away from it: a queue that only ever loses its tail."""

    def __init__(self, owner: "MemoryTransport", link: Link) -> None:
        self.owner = owner
        self.link = link
        self.is_over = False
        self.far: MemoryConnection | None = None
        self._is_snapped = False
        self._faults: LinkFaults | None = None
        self._flying: deque[tuple[float, Frame | str]] = deque()
        """When each lands, and what: a frame, or the reason why nothing follows."""
        self._last_due = 0.0
        self._timer: asyncio.Handle | None = None

    @property
    def far_name(self) -> str:
        return self.far.owner.identity.name if self.far is not None else ""

    def join(self, far: "MemoryConnection", faults: LinkFaults | None) -> None:
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
        for connection, other in ((self, far), (far, self)):
            connection._is_snapped = True
            connection._lose_suffix()
            connection._flying.append((0.0, reason))
            connection.owner.loop.call_soon(connection._land_all, context=other.owner.context)

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
            self.owner.landed(far.owner, what)
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
