"""Counters that give no number twice; the twin of scripts/above.lua for a store in memory."""

import asyncio


class Counters:
    """A store that came back may have forgotten its newest numbers: its first one leaps to the milliseconds since the counter began."""

    def __init__(self) -> None:
        self.life = 0
        """Which start of the server this is; whoever simulates a restart gives another number."""
        self._marks: dict[str, tuple[int, float]] = {}

    def above(self, name: str, stored: int) -> int:
        """The next number of `name` after `stored`."""
        now = asyncio.get_running_loop().time()
        last, began = self._marks.get(name, (None, now))
        self._marks[name] = (self.life, began)
        return stored + 1 if last == self.life else max(stored + 1, int(1000 * (now - began)))
