"""HTTP without sockets: requests go into an ASGI application as its server would hand them over, each as a task of the serving process."""

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, NamedTuple

from rubato.sim.simtest.process import ActorProcess


class Gone(Exception):
    """The connection ended before the answer did, or there was none."""


class Reply(NamedTuple):
    """A whole answer."""

    status: int
    body: bytes


class Request:
    """One request, on a connection of its own."""

    def __init__(self, process: ActorProcess, method: str, path: str, key: str, body: bytes) -> None:
        self.process = process
        self.method, self.path = method, path
        self._body, self._headers = body, [(b"authorization", f"Bearer {key}".encode())]
        loop = asyncio.get_running_loop()
        self.began = loop.time()
        self._reply: asyncio.Future[Reply] = loop.create_future()
        self._left = asyncio.Event()
        self._parts: list[bytes] = []
        self._status = 0
        self._is_read = False

    async def reply(self) -> Reply:
        """The whole answer. Raises Gone where its client has left."""
        process, loop = self.process, asyncio.get_running_loop()
        server = getattr(process.actor, "http", None)
        if not process.alive or server is None or not server.is_up:
            raise Gone
        process.at_death[self] = self.cut
        loop.call_soon(server.begin, self, context=process.context)
        try:
            return await self._reply
        finally:
            process.at_death.pop(self, None)
            self._left.set()

    def undisturbed(self, since: float) -> bool:
        """Whether its server lived and ran at full speed since then."""
        process = self.process
        return process.alive and not process.frozen and not process.slowness_s and process.thawed_at < since

    def cut(self) -> None:
        """Its connection ends."""
        if not self._reply.done():
            self._reply.set_exception(Gone())

    async def run(self, app: Any) -> None:
        """In the server's process."""
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": self._headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        await app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, event: dict[str, Any]) -> None:
        self.process.check_alive()
        if event["type"] == "http.response.start":
            self._status = event["status"]
            return
        self._parts.append(event.get("body", b""))
        if not event.get("more_body") and not self._reply.done():
            self._reply.set_result(Reply(self._status, b"".join(self._parts)))


class HttpTasks:
    """Stands for uvicorn in one process: `serve` runs what comes by `begin` until it is cancelled, and cuts what is under way then."""

    def __init__(self, broke: Callable[[str], None]) -> None:
        """`broke` hears of errors that the application did not answer itself."""
        self._broke = broke
        self._app: Any = None
        self._running: asyncio.TaskGroup | None = None
        self._open: dict[Request, None] = {}

    @property
    def is_up(self) -> bool:
        return self._running is not None

    @property
    def paths(self) -> list[str]:
        """Of requests under way."""
        return [f"{request.method} {request.path}" for request in self._open]

    async def serve(self, app: Any) -> None:
        self._app = app
        try:
            async with asyncio.TaskGroup() as self._running:
                await asyncio.Event().wait()
        finally:
            self._running = None
            for request in list(self._open):
                request.cut()

    def begin(self, request: Request) -> None:
        """Called in the process's context, which its task inherits."""
        if self._running is None:
            request.cut()
            return
        self._open[request] = None
        self._running.create_task(self._run(request), name=f"http.{request.method}", context=copy_context())

    async def _run(self, request: Request) -> None:
        try:
            await request.run(self._app)
        except Exception as error:  # noqa: BLE001 - a server answers 500 whatever it was
            if request.process.alive:
                self._broke(f"{request.method} {request.path.partition('/sessions/')[1]}: {error!r}")
        finally:
            self._open.pop(request, None)
            request.cut()
