"""An actor that comes back: two stops in a row, and an end at the same moment."""

import asyncio

import pytest

from rubato.bus.memory import MemoryNetwork
from rubato.runtime.errors import ActorFailed
from rubato.runtime.memory import MemoryStore
from rubato.runtime.registry import list_actors
from rubato.sim.virtual import run_virtual
from tests.simulation.test_found_by_seeds import LateReplies, made
from tests.simulation.test_kernel import Server


class TwiceStopped(LateReplies):
    """The process is stopped once more before its `increment` reaches the Store."""

    before_increment_s = 0.0

    async def increment(self, key, *, at_least=0):
        asleep_s, self.before_increment_s = self.before_increment_s, 0.0
        await asyncio.sleep(asleep_s)
        return await super().increment(key, at_least=at_least)


def test_an_actor_stopped_again_before_it_drew_its_incarnation_does_not_take_its_name_from_its_successor(tmp_path):
    async def main():
        store = TwiceStopped()
        sleeper = made(Server, "server-1", MemoryNetwork(), store, tmp_path)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(outcome(sleeper.serve()))
            await sleeper.ready.wait()
            store.asleep_s, store.before_increment_s = 12.0, 12.0
            await asyncio.sleep(13.5)  # awake, proven to have the name, and stopped again: that lease lapses too
            await asyncio.sleep(10.5)
            token = await MemoryStore.increment(store, "incarnation", at_least=2)
            assert await MemoryStore.lease(store, "actor/server-1", token, b"", 60.0)
            await asyncio.sleep(5.0)
            held = (await store.leases("actor/"))["actor/server-1"].token
            serving.cancel()
        return held, token

    held, token = run_virtual(main)
    assert held == token


async def outcome(work):
    try:
        await work
    except* ActorFailed:
        pass


class OneRoundTrip(MemoryStore):
    """Every call takes 10 ms there and 10 ms back; one renewal is answered `asleep_s` late."""

    asleep_s = 0.0

    async def lease(self, name, token, value, ttl_s):
        await asyncio.sleep(0.01)
        held = await super().lease(name, token, value, ttl_s)
        asleep_s, self.asleep_s = self.asleep_s, 0.0
        await asyncio.sleep(0.01 + asleep_s)
        return held

    async def release(self, name, token):
        await asyncio.sleep(0.01)
        done = await super().release(name, token)
        await asyncio.sleep(0.01)
        return done

    async def append(self, stream, value, *, limit=10_000):
        await asyncio.sleep(0.01)
        index = await super().append(stream, value, limit=limit)
        await asyncio.sleep(0.01)
        return index

    async def increment(self, key, *, at_least=0):
        await asyncio.sleep(0.01)
        number = await super().increment(key, at_least=at_least)
        await asyncio.sleep(0.01)
        return number


@pytest.mark.parametrize("later_ms", range(-120, 40, 5))
def test_an_actor_that_is_told_to_end_as_it_wakes_leaves_no_lease(tmp_path, later_ms):
    """The job ended while it was stopped: it wakes with the Drain in its mailbox and its heartbeat overdue."""

    async def main():
        store = OneRoundTrip()
        sleeper = made(Server, "server-1", MemoryNetwork(), store, tmp_path)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(sleeper.serve())
            await sleeper.ready.wait()
            store.asleep_s = 12.0
            await asyncio.sleep(1.0 + 12.02 + later_ms / 1000)
            sleeper.stop()
            await serving
        return [(record.name, record.incarnation, record.state) for record in await list_actors(store)]

    assert run_virtual(main) == []
