"""Counters that give no number twice; the twin of scripts/above.lua for a store in memory."""

import asyncio


class Counters:
    """A store that came back may have forgotten numbers: its first one of each counter leaps to the milliseconds since any counted."""

    def __init__(self) -> None:
        self.life = 0
        """Which start of the server this is; whoever simulates a restart gives another number."""
        self._first: tuple[int, float] | None = None
        self._last: dict[str, int] = {}

    def above(self, name: str, stored: int) -> int:
        """The next number of `name` after `stored`."""
        now = asyncio.get_running_loop().time()
        self._first = first, began = self._first or (self.life, now)
        last = self._last.get(name, first)
        self._last[name] = self.life
        return stored + 1 if last == self.life else max(stored + 1, int(1000 * (now - began)))
