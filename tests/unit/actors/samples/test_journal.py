"""The journal alone: one write at a time for all who wait, and what it keeps for a Store that may forget."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from rubato.actors.samples.group import GroupLimits, SampleEnd
from rubato.actors.samples.groups import Groups
from rubato.actors.samples.journal import ENDS, GROUP, PAYLOAD, Journal, read_records
from rubato.actors.samples.sample import Outcome
from rubato.runtime.memory import MemoryStore
from rubato.runtime.observe.figures import Metrics
from rubato.runtime.observe.log import logger
from rubato.runtime.store.store import Fence, Fenced, Forgotten, StoreUnavailable

LIMITS = GroupLimits(group_size=2, batch_groups=2, steps=100, run_seed=1, max_attempts=3, unbounded_batches=8, ticket_ttl_s=30.0)


class Writes:
    """A Store that notes each write, and raises what `refusals` holds before one takes effect."""

    def __init__(self, store):
        self.store, self.made, self.refusals = store, [], []

    def __getattr__(self, name):
        return getattr(self.store, name)

    async def write(self, changes, **options):
        self.made.append((dict(changes), options))
        await asyncio.sleep(0)
        if self.refusals:
            raise self.refusals.pop(0)
        await self.store.write(changes, **options)


class Bench:
    """Groups and their journal on a store."""

    def __init__(self, store, *, token=1, window_s=0.0, most_bytes=1 << 20):
        self.groups, self.backs = Groups(LIMITS, 1), []
        self.journal = Journal(
            store,
            Fence("x", token),
            self.groups,
            window_s=window_s,
            most_bytes=most_bytes,
            metrics=Metrics(),
            log=logger("test"),
            store_back=lambda: self.backs.append(self.journal.is_healthy),
        )

    async def put(self, payload, ticket=None):
        """Score one rollout, as a put does."""
        (ticket,) = [ticket] if ticket else self.groups.issue(1, "env_manager-1", 1, 0.0)
        await self.journal.room(len(payload))
        self.groups.score(ticket.trajectory_id, Outcome(0, 1.0), payload)
        await self.journal.sync()
        return ticket.trajectory_id

    async def fail(self):
        (ticket,) = self.groups.issue(1, "env_manager-1", 1, 0.0)
        self.groups.fail(ticket.trajectory_id, "failed", "env_timeout")
        await self.journal.sync()
        return ticket.trajectory_id


@pytest.fixture
def store():
    return MemoryStore()


async def play(bench, scene):
    """`scene` beside the journal's own task."""
    async with asyncio.TaskGroup() as bench.tasks:
        running = bench.tasks.create_task(bench.journal.run())
        try:
            await scene()
        finally:
            running.cancel()


async def test_those_who_sync_at_the_same_time_share_a_write(store):
    writes = Writes(store)
    bench = Bench(writes)
    await bench.journal.take_over()

    async def scene():
        names = await asyncio.gather(*(bench.put(b"%d" % n) for n in range(8)))
        assert len(writes.made) == 1 + 1
        assert await store.fetch([PAYLOAD + name for name in names]) == [b"%d" % n for n in range(8)]
        await bench.journal.sync()
        assert [options["turn"].number for _, options in writes.made] == [1, 2, 3]
        assert writes.made[-1][0] == {}  # nothing changed, but it is known that nobody took over

    await play(bench, scene)


async def test_a_change_is_not_answered_before_its_write(store):
    writes = Writes(store)
    bench = Bench(writes)
    await bench.journal.take_over()

    async def scene():
        (ticket,) = bench.groups.issue(1, "env_manager-1", 1, 0.0)
        syncing = bench.tasks.create_task(bench.journal.sync())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        bench.groups.score(ticket.trajectory_id, Outcome(0, 1.0), b"late")  # the write of the ticket is on its way
        second = bench.tasks.create_task(bench.journal.sync())
        await syncing
        assert not second.done()
        assert await store.scan(PAYLOAD) == {}
        await second
        assert list((await store.scan(PAYLOAD)).values()) == [b"late"]

    await play(bench, scene)


