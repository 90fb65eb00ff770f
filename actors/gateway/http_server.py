"""uvicorn inside a process of another program."""

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager

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
