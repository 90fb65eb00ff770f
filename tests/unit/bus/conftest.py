"""A loop whose clock jumps to the next timer, so that tests of delays take no time and replay exactly."""

import asyncio
import selectors

import pytest


class _Jumping(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout=None):
        self.now += timeout or 0.0
        return super().select(0)


@pytest.fixture
def run():
    """A function that runs a coroutine on a fresh loop in virtual time, starting at 0."""

    def runner(work):
        selector = _Jumping()
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now
        try:
            return loop.run_until_complete(work)
        finally:
            loop.close()

    return runner