async def test_a_poke_writes_although_nobody_waits(store):
    writes = Writes(store)
    bench = Bench(writes)
    await bench.journal.take_over()

    async def scene():
        bench.groups.issue(1, "env_manager-1", 1, 0.0)
        bench.journal.poke()
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(await store.scan(GROUP)) == 1

    await play(bench, scene)


async def test_an_asker_that_gave_up_harms_nobody_who_waits_with_it(store):
    bench = Bench(Writes(store))
    await bench.journal.take_over()

    async def scene():
        syncs = [bench.tasks.create_task(bench.put(b"%d" % n)) for n in range(3)]
        await asyncio.sleep(0)
        syncs[1].cancel()
        await asyncio.gather(syncs[0], syncs[2])
        assert len(await store.scan(PAYLOAD)) == 3

    await play(bench, scene)


async def test_a_write_outlasts_an_outage_and_a_fenced_one_does_not(store):
    writes = Writes(store)
    bench = Bench(writes)
    await bench.journal.take_over()

    async def scene():
        writes.refusals.append(StoreUnavailable("away"))
        await bench.put(b"1")
        await store.write({}, fence=Fence("x", 2))
        await bench.put(b"2")

    with pytest.raises(ExceptionGroup) as raised:
        await play(bench, scene)

    assert raised.group_contains(Fenced)
    assert bench.backs == [True]
    assert list((await store.scan(PAYLOAD)).values()) == [b"1"]


async def test_the_store_is_back_also_where_it_refuses(store):
    """The only call that is retried during an outage is one that the Store then refuses."""
    bench = Bench(store)
    answers = [StoreUnavailable("away"), ValueError("no")]

    async def call():
        raise answers.pop(0)

    with pytest.raises(ValueError, match="no"):
        await bench.journal.retried(call)

    assert bench.backs == [True]
    assert bench.journal.is_healthy


async def test_whoever_takes_over_shuts_the_one_before_out_and_reads_what_it_left(store):
    old = Bench(store, token=1)
    await old.journal.take_over()
    left = []

    async def scene():
        left.append(await old.put(b"1"))
        left.append(await old.fail())

    await play(old, scene)
    new = Bench(store, token=2)

    training, groups = await new.journal.take_over()

    assert groups == []  # a single score: it is over
    assert (training.cursor, training.ended) == (1, 2)
    assert [end.trajectory_id for _, end in await new.journal.ends(0)] == left[::-1]
    with pytest.raises(Fenced):
        await old.journal.take_over()


async def test_a_store_that_forgets_while_it_is_taken_over_is_taken_over_again(store, remember):
    """Else the buffer before would write on, and be overwritten by the next one, which had read what was there before."""
    old, forgets = Bench(store, token=1), []
    await old.journal.take_over()

    class Forgets(Writes):
        async def scan(self, prefix):
            if forgets:
                forgets.pop()()
            return await self.store.scan(prefix)

    async def scene():
        await old.put(b"1")
        forgets.append(remember(store))
        await old.put(b"2")
        new = Bench(Forgets(store), token=2, window_s=60.0)

        _, groups = await new.journal.take_over()

        assert [options["turn"].number for _, options in new.journal.store.made] == [1, 2]
        assert [member.state for group in groups for member in group.members] == ["scored", "pending"]
        assert list(new.journal._kept.values()) == [b"1"]
        await old.put(b"3")

    with pytest.raises(ExceptionGroup) as raised:
        await play(old, scene)

    assert raised.group_contains(Fenced)
    assert list((await store.scan(PAYLOAD)).values()) == [b"1"]


async def test_a_take_over_that_is_tried_again_has_another_number(store):
    """By its number the next buffer sees whether this one wrote after it was forgotten."""
    writes = Writes(store)
    writes.refusals.append(Forgotten("x"))

    await Bench(writes).journal.take_over()

    assert [options["turn"].number for _, options in writes.made] == [1, 2]


async def test_ends_are_numbered_in_the_order_in_which_they_were_told(store):
    bench = Bench(store)
    bench.groups.limits = replace(LIMITS, group_size=9)  # none is hopeless by that
    await bench.journal.take_over()

    async def scene():
        names = [await bench.fail() for _ in range(5)]
        found = await bench.journal.ends(0)
        assert [index for index, _ in found] == [1, 2, 3, 4, 5]
        assert [end.trajectory_id for _, end in found] == names
        assert (await read_records(store))[0].ended == 5
        assert await bench.journal.ends(5) == []

    await play(bench, scene)


