import asyncio

import msgspec
import pytest

from rubato.runtime.memory import MemoryStore
from rubato.runtime.registry import LEASE_TTL_S, LOOK_S, RELIST_S, ActorRecord, Directory, Registry
from rubato.runtime.store.store import Lease, StoreFull
from rubato.sim.virtual import run_virtual


def record(name: str, incarnation: int, *, beat: int = 0, role: str = "engine") -> ActorRecord:
    return ActorRecord(name, role, f"mem://{name}.{incarnation}", incarnation, 1, "here", "ready", beat=beat)


async def test_a_newer_incarnation_replaces_an_older_one_and_is_reported_in_both_lists():
    directory = Directory()
    directory.add(record("engine-1", 3))

    joined, left = directory.add(record("engine-1", 5))

    assert (joined, left) == ({"engine-1"}, {"engine-1"})
    assert directory.find("engine-1").incarnation == 5


async def test_an_older_incarnation_changes_nothing():
    directory = Directory()
    directory.add(record("engine-1", 5))

    assert directory.add(record("engine-1", 3)) == (set(), set())
    assert directory.remove("engine-1", 3) == set()
    assert directory.ready("engine") == ("engine-1",)


async def test_a_suspect_returns_only_when_it_is_seen_to_beat_again():
    directory = Directory()
    directory.add(record("engine-1", 5))

    left = directory.suspect("mem://engine-1.5", {5: 7, 4: 900})

    assert left == {"engine-1"}
    assert directory.add(record("engine-1", 5, beat=8)) == (set(), set())
    assert directory.add(record("engine-1", 5, beat=9)) == ({"engine-1"}, set())


async def test_ready_lists_one_role_sorted():
    directory = Directory()
    for name, role in [("engine-2", "engine"), ("trainer-1", "trainer"), ("engine-1", "engine")]:
        directory.add(record(name, 1, role=role))

    assert directory.ready("engine") == ("engine-1", "engine-2")


async def test_ready_lists_all_that_provide_something_whatever_their_role():
    directory = Directory()
    for name, role, provides in [
        ("far_engine-1", "far_engine", {"tokens"}),
        ("engine-1", "engine", {"tokens"}),
        ("trainer-1", "trainer", ()),
    ]:
        directory.add(msgspec.structs.replace(record(name, 1, role=role), provides=frozenset(provides)))

    assert directory.ready("tokens") == ("engine-1", "far_engine-1")
    assert directory.ready("far_engine") == ("far_engine-1",)
    assert directory.resolve("tokens").name == "engine-1"
    directory.remove("engine-1", 1)
    assert directory.ready("tokens") == ("far_engine-1",)


class FullStore(MemoryStore):
    """A server that answers, and takes no change while `full`."""

    full_now = False

    async def lease(self, name: str, token: int, value: bytes, ttl_s: float) -> bool:
        if self.full_now:
            raise StoreFull("no room")
        return await super().lease(name, token, value, ttl_s)


def test_who_could_not_renew_its_own_lease_takes_no_lapse_of_another_for_a_death():
    async def main() -> list[tuple[str, ...]]:
        store, directory, left, seen = FullStore(), Directory(), [], []

        async def changed(joined: set[str], gone: set[str]) -> None:
            left.extend(gone)

        registry = Registry(store, directory, changed)
        mine, other = record("trainer-1", 1), record("engine-1", 2)
        await registry.publish(mine)
        await registry.publish(other)
        await registry.relist()
        store.full_now = True
        with pytest.raises(StoreFull):
            await registry.publish(mine)
        await asyncio.sleep(2 * LEASE_TTL_S)
        await registry.relist()
        seen.append(tuple(left))
        store.full_now = False
        await registry.publish(mine)
        await registry.relist()
        seen.append(tuple(left))
        await asyncio.sleep(LOOK_S)
        await registry.relist()
        return [*seen, tuple(left)]

    assert run_virtual(main) == [(), (), ("engine-1",)]


class CountingStore(MemoryStore):
    """Counts the listings of all records."""

    num_listed = 0

    async def leases(self, prefix: str) -> dict[str, Lease]:
        self.num_listed += 1
        return await super().leases(prefix)


def test_all_records_are_asked_for_only_where_others_hold_leases_than_the_mirror_has():
    async def main() -> tuple[list[int], list[tuple[str, ...]]]:
        store, directory, ready = CountingStore(), Directory(), []

        async def changed(joined: set[str], left: set[str]) -> None:
            ready.append(directory.ready("engine"))

        async def asked() -> int:
            before = store.num_listed
            for _ in range(3):  # so long between two looks
                await asyncio.sleep(RELIST_S / 3)
                for each in alive:
                    await registry.publish(each)
            await asyncio.sleep(0.1)
            return store.num_listed - before

        registry = Registry(store, directory, changed)
        alive = [record("engine-1", 1), record("engine-2", 2)]
        for each in alive:
            await registry.publish(each)
        await registry.sync()
        found: list[int] = []
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(registry.watch())
            found.append(await asked())
            alive.append(record("engine-3", 3))  # of which no event came
            found.append(await asked())
            alive[0] = record("engine-1", 4)
            found.append(await asked())
            del alive[1]
            found += [await asked(), await asked()]
            watching.cancel()
        return found, ready

    found, ready = run_virtual(main)

    assert found == [0, 1, 1, 1, 0]
    assert ready == [
        ("engine-1", "engine-2"),
        ("engine-1", "engine-2", "engine-3"),
        ("engine-1", "engine-2", "engine-3"),
        ("engine-1", "engine-3"),
    ]
