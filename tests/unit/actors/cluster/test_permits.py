"""Permits over every store; and what time does to them, on the virtual loop."""

import asyncio

import pytest

from rubato.actors.cluster.permits import TTL_S, PermitLost, Permits
from rubato.planning.permits import PermitLine
from rubato.runtime.memory import MemoryStore
from rubato.runtime.store.store import StoreUnavailable
from rubato.sim.virtual import run_virtual
from tests.stores import STORE_KINDS, state_url_of, store_at


@pytest.fixture(params=STORE_KINDS)
def state_url(request: pytest.FixtureRequest) -> str:
    return state_url_of(request.param, request)


@pytest.fixture
async def store(state_url: str):
    async with store_at(state_url) as store:
        yield store


async def _waiting(permits: Permits, pool: str, num: int) -> None:
    """Return once `num` stand in line."""
    after = 0
    while len((await permits.lines())[pool].queue) < num:
        entries = await permits.events(pool, after, wait_s=5)
        after = entries[-1][0] if entries else after


async def test_a_pool_has_one_holder_and_serves_who_came_first(store):
    permits, order = Permits(store), []

    async def job(name):
        async with permits.hold("roll", "rollout", name) as grant:
            order.append((name, grant.term))

    async with asyncio.TaskGroup() as tasks, permits.hold("roll", "rollout", "first") as grant:
        for at, name in enumerate(("second", "third", "fourth"), 1):
            tasks.create_task(job(name))
            await _waiting(permits, "roll", at)
        line = (await permits.lines())["roll"]
        assert line.holder is not None
        assert (line.holder.job, line.holder.term) == ("first", grant.term)
        assert [each.job for each in line.queue] == ["second", "third", "fourth"]
        assert order == []

    assert [name for name, _ in order] == ["second", "third", "fourth"]
    terms = [grant.term, *(term for _, term in order)]
    assert terms == sorted(set(terms))
    assert (await permits.lines())["roll"] == PermitLine()


async def test_pools_do_not_wait_for_each_other(store):
    permits = Permits(store)

    async with permits.hold("roll", "rollout", "a"), permits.hold("train", "training", "b"):
        lines = await permits.lines()

    assert {pool: line.holder.job for pool, line in lines.items() if line.holder} == {"roll": "a", "train": "b"}


async def test_who_stops_waiting_leaves_the_line(store):
    permits = Permits(store)

    async with asyncio.TaskGroup() as tasks, permits.hold("roll", "rollout", "a"):
        waiting = tasks.create_task(permits.hold("roll", "rollout", "b").__aenter__())
        await _waiting(permits, "roll", 1)
        waiting.cancel()

    assert (await permits.lines())["roll"] == PermitLine()


async def test_what_the_block_raises_is_raised_as_itself_and_frees_the_pool(store):
    permits = Permits(store)

    with pytest.raises(KeyError, match="mine"):
        async with permits.hold("roll", "rollout", "a") as grant:
            raise KeyError("mine")

    assert grant.lost.is_set()
    assert (await permits.lines())["roll"].holder is None


async def test_a_job_that_was_started_again_takes_over_from_itself_at_once(store):
    permits = Permits(store)

    async with permits.hold("roll", "rollout", "a") as old, asyncio.TaskGroup() as tasks:
        waiting = permits.hold("roll", "rollout", "b")
        entering = tasks.create_task(waiting.__aenter__())
        await _waiting(permits, "roll", 1)
        async with permits.hold("roll", "rollout", "a") as new:
            line = (await permits.lines())["roll"]
            assert not entering.done()
        await entering
        await waiting.__aexit__(None, None, None)

    assert line.holder is not None
    assert line.holder.term == new.term > old.term


async def test_the_next_in_line_has_all_places_but_those_of_the_tail_until_that_is_over(store):
    permits, blocked = Permits(store), []

    async with asyncio.TaskGroup() as tasks:
        async with permits.hold("pool", "rollout", "a") as tail:
            waiting = permits.hold("pool", "rollout", "b")
            entering = tasks.create_task(waiting.__aenter__())
            await _waiting(permits, "pool", 1)
            assert await permits.narrow(tail, (2,))
            grant = await entering
            telling = tasks.create_task(permits.tail("pool", blocked.append))
            for term, place in ((tail.term, 2), (grant.term, 1)):
                assert (await permits.follow("pool", term, place)).term == term
            for term, place in ((tail.term, 1), (grant.term, 2)):
                with pytest.raises(PermitLost):
                    await permits.follow("pool", term, place)
            assert not await permits.narrow(grant, (1,))
            assert tail.is_held
        await telling
        assert (blocked[0], blocked[-1]) == ({2}, frozenset())
        assert (await permits.follow("pool", grant.term, 2)).term == grant.term
        await waiting.__aexit__(None, None, None)


async def test_the_events_of_a_pool_tell_who_waited_and_who_held_it_when(store):
    permits = Permits(store)
    async with permits.hold("roll", "rollout", "a"):
        pass

    events = [event for _, event in await permits.events("roll")]

    assert [(event.kind, event.stand.job) for event in events] == [("holds", "a"), ("gone", "a")]
    assert events[0].at_s <= events[1].at_s