async def test_the_metrics_count_ends_once_they_are_durable(store):
    writes = Writes(store)
    bench = Bench(writes)
    await bench.journal.take_over()

    async def scene():
        counted = bench.journal.metrics
        ended = bench.journal.ended.event
        await bench.fail()
        assert counted.snapshot()["samples/failed"] == 1
        assert ended.is_set()

    await play(bench, scene)


# -- what is kept for a Store that may forget ----------------------------------------------------------------------


def test_a_put_waits_while_as_much_is_kept_as_may_be(stage):
    """The loop's time jumps: a minute passes at once."""

    async def scene():
        loop = asyncio.get_running_loop()
        bench = Bench(stage.store, window_s=60.0, most_bytes=100)
        await bench.journal.take_over()
        running = stage.tasks.create_task(bench.journal.run())
        began = loop.time()
        took = []
        for size in (60, 40, 50, 50, 10):
            await bench.put(b"x" * size)
            took.append(loop.time() - began)
            await asyncio.sleep(1.0)
        running.cancel()

        assert took == [0.0, 1.0, 60.0, 61.0, 120.0]

    stage.run(scene)


def test_without_a_window_nothing_is_kept_and_nobody_waits(stage):
    async def scene():
        loop = asyncio.get_running_loop()
        bench = Bench(stage.store, window_s=0.0, most_bytes=100)
        await bench.journal.take_over()
        running = stage.tasks.create_task(bench.journal.run())
        for _ in range(4):
            await bench.put(b"x" * 90)
        running.cancel()

        assert loop.time() == 0.0
        assert bench.journal._kept == {}

    stage.run(scene)


def test_what_ended_makes_room(stage):
    async def scene():
        loop = asyncio.get_running_loop()
        bench = Bench(stage.store, window_s=60.0, most_bytes=100)
        await bench.journal.take_over()
        running = stage.tasks.create_task(bench.journal.run())
        await bench.put(b"x" * 90)
        await bench.fail()  # its group is too small now
        await bench.put(b"x" * 90)
        running.cancel()

        assert loop.time() == 0.0

    stage.run(scene)


def test_memory_is_bounded_by_the_window(stage):
    """Payloads and ends that the Store can't forget any more are let go of."""

    async def scene():
        bench = Bench(stage.store, window_s=10.0)
        await bench.journal.take_over()
        running = stage.tasks.create_task(bench.journal.run())
        kept = []
        for _ in range(6):
            await bench.put(b"x" * 10)
            await bench.put(b"x" * 10)
            for group in [*bench.groups.ready()]:
                bench.groups._end(group, group.discard("stale"))
            await bench.put(b"x" * 10)
            await bench.fail()
            await asyncio.sleep(6.0)
            kept.append((bench.journal._kept_bytes, len(bench.journal._ends)))
        running.cancel()

        assert max(kept) == kept[-1]
        assert kept[-1][1] <= 2 * 4
        assert kept[-1][0] == 0

    stage.run(scene)


@pytest.mark.parametrize("passed", [0.0, 30.0, 59.0, 1000.0])
def test_everything_kept_is_said_anew_after_a_loss_whenever_it_shows(stage, remember, passed):
    async def scene():
        bench = Bench(stage.store, window_s=60.0)
        await bench.journal.take_over()
        running = stage.tasks.create_task(bench.journal.run())
        forget = remember(stage.store)
        names = [await bench.put(b"%d" % n) for n in range(3)]
        failed = [await bench.fail()]
        forget()
        await asyncio.sleep(passed)
        names.append(await bench.put(b"3"))
        running.cancel()

        gone = [PAYLOAD + names[2]]  # its group was too small
        assert await stage.store.fetch([PAYLOAD + name for name in names]) == [b"0", b"1", None, b"3"]
        assert await stage.store.fetch(gone) == [None]
        ends = [msgspec.msgpack.decode(value, type=SampleEnd) for _, value in await stage.store.read(ENDS, 0)]
        assert [end.trajectory_id for end in ends] == [*failed, names[2]]

    stage.run(scene)
