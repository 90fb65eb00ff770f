"""Decides who may open a CURVE link: libzmq asks over ZAP (RFC 27), inside the process, for each key that presents itself."""

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils import z85

from bus.zmq_sockets import Context
from bus.zmq_wire import Wire

ENDPOINT = "inproc://zeromq.zap.01"
VERSION = b"1.0"


class Zap:
    """The context's one ZAP handler. `refused(sentence)` is told of each stranger; a request that makes no sense is a stranger's too."""

    def __init__(
        self,
        context: Context,
        loop: asyncio.AbstractEventLoop,
        allowed: frozenset[str],
        refused: Callable[[str], None],
    ) -> None:
        self._allowed = allowed
        self._refused = refused
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(ENDPOINT)
        self._wire = Wire(self._socket, loop, self._asked, routed=True)

    def close(self) -> None:
        self._wire.close()

    def _asked(self, sender: bytes, _delimiter: zmq.Frame, asked: list[memoryview]) -> None:
        """Frames: version, request id, domain, the peer's address, its routing id, mechanism, and for CURVE its public key."""
        parts = [bytes(part) for part in asked]
        known = len(parts) == 7 and parts[0] == VERSION and parts[5] == b"CURVE"
        key = z85.encode(parts[6]).decode() if known and len(parts[6]) == 32 else ""
        admitted = key in self._allowed
        if not admitted:
            whence = parts[3].decode(errors="replace") if len(parts) > 3 else "an unknown address"
            self._refused(f"{whence} presented the unknown key {key or '(none)'}")
        status, text = (b"200", b"OK") if admitted else (b"400", b"this key is not admitted")
        request = parts[1] if len(parts) > 1 else b""
        answer = [sender, b"", VERSION, request, status, text, key.encode(), b""]
        self._socket.send_multipart(answer, zmq.NOBLOCK)
        self._wire.flushed()
