"""Carries envelopes between endpoints of one process: the same frames, checks and losses as the real transport, on any event loop.

Nothing here depends on time or chance but the loop's clock and the fault plan's seed, so a run replays exactly.
"""

import asyncio
import contextvars
import itertools
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

from bus.address import MEMORY
from bus.envelope import Envelope
from bus.errors import BadAddress, BadFrame, LinkRefused
from bus.faults import FaultPlan, LinkFaults, Partition
from bus.link import Link
from bus.memory_link import LinkEnd
from bus.outbox import Frame
from bus.refusals import Refusals
from bus.transport import Delivery, Identity, Peer


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

    def connect(self, near: LinkEnd) -> LinkEnd | None:
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
        for end in self._ends(sender, receiver):
            end.cut(partition)

    def snap(self, one: str, other: str, reason: str) -> None:
        """Every link between the two breaks now, and loses a suffix of what is in flight in each direction."""
        for end in self._ends(one, other):
            end.snap(reason)

    def lose_next(self, sender: str, receiver: str, until_s: float) -> None:
        """The next frame on each present link from `sender` to `receiver` is lost, and its link breaks."""
        for end in self._ends(sender, receiver):
            end.lose_next(until_s)

    def _between(self, sender: str, receiver: str, number: int) -> LinkFaults | None:
        if self._faults is None:
            return None
        faults = self._faults.between(sender, receiver, number)
        for partition in self._cuts:
            faults.add(partition)
        return faults

    def _ends(self, sender: str, receiver: str) -> Iterator[LinkEnd]:
        """The ends from which a link leads from `sender` to `receiver`."""
        for endpoint in list(self._endpoints.values()):
            for end in endpoint.ends():
                for each in (end, end.far) if end.far is not None and isinstance(end.link.peer, str) else ():
                    if fnmatchcase(each.owner.identity.name, sender) and fnmatchcase(each.far_name, receiver):
                        yield each


class MemoryTransport:
    """The Transport of tests, simulation and embedded actors."""

    def __init__(self, identity: Identity, network: MemoryNetwork, address: str = "") -> None:
        """`address` is fresh per incarnation unless it is given."""
        self.identity = identity
        self.refusals = Refusals()
        self.public_address = ""
        self.loop: asyncio.AbstractEventLoop
        self.context: contextvars.Context
        """The context it was started in; what arrives is handed over in it."""
        self._network = network
        self._address = address or f"{MEMORY}://{identity.name}.{identity.incarnation}"
        self._ends: dict[Peer, LinkEnd] = {}
        self._dirty: list[LinkEnd] = []
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
        end = self._ends.get(peer)
        if end is None:
            if isinstance(peer, bytes):
                return
            end = self._ends[peer] = LinkEnd(self, Link(peer, self.identity, accepted=False))
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
            self._network.unbind(self._address, self)

    def die(self) -> None:
        """End without a word, as a killed process does."""
        self._stop(keep=False)
        self._network.unbind(self._address, self)

    def ends(self) -> list[LinkEnd]:
        """The links it has."""
        return list(self._ends.values())

    def tap(self, receiver: "MemoryTransport", what: Frame | str) -> None:
        """Something of ours lands at `receiver`."""
        if self._network.tap is not None:
            self._network.tap(self.identity.name, receiver.identity.name, what)

    def accept(self, peer: bytes) -> LinkEnd:
        end = self._ends[peer] = LinkEnd(self, Link(peer, self.identity, accepted=True))
        return end

    def arrived(self, end: LinkEnd, frame: Frame) -> None:
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

    def _refuse(self, end: LinkEnd, reason: str, *, was_open: bool) -> None:
        if isinstance(end.link.peer, str):
            end.hang_up(reason, keep=False)
            self.lost(end.link, reason)
            return
        end.link.refuse(reason)
        self._mark(end)
        if was_open:
            self._down(end.link.peer, reason)

    def _mark(self, end: LinkEnd) -> None:
        if not self._dirty:
            self.loop.call_soon(self._flush, context=self.context)
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
