"""The gate: a second host's way to the run's Store. Bytes travel through the bus, so Redis itself never listens on a network.

Each connection of a local client is a numbered stream over one CURVE link. What is said about one is a frame of four kinds, below. A
sender has at most `WINDOW_BYTES` of a stream unacknowledged, so neither side holds more than that for a peer that does not read.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import cast
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import msgspec

from rubato.bus.address import is_loopback
from rubato.bus.codec import Envelope
from rubato.bus.keys import Keys
from rubato.bus.link import Identity, Peer
from rubato.bus.transport import Delivery, Transport
from rubato.bus.zmq import ZmqTransport
from rubato.runtime.observe.log import logger
from rubato.runtime.store.redis import SENTINELS

REDIS_PORT = 6379
PIECE_BYTES = 64 * 1024
WINDOW_BYTES = 1024 * 1024
ACK_BYTES = WINDOW_BYTES // 4
"""Taken bytes are acknowledged together: most of what passes is far smaller than its acknowledgement is worth."""
MAX_STREAMS = 4096
"""Of all hosts together: some 80 connections per process that joined. Further ones are ended at once, and tried again."""

CLOSE_S = 1.0
"""For sockets to close, which takes a tick."""

Key = tuple[Peer, int]
Connect = Callable[[Callable[[], asyncio.Protocol]], Awaitable[object]]
"""Opens a connection to the server for the protocol that it makes. Raises OSError where there is none."""


class GateFrame(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What one side says about the stream of that number."""

    stream: int


class StreamBegun(GateFrame, frozen=True):
    """The first host connects to its server."""


class StreamData(GateFrame, frozen=True):
    """Bytes that a local socket said."""

    data: bytes


class StreamTaken(GateFrame, frozen=True):
    """So many bytes went out to the local socket: as many more may be sent."""

    size_bytes: int


class StreamEnded(GateFrame, frozen=True):
    """One of the two sockets is closed."""


_TAG = GateFrame.__name__
_decode = msgspec.msgpack.Decoder(StreamBegun | StreamData | StreamTaken | StreamEnded).decode


class GateStream(asyncio.Protocol):
    """One end of one connection: what its socket says goes to the peer, and the other way round. Calls `over` once it has no socket any more,
    nor is to have one."""

    connecting: "asyncio.Task[None] | None" = None
    """What will bring its socket, where that has to be opened."""

    def __init__(self, transport: Transport, key: Key, over: "Callable[[GateStream], None]") -> None:
        self._transport = transport
        self.key = key
        self._over = over
        self._socket: asyncio.Transport | None = None
        self._is_over = False
        self._is_full = False
        """The socket's buffer: what goes into it now is not acknowledged yet."""
        self._early: list[bytes] = []
        """What arrived before there was a socket."""
        self._held = 0
        """Bytes that arrived and are not acknowledged."""
        self._window = WINDOW_BYTES
        self._unsent = bytearray()
        """What the socket said beyond the window; it is not read meanwhile."""

    def arrived(self, frame: GateFrame) -> None:
        """What the peer says about this stream. More than its window allows ends it."""
        if self._is_over:
            return
        match frame:
            case StreamTaken():
                self._window += max(0, frame.size_bytes)
                self._send()
                if self._socket is not None and not self._unsent:
                    self._socket.resume_reading()
            case StreamData() if frame.data and self._held + len(frame.data) <= WINDOW_BYTES:
                self._held += len(frame.data)
                if self._socket is None:
                    self._early.append(frame.data)
                    return
                self._socket.write(frame.data)
                self._acknowledge()
            case _:
                self.end()

    def end(self) -> None:
        """Close the socket, which still takes what was written to it, and tell the peer."""
        if self._is_over:
            return
        self._is_over = True
        self.post(StreamEnded(self.key[1]))
        if self._socket is not None:
            self._socket.close()

    def abort(self) -> None:
        """The same, without waiting for the socket to take anything, or to be there."""
        self.end()
        if self._socket is not None:
            self._socket.abort()
        elif self.connecting is not None:
            self.connecting.cancel()

    def connected(self, connecting: "asyncio.Task[None] | None") -> None:
        """What was to bring a socket is over, None where it never began. Without one, so is this."""
        # A socket whose connect is cancelled is closed, and its protocol not told of it by uvloop.
        if self._socket is None or connecting is None or connecting.cancelled():
            self.end()
            self._over(self)

    def post(self, frame: GateFrame) -> None:
        """Tell the peer."""
        body = msgspec.Raw(msgspec.msgpack.encode(frame))
        self._transport.post(self.key[0], Envelope.tell("gate", 0, _TAG, b"", body, ""))

    # -- what the socket says ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast("asyncio.Transport", transport)
        if self._is_over:
            self._socket.abort()
            return
        self._socket.writelines(self._early)
        self._early.clear()
        self._acknowledge()

    def data_received(self, data: bytes) -> None:
        self._unsent += data
        self._send()
        if self._socket is not None and self._unsent:
            self._socket.pause_reading()

    def eof_received(self) -> None:
        self.end()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._acknowledge()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end()
        self._over(self)

    def _send(self) -> None:
        """As much as the window allows."""
        sent = 0
        while sent < len(self._unsent) and self._window:
            piece = bytes(self._unsent[sent : sent + min(PIECE_BYTES, self._window)])
            self._window -= len(piece)
            sent += len(piece)
            self.post(StreamData(self.key[1], piece))
        del self._unsent[:sent]

    def _acknowledge(self) -> None:
        if self._held >= ACK_BYTES and not self._is_full and not self._is_over:
            self.post(StreamTaken(self.key[1], self._held))
            self._held = 0


