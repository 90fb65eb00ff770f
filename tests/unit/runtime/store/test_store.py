"""Counters in memory across simulated restarts; tests/integration/test_redis_restart.py shows the same of a server."""

import asyncio

from rubato.runtime.memory import MemoryStore
from rubato.sim.virtual import run_virtual


def test_a_store_that_forgot_its_newest_numbers_gives_none_twice():
    async def main():
        store, given = MemoryStore(), []
        for life in range(4):
            store.counters.life = life
            store._keys["n"] = b"3"  # all that it remembers
            given += [await store.increment("n") for _ in range(5)]
            await asyncio.sleep(0.5)
        return given

    given = run_virtual(main)

    assert given == [4, 5, 6, 7, 8, 500, 501, 502, 503, 504, 1000, 1001, 1002, 1003, 1004, 1500, 1501, 1502, 1503, 1504]


def test_a_store_that_forgot_a_counter_altogether_gives_none_of_its_numbers_twice():
    async def main():
        store = MemoryStore()
        await store.increment("first")
        await asyncio.sleep(0.5)
        given = [await store.increment("n"), await store.increment("term")]
        store._keys.clear()
        store.counters._last = {"first": 0}
        store.counters.life = 1
        return [*given, await store.increment("n"), await store.increment("term")]

    assert run_virtual(main) == [1, 1, 500, 500]


def test_a_restart_within_a_millisecond_still_counts_on():
    async def main():
        store = MemoryStore()
        first = await store.increment("n")
        store.counters.life = 1
        return first, await store.increment("n")

    assert run_virtual(main) == (1, 2)
