"""The bounded queue before an actor; what can't wait (drain, cancel) never stands in it."""

import asyncio
from collections import deque

from bus.credit import WINDOW_MESSAGES
from bus.transport import Delivery

CAPACITY = 64 * WINDOW_MESSAGES
"""What 64 peers may send on credit alone; a full mailbox refuses (OVERLOADED), and the sender may ask elsewhere."""


class Mailbox:
    """First in, first out. One reader, who takes from `letters` itself and waits when they are gone."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.letters: deque[Delivery] = deque()
        self._capacity = capacity
        self._reader: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self.letters)

    def put(self, letter: Delivery) -> bool:
        """False when full; the letter is not kept then."""
        letters = self.letters
        if len(letters) >= self._capacity:
            return False
        letters.append(letter)
        if self._reader is not None:
            if not self._reader.done():
                self._reader.set_result(None)
            self._reader = None
        return True

    async def wait(self) -> None:
        """Return once there is a letter."""
        while not self.letters:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def cancel(self, peer: object, ask_id: int) -> Delivery | None:
        """Take a queued ask out again, if it is still here."""
        for letter in self.letters:
            if letter.envelope.id == ask_id and letter.peer == peer:
                self.letters.remove(letter)
                return letter
        return None
