"""The wire within a process, with the same checks and losses as between processes, on any event loop: nothing of it depends on time or
chance."""

import itertools
from collections import deque
from collections.abc import Sequence

from rubato.bus.address import MEMORY
from rubato.bus.codec import cut
from rubato.bus.errors import BadAddress
from rubato.bus.link import Connection, Frame, Identity, Link, Peer, Rest
from rubato.bus.transport import GONE, Transport


class MemoryNetwork:
    """The wires between the endpoints of one event loop. Nothing goes wrong on them, and nothing takes time."""

    def __init__(self) -> None:
        self._endpoints: dict[str, MemoryTransport] = {}
        self._numbers = itertools.count(1)

    def bind(self, address: str, endpoint: "MemoryTransport") -> None:
        if self._endpoints.setdefault(address, endpoint) is not endpoint:
            raise BadAddress(f"{address} is taken by another endpoint of this network")

    def unbind(self, address: str, endpoint: "MemoryTransport") -> None:
        """Nothing happens where another endpoint listens there by now."""
        if self._endpoints.get(address) is endpoint:
            del self._endpoints[address]

    def connect(self, owner: "MemoryTransport", address: str) -> "MemoryConnection":
        """The near end of a link to the endpoint that is bound at `address`. Raises ConnectionRefusedError where none is."""
        if address not in self._endpoints:
            raise ConnectionRefusedError
        # Five bytes that begin with zero: what a ROUTER calls a peer that chose no name.
        near, far = self.joined(owner, address, self._endpoints[address], b"\0" + next(self._numbers).to_bytes(4, "big"))
        near.far, far.far = far, near
        far.owner.take_in(far)
        return near

    def joined(
        self, one: "MemoryTransport", address: str, other: "MemoryTransport", name: bytes
    ) -> "tuple[MemoryConnection, MemoryConnection]":
        """The two ends of a new link: `one` dials `address`, where `other` calls it `name`."""
        return MemoryConnection(one, address), MemoryConnection(other, name)


class MemoryTransport(Transport):
    """The Transport of tests, simulation and embedded actors."""

    def __init__(self, identity: Identity, network: MemoryNetwork, address: str = "") -> None:
        """`address` is fresh per incarnation unless it is given."""
        super().__init__(identity, address or f"{MEMORY}://{identity.name}.{identity.incarnation}")
        self._network = network

    def die(self) -> None:
        """End without a word, as a killed process does."""
        self._end(linger=False)

    def take_in(self, connection: "MemoryConnection") -> None:
        """A peer has opened a link."""
        self._links[connection.peer] = Link(connection.peer, self.identity, connection)

    def _listen(self) -> None:
        self._network.bind(self.address, self)

    def _dial(self, address: str) -> Connection:
        return self._network.connect(self, address)

    def _stop_listening(self) -> list[Rest]:
        self._network.unbind(self.address, self)
        return []


class MemoryConnection:
    """One end of a link and the direction that leads away from it: a queue that only ever loses its tail."""

    def __init__(self, owner: MemoryTransport, peer: Peer) -> None:
        self.peer = peer
        self.owner = owner
        self.far: MemoryConnection
        self.is_over = False
        self._flying: deque[Frame | str] = deque()
        """Frames, or the reason why nothing follows."""

    def send(self, data: bytes | bytearray, buffers: Sequence[memoryview | bytes] = ()) -> None:
        """See Connection. It arrives after all that flew before, one loop tick later."""
        self._launch(Frame(data, buffers))

    def close(self, *, linger: bool = False) -> None:
        """See Connection. The other side hears of it after what still flies, and without `linger` that is lost."""
        if not self.is_over:
            self.is_over = True
            if not linger:
                self._lose_suffix()
            self._launch(GONE)

    def _launch(self, what: Frame | str) -> None:
        self._flying.append(what)
        self.owner.loop.call_soon(self._land, context=self.far.owner.context)

    def _lose_suffix(self) -> None:
        self._flying.clear()

    def _land(self) -> None:
        """Hand over what is due. Runs in the receiver's context: one that stands still receives nothing."""
        if self._flying:
            self._hand_over(self._flying.popleft())

    def _hand_over(self, what: Frame | str) -> None:
        far = self.far
        if far.is_over:
            return
        if isinstance(what, str):
            far.is_over = True
            far.owner.ended(far, what)
        else:
            beside = [memoryview(part) for part in cut(what.buffers)] if what.buffers else ()
            far.owner.heard(far, memoryview(what.data), beside)
