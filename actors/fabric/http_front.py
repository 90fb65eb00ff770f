"""Lets the emulated switch answer HTTP: an ASGI application around its dialect, served by uvicorn."""

import json
import socket
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any

import uvicorn

from actors.fabric.dialect import MOST_BYTES, Answer, Dialect
from actors.fabric.driver import YANG_JSON

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class HttpFront:
    """Bound when made: `url` is valid at once. Raises OSError where it can't be bound."""

    def __init__(self, dialect: Dialect, listen: str) -> None:
        host, _, port = listen.rpartition(":")
        self._socket = socket.create_server((host, int(port)))
        bound = self._socket.getsockname()
        self.url = f"http://{bound[0]}:{bound[1]}"
        settings = uvicorn.Config(
            application(dialect), lifespan="off", log_config=None, access_log=False, ws="none", limit_concurrency=64
        )
        self._server = _Server(settings)

    async def serve(self) -> None:
        """Until `stop`."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """The socket is closed by the server, within a tenth of a second."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """The process' signals are the kernel's."""
        yield


def application(dialect: Dialect) -> Callable[[dict[str, Any], Receive, Send], Awaitable[None]]:
    """The ASGI application. Refuses bodies that are longer than any change of circuits."""

    async def answer(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        body = b""
        more = True
        while more and len(body) <= MOST_BYTES:
            part = await receive()
            body, more = body + part.get("body", b""), part.get("more_body", False)
        headers = dict(scope["headers"])
        found = Answer(413) if more else dialect.answer(
            scope["method"], scope["path"], headers.get(b"authorization", b""), body
        )  # fmt: skip
        kind = [(b"content-type", YANG_JSON.encode())]
        await send({"type": "http.response.start", "status": found.status, "headers": kind})
        await send({"type": "http.response.body", "body": encoded(found)})

    return answer


def encoded(answer: Answer) -> bytes:
    return b"" if answer.body is None else json.dumps(answer.body).encode()
