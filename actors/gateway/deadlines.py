"""Blocks of tasks that others may end, and their deadlines: one timer for all of a kind, since most are over long before they are due."""

import asyncio
from contextlib import AbstractAsyncContextManager


class Block(AbstractAsyncContextManager["Block"]):
    """Ends with TimeoutError once it is cut off, as asyncio.timeout has it. It is entered once."""

    is_cut = False

    def __init__(self, under_way: "dict[Block, float] | None" = None, due: float = 0.0) -> None:
        self._under_way, self._due = under_way, due

    async def __aenter__(self) -> "Block":
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        if self._under_way is not None:
            self._under_way[self] = self._due
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._under_way is not None:
            del self._under_way[self]
        if self.is_cut and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError

    def cut(self) -> None:
        """While it is under way; again changes nothing."""
        if not self.is_cut:
            self.is_cut = True
            self._task.cancel()


class Deadlines:
    """Cuts each block off that takes longer than `within_s`; None: none."""

    def __init__(self, within_s: float | None) -> None:
        self.within_s = within_s
        self._under_way: dict[Block, float] = {}
        """When each is due, the first to be so first."""
        self._timer: asyncio.TimerHandle | None = None

    def block(self) -> Block:
        """One that begins now."""
        if self.within_s is None:
            return Block()
        loop = asyncio.get_running_loop()
        due = loop.time() + self.within_s
        if self._timer is None:
            self._timer = loop.call_at(due, self._check)
        return Block(self._under_way, due)

    def _check(self) -> None:
        """The timer of a block that is over by now mostly finds none that is due."""
        loop, self._timer = asyncio.get_running_loop(), None
        for block, due in [*self._under_way.items()]:
            if due > loop.time():
                self._timer = loop.call_at(due, self._check)
                break
            block.cut()
