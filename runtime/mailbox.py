"""The bounded queue before an actor; what can't wait (drain, cancel) never stands in it."""

import asyncio
from collections import deque
from typing import NamedTuple

from bus.transport import Delivery

CAPACITY = 4096
"""Above what 64 peers may send on credit alone; a full mailbox refuses (OVERLOADED), and the sender may ask elsewhere."""


class Letter(NamedTuple):
    """A delivery with its local deadline (loop time, 0 for none)."""

    delivery: Delivery
    deadline: float


class Mailbox:
    """First in, first out. One reader."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._letters: deque[Letter] = deque()
        self._capacity = capacity
        self._reader: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._letters)

    def put(self, letter: Letter) -> bool:
        """False when full; the letter is not kept then."""
        if len(self._letters) >= self._capacity:
            return False
        self._letters.append(letter)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        return True

    async def get(self) -> Letter:
        while not self._letters:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
            self._reader = None
        return self._letters.popleft()

    def cancel(self, peer: object, ask_id: int) -> Letter | None:
        """Take a queued ask out again, if it is still here."""
        for letter in self._letters:
            if letter.delivery.envelope.id == ask_id and letter.delivery.peer == peer:
                self._letters.remove(letter)
                return letter
        return None
