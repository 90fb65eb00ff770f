"""uvicorn inside a process of another program."""

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import uvicorn


class HttpServer(uvicorn.Server):
    """Signals are the kernel's, or the command's: uvicorn would raise them again once it has ended."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    def end(self) -> None:
        """Answer what is under way, and end; called twice, end now."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def run_on(self, listening: socket.socket) -> None:
        """Serve until cancelled, and end then: what is under way is not answered."""
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(self.serve(sockets=[listening]))
            try:
                await asyncio.shield(serving)
            except asyncio.CancelledError:
                self.end()
                self.end()
                await serving
                raise

    async def answer_on(self, listening: socket.socket, most: int) -> None:
        """Answer on one more socket, at most `most` connections at once, until cancelled."""
        if not self.config.loaded:
            self.config.load()
        room = {"config": self.config, "server_state": self.server_state, "app_state": {}}
        counted = _counted(self.config.http_protocol_class, most)
        server = await asyncio.get_running_loop().create_server(lambda: counted(**room), sock=listening)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            server.close()


def _counted(protocol: Any, most: int) -> Any:
    """The class of a protocol of which at most `most` are connected: further connections end at once."""
    connected = set[Any]()

    class Counted(protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            connected.add(self)
            if len(connected) > most:
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            connected.discard(self)
            super().connection_lost(exc)

    return Counted
