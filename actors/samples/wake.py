"""Wakes everybody who waits for a change, so that nobody polls."""

import asyncio


class Wake:
    """Take `next()`, then look, then wait for it: a change in between is never missed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wake all present waiters."""
        self._event.set()
        self._event = asyncio.Event()

    def next(self) -> asyncio.Event:
        """The event that the next `set` sets."""
        return self._event

    async def wait(self) -> None:
        """Return at the next `set` after this is awaited."""
        await self._event.wait()
