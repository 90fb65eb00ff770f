"""uvicorn inside a process of another program."""

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