# -- what time does -------------------------------------------------------------------------------------------------


class Stopped:
    """A process that is stopped: nothing that it asks of the Store arrives, and its clock runs on."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    def __getattr__(self, name):
        real = getattr(self._store, name)

        async def late(*args, **kwargs):
            await self.goes_on.wait()
            return await real(*args, **kwargs)

        return late


def test_a_holder_that_stands_still_loses_the_pool_and_knows_it_before_the_next_has_it():
    async def main():
        store, loop = MemoryStore(), asyncio.get_running_loop()
        process = Stopped(store)
        stalled, other = Permits(process), Permits(store)
        async with stalled.hold("roll", "rollout", "a") as grant:
            process.goes_on.clear()
            async with other.hold("roll", "rollout", "b") as next_grant:
                assert not grant.is_held
                assert grant.lost.is_set()
                assert grant.until <= loop.time()
                assert next_grant.term > grant.term
                process.goes_on.set()
                await asyncio.sleep(3 * TTL_S)
                assert next_grant.is_held
                holder = (await other.lines())["roll"].holder
                assert holder is not None
                assert holder.job == "b"
        assert (await other.lines())["roll"].holder is None

    run_virtual(main, 1)


def test_a_killed_holder_frees_the_pool_within_a_lease_and_a_look():
    async def main():
        store, loop = MemoryStore(), asyncio.get_running_loop()
        process = Stopped(store)
        async with Permits(process).hold("roll", "rollout", "a"):
            process.goes_on.clear()
            began = loop.time()
            async with Permits(store).hold("roll", "rollout", "b"):
                took_s = loop.time() - began
            process.goes_on.set()
        return took_s

    assert run_virtual(main, 1) <= TTL_S * 4 / 3 + 0.1


def test_a_permit_that_is_renewed_lasts_for_as_long_as_it_is_held():
    async def main():
        permits = Permits(MemoryStore())
        async with permits.hold("roll", "rollout", "a") as grant:
            await asyncio.sleep(100 * TTL_S)
            assert grant.is_held

    run_virtual(main, 1)


class Away:
    """A Store that can't be reached until it is back."""

    def __init__(self, store: MemoryStore) -> None:
        self._store, self.back = store, False

    def __getattr__(self, name):
        if not self.back:
            raise StoreUnavailable("nobody answers")
        return getattr(self._store, name)


def test_a_store_that_is_away_is_waited_for_and_ends_a_permit_that_can_not_be_renewed():
    async def main():
        away = Away(MemoryStore())
        permits = Permits(away)
        async with asyncio.TaskGroup() as tasks:
            entering = tasks.create_task((held := permits.hold("roll", "rollout", "a")).__aenter__())
            await asyncio.sleep(60)
            assert not entering.done()
            away.back = True
            grant = await entering
            away.back = False
            await grant.lost.wait()
            assert not grant.is_held
            away.back = True
            await held.__aexit__(None, None, None)

    run_virtual(main, 1)


def test_a_block_that_is_cancelled_keeps_the_pool_until_its_lease_lapses():
    async def main():
        permits, loop, began = Permits(MemoryStore()), asyncio.get_running_loop(), asyncio.Event()

        async def job():
            async with permits.hold("roll", "rollout", "a"):
                began.set()
                await asyncio.sleep(1000)

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(job())
            await began.wait()
            cancelled_at = loop.time()
            task.cancel()
            async with permits.hold("roll", "rollout", "b"):
                return loop.time() - cancelled_at

    assert TTL_S * 2 / 3 <= run_virtual(main, 1) <= TTL_S * 4 / 3 + 0.1


def test_one_that_died_in_line_is_passed_over():
    async def main():
        store, order = MemoryStore(), []
        process = Stopped(store)
        dead, permits = Permits(process), Permits(store)

        async def job(permits, name):
            async with permits.hold("roll", "rollout", name):
                order.append(name)

        async with asyncio.TaskGroup() as tasks:
            async with permits.hold("roll", "rollout", "a"):
                dying = tasks.create_task(job(dead, "dead"))
                await asyncio.sleep(1)
                process.goes_on.clear()
                tasks.create_task(job(permits, "b"))
                await asyncio.sleep(3 * TTL_S)
            await asyncio.sleep(1)
            assert order == ["b"]
            dying.cancel()
            process.goes_on.set()

    run_virtual(main, 1)


def test_who_holds_up_a_permit_is_the_job_that_has_it_or_the_store_that_does_not_answer():
    async def main():
        away = Away(MemoryStore())
        away.back = True
        first, second, told = Permits(away), Permits(away), []
        async with first.hold("roll", "rollout", "a"), asyncio.TaskGroup() as tasks:
            entering = tasks.create_task(second.hold("roll", "rollout", "b").__aenter__())
            await asyncio.sleep(20)
            told.append(second.why("roll"))
            away.back = False
            await asyncio.sleep(TTL_S + 3)
            told.append(second.why("roll"))
            entering.cancel()
        return told

    in_line, away = run_virtual(main, 1)

    assert in_line == ("the pool roll, which a has to rollout", "another job")
    assert away == ("the pool roll, whose cluster's Store does not answer", "the cluster's Store")