class Gate:
    """What both ends share: a transport and the streams over it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._streams: dict[Key, GateStream] = {}
        self._none = asyncio.Event()
        self._none.set()
        self._is_closing = False
        self._log = logger("gate")

    @property
    def address(self) -> str:
        """Where the transport is bound; known once `start` has returned."""
        return self._transport.address

    async def start(self) -> None:
        """Raises BadAddress when the address is taken or not this host's."""
        await self._transport.start(self._arrived, self._down)

    async def close(self) -> None:
        self._is_closing = True
        for stream in list(self._streams.values()):
            stream.abort()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._none.wait()
        await self._transport.close()

    def begin(self, key: Key) -> GateStream:
        """Listed at once, so that nothing that arrives for it is lost, and until it is over."""
        stream = GateStream(self._transport, key, self._forget)
        if self._is_closing:
            stream.end()
            return stream
        self._streams[key] = stream
        self._none.clear()
        return stream

    def _forget(self, stream: GateStream) -> None:
        if self._streams.get(stream.key) is stream:
            del self._streams[stream.key]
        if not self._streams:
            self._none.set()

    def asked(self, key: Key) -> None:
        """The peer begins a stream; only the first host is asked that."""

    def _arrived(self, delivery: Delivery) -> None:
        for news in self._transport.refusals.news():
            self._log.warning("refused", reason=news.reason, total=news.total, newest=news.sentence)
        try:
            frame = _decode(delivery.envelope.body)
        except (msgspec.MsgspecError, ValueError):
            self._down(delivery.peer, "it said what is no frame of a gate")
            return
        key = (delivery.peer, frame.stream)
        stream = self._streams.get(key)
        if stream is not None:
            stream.arrived(frame)
        elif isinstance(frame, StreamBegun):
            self.asked(key)

    def _down(self, peer: Peer, reason: str, _refusal: str = "") -> None:
        self._log.info("gate_link_down", reason=reason)
        for key, stream in list(self._streams.items()):
            if key[0] == peer:
                stream.end()


class GateServer(Gate):
    """On the first host, bound to a tcp address with keys: leads to what `connect` opens, the Store's server on this host."""

    def __init__(self, run_id: str, address: str, keys: Keys, connect: Connect, tasks: asyncio.TaskGroup) -> None:
        super().__init__(ZmqTransport(Identity(run_id, "gate", 1), address, keys=keys))
        self._connect = connect
        self._tasks = tasks

    def asked(self, key: Key) -> None:
        if self._is_closing or len(self._streams) >= MAX_STREAMS:
            GateStream(self._transport, key, lambda _: None).end()
            return
        stream = self.begin(key)
        connect = self._lead(stream)
        try:
            stream.connecting = self._tasks.create_task(connect, name=f"gate.{key[1]}")
        except RuntimeError:  # the group is ending, and closes this gate
            connect.close()
            stream.connected(None)
        else:
            stream.connecting.add_done_callback(stream.connected)

    async def _lead(self, stream: GateStream) -> None:
        with suppress(OSError):
            await self._connect(lambda: stream)


class GateClient(Gate):
    """On a host that joined: a Unix socket at `path` that behaves as if the first host's Redis listened there."""

    def __init__(self, run_id: str, gate: str, keys: Keys, path: Path, name: str) -> None:
        super().__init__(ZmqTransport(Identity(run_id, name, 1), f"ipc://{path}.gate", keys=keys))
        self._gate = gate
        self._path = path
        self._numbers = itertools.count(1)
        self._listener: asyncio.Server | None = None

    async def start(self) -> None:
        await super().start()
        self._listener = await asyncio.get_running_loop().create_unix_server(self._accepted, self._path)
        self._path.chmod(0o600)

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await super().close()

    def _accepted(self) -> GateStream:
        stream = self.begin(key := (self._gate, next(self._numbers)))
        if not self._is_closing:
            stream.post(StreamBegun(key[1]))
        return stream


def way_to(state_url: str) -> Connect | None:
    """How to connect to a server that only its own host reaches; None for one that other hosts reach by `state_url` itself."""
    if state_url.startswith(SENTINELS):
        from rubato.runtime.store.sentinel import way_to_master  # of no use to most

        return way_to_master(state_url)
    parts = urlsplit(state_url)
    if parts.scheme == "unix":
        return lambda protocol: asyncio.get_running_loop().create_unix_connection(protocol, parts.path)
    if parts.scheme == "redis" and is_loopback(parts.hostname or "localhost"):
        return lambda protocol: asyncio.get_running_loop().create_connection(
            protocol, parts.hostname or "localhost", parts.port or REDIS_PORT
        )
    return None


def way_through(state_url: str, path: Path) -> str:
    """The URL of the same server behind the gate's socket `path`: the same user, password and database, variables as they are written."""
    parts = urlsplit(state_url)
    given = dict(parse_qsl(parts.query))
    within = parts.path[1:].partition("/")
    db = "" if parts.scheme == "unix" else within[2 if state_url.startswith(SENTINELS) else 0]
    named = {"username": parts.username, "password": parts.password, "db": db}
    said = {name: unquote(value or "") or given.get(name, "") for name, value in named.items()}
    return f"unix://{path}?{urlencode({name: value for name, value in said.items() if value}, safe='${}:-')}"
