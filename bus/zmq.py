"""Carries envelopes between processes: frames over connections, in order, each batch of a tick as few messages as possible.

Both ends speak ZMTP. Within a host the event loop does so itself, over Unix sockets (bus/unix/); between hosts libzmq does, with CURVE
(bus/libzmq/). Which one follows from the address, and nothing above a connection knows. Requests leave on the link that we
opened and replies come back on it, so each link has one owner, and when it breaks both sides know.

What ZeroMQ offers and we refuse, because each loses messages in silence:

- Chosen routing ids: a reconnecting peer is then mis-routed or ignored. We name the links of those who come; HELLO says who is behind one.
- Reconnecting: a DEALER delivers its queue to the process that binds the address next, be it another incarnation. A broken link is
  reported and dropped; the next `post` opens a new one.
- High-water marks: a ROUTER drops at the mark. What is queued is bounded by the credit of the runtime.

A dead process is noticed within milliseconds, a dead host or network by ZMTP heartbeats within 8 s, a process that was stopped within
12 s. Shorter stalls of an event loop are for the leases of the registry to notice.
"""

import asyncio
from typing import TYPE_CHECKING

from rubato.bus import link as limits
from rubato.bus.address import IPC, MEMORY, Address, parse
from rubato.bus.errors import BadAddress
from rubato.bus.keys import Keys
from rubato.bus.link import Connection, Identity, Rest
from rubato.bus.transport import Transport
from rubato.bus.unix.connection import UnixConnection, UnixListener, dial

if TYPE_CHECKING:
    from rubato.bus.libzmq.connection import ZmqContext


class ZmqTransport(Transport):
    """The Transport between processes."""

    def __init__(self, identity: Identity, bind: str, *, public: str = "", keys: Keys | None = None) -> None:
        """`public` is a second, tcp address to bind, for peers on other hosts. With `keys`, tcp is CURVE wherever it is used."""
        super().__init__(identity, bind, public)
        self._keys = keys
        self._listener: UnixListener | None = None
        self._libzmq: ZmqContext | None = None
        self._heartbeat: asyncio.TimerHandle | None = None

    def _listen(self) -> None:
        try:
            self.address = self._bind(self.address)
            if self.public_address:
                self.public_address = self._bind(self.public_address)
        except BadAddress:
            for rest in self._stop_listening():
                rest()
            raise
        self._beat()

    def _bind(self, where: str) -> str:
        address = self._parsed(where)
        if address.scheme == IPC:
            self._listener = UnixListener(address.place, self)
            return where
        return self._tcp().bind(where)

    def _stop_listening(self) -> list[Rest]:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        rests = self._listener.close() if self._listener is not None else []
        return rests if self._libzmq is None else [*rests, self._libzmq.close()]

    def _tcp(self) -> "ZmqContext":
        """Made when it is needed first: a process that only talks within its host neither loads libzmq nor has its threads."""
        if self._libzmq is None:
            from rubato.bus.libzmq.connection import ZmqContext

            self._libzmq = ZmqContext(self._keys, self)
        return self._libzmq

    def _dial(self, address: str) -> Connection:
        where = self._parsed(address)
        return dial(where.place, address, self) if where.scheme == IPC else self._tcp().dial(address)

    def _parsed(self, where: str) -> Address:
        address = parse(where, keyed=self._keys is not None)
        if address.scheme == MEMORY:
            raise BadAddress(f"{where} is an address within one process; this process is reached by ipc:// or tcp://")
        return address

    def _beat(self) -> None:
        """libzmq has heartbeats of its own; our streams have these."""
        self._heartbeat = self.loop.call_later(limits.HEARTBEAT_MS / 1000, self._beat)
        if self._listener is not None:
            self._listener.beat()
        for link in list(self._links.values()):
            if isinstance(link.connection, UnixConnection) and isinstance(link.peer, str):
                link.connection.beat()
