"""samples.jsonl: line i is the i-th end, also after a crash and on a full disk."""

import asyncio
import json

import msgspec
import pytest

from rubato.actors.samples import run_files as ledger_module
from rubato.actors.samples.group import NOTHING, GroupLimits, SampleEnd
from rubato.actors.samples.groups import Groups
from rubato.actors.samples.journal import ENDS, Journal
from rubato.actors.samples.run_files import SampleLedger, line_of, read_tail
from rubato.actors.samples.sample import Outcome
from rubato.runtime.memory import MemoryStore
from rubato.runtime.observe.figures import Metrics
from rubato.runtime.observe.log import logger
from rubato.runtime.store.store import Append, Fence, Fenced


async def inline(fn, *args):
    return fn(*args)


def journal_of(store, token=1):
    limits = GroupLimits(2, 2, 100, 1, 3, 8, 30.0)
    return Journal(
        store,
        Fence("x", token),
        Groups(limits, 1),
        window_s=0.0,
        most_bytes=1 << 20,
        metrics=Metrics(),
        log=logger("test"),
        store_back=lambda: None,
    )


def ledger_of(store, folder, offload=inline, token=1, journal=None):
    journal = journal or journal_of(store, token)
    journal.groups.training = Told(store)
    return SampleLedger(folder, journal, token, offload, logger("test"))


class Told:
    """`Training.ended` as the Store has it."""

    def __init__(self, store):
        self.store = store

    @property
    def ended(self):
        stream = self.store._streams.get(ENDS)
        return stream.last if stream else 0


def end_of(name, fate="failed"):
    return SampleEnd(name, "g", 1, 0, fate, 0, 0, NOTHING, "why")


async def tell(store, *names):
    """Ends that the Store has from now on."""
    for name in names:
        await store.append(ENDS, msgspec.msgpack.encode(end_of(name)))


async def tell_anew(store, names):
    """The Store has these ends and no others."""
    entries = [msgspec.msgpack.encode(end_of(name)) for name in names]
    await store.write({}, append=Append(ENDS, 1, entries))


def ids(folder, name="samples.jsonl"):
    return [json.loads(line)["trajectory_id"] for line in (folder / name).read_text().splitlines()]


async def opened(store, folder, **options):
    ledger = ledger_of(store, folder, **options)
    await ledger.open()
    await ledger.catch_up()
    return ledger


class Frozen:
    """Stands still before `where`, until it is thawed."""

    def __init__(self, where):
        self.where = where
        self.reached, self.thaw = asyncio.Event(), asyncio.Event()

    async def offload(self, fn, *args):
        if fn.__name__ == self.where:
            self.reached.set()
            await self.thaw.wait()
        return fn(*args)


async def outlived(store, folder, offload):
    """A buffer's whole life as the ledger sees it, until it learns that it was replaced."""
    journal = journal_of(store, 1)
    try:
        async with asyncio.TaskGroup() as tasks:
            await journal.take_over()
            tasks.create_task(journal.run())
            ledger = ledger_of(store, folder, offload, token=1, journal=journal)
            await ledger.open()
            await ledger.catch_up()
            while True:
                await asyncio.sleep(0)
                await journal.sync()
    except* Fenced:
        pass
    return "fenced"


async def test_it_goes_on_at_the_next_end(tmp_path):
    store = MemoryStore()
    await tell(store, "a", "b")
    await opened(store, tmp_path)
    await tell(store, "c")

    again = await opened(store, tmp_path, token=2)

    assert ids(tmp_path) == ["a", "b", "c"]
    assert again.index == 3


async def test_a_torn_last_line_is_written_anew(tmp_path):
    store = MemoryStore()
    await tell(store, "a", "b")
    await opened(store, tmp_path)
    path = tmp_path / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-7])

    await opened(store, tmp_path, token=2)

    assert ids(tmp_path) == ["a", "b"]


async def test_lines_that_the_store_lost_go_and_are_kept_elsewhere(tmp_path):
    store = MemoryStore()
    await tell(store, *"abc")
    await opened(store, tmp_path)
    store = MemoryStore()
    await tell(store, "a", "x")

    ledger = ledger_of(store, tmp_path)
    await ledger.open()

    assert ledger.index == 1
    assert ids(tmp_path) == ["a"]
    assert ids(tmp_path, "samples.lost.jsonl") == ["b", "c"]


@pytest.mark.parametrize(("field", "key"), [("fate", "fate"), ("attempt", "attempt"), ("step", "step"), ("term", "epoch")])
async def test_a_line_about_another_end_of_the_same_sample_is_no_line_of_it(tmp_path, field, key):
    store, other = MemoryStore(), {"fate": "trained", "attempt": 2, "step": 3, "term": 4}
    trained = msgspec.structs.replace(end_of("a"), fate="zero_spread", step=1, term=1)
    await store.append(ENDS, msgspec.msgpack.encode(trained))
    await opened(store, tmp_path)
    store = MemoryStore()
    changed = msgspec.structs.replace(trained, **{field: other[field]})
    await store.append(ENDS, msgspec.msgpack.encode(changed))

    await opened(store, tmp_path, token=2)

    (line,) = [json.loads(text) for text in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert line[key] == other[field]
    assert ids(tmp_path, "samples.lost.jsonl") == ["a"]


async def test_a_store_that_forgets_ends_which_are_written_anew_costs_no_line(tmp_path):
    store = MemoryStore()
    await tell(store, *"abc")
    ledger = await opened(store, tmp_path)

    await tell_anew(store, "a")
    await ledger.catch_up()
    await tell_anew(store, "abcd")
    await ledger.catch_up()
    await ledger.check()

    assert ids(tmp_path) == ["a", "b", "c", "d"]
    assert not (tmp_path / "samples.lost.jsonl").exists()


async def test_a_disk_that_refuses_costs_nothing_once_it_takes_again(tmp_path):
    store = MemoryStore()
    refusals = [OSError("disk full")]

    async def offload(fn, *args):
        if refusals and fn.__name__ == "write_lines":
            raise refusals.pop()
        return fn(*args)

    ledger = ledger_of(store, tmp_path, offload)
    await ledger.open()
    await tell(store, "a")
    with pytest.raises(OSError, match="disk full"):
        await ledger.catch_up()

    await ledger.catch_up()

    assert ids(tmp_path) == ["a"]


@pytest.mark.parametrize("last", ["b", "bc"])
@pytest.mark.parametrize("where", ["read_tail", "take_file", "write_lines"])
async def test_a_zombie_that_wakes_in_the_middle_of_its_write_leaves_one_line_per_end(tmp_path, where, last):
    """It stood still before `where`; a newer buffer took over meanwhile; it goes on, and finds out that it is fenced."""
    store, frozen = MemoryStore(), Frozen(where)
    await tell(store, "a")
    async with asyncio.TaskGroup() as tasks:
        dying = tasks.create_task(outlived(store, tmp_path, frozen.offload))
        await frozen.reached.wait()
        journal = journal_of(store, 2)
        await journal.take_over()
        running = tasks.create_task(journal.run())
        live = ledger_of(store, tmp_path, token=2, journal=journal)
        await live.open()
        await tell(store, "b")
        await live.catch_up()
        frozen.thaw.set()
        await asyncio.sleep(0)
        await tell(store, *last[1:])
        await live.catch_up()
        await live.check()
        assert await dying == "fenced"
        await live.check()
        running.cancel()

    assert ids(tmp_path) == ["a", *last]
    assert not (tmp_path / "samples.lost.jsonl").exists()


async def test_a_kill_between_the_store_and_the_file_leaves_one_line_per_end(tmp_path):
    store, frozen = MemoryStore(), Frozen("write_lines")
    await tell(store, "a")
    async with asyncio.TaskGroup() as tasks:
        dying = tasks.create_task(outlived(store, tmp_path, frozen.offload))
        await frozen.reached.wait()
        dying.cancel()
    await opened(store, tmp_path, token=2)

    assert ids(tmp_path) == ["a"]


async def test_a_killed_take_over_leaves_no_draft(tmp_path):
    (tmp_path / "samples.jsonl.7").write_text("half")
    ledger = ledger_of(MemoryStore(), tmp_path, token=8)
    await ledger.open()

    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


async def test_a_file_that_somebody_deleted_is_written_anew(tmp_path):
    store = MemoryStore()
    await tell(store, "a")
    journal = journal_of(store)
    await journal.take_over()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(journal.run())
        ledger = await opened(store, tmp_path, journal=journal)
        (tmp_path / "samples.jsonl").unlink()
        await tell(store, "b")
        await ledger.catch_up()
        running.cancel()

    assert ids(tmp_path) == ["a", "b"]


async def test_it_follows_what_ends(tmp_path):
    store, written = MemoryStore(), asyncio.Event()

    async def offload(fn, *args):
        result = fn(*args)
        if fn.__name__ == "write_lines":
            written.set()
        return result

    journal = journal_of(store)
    ledger = ledger_of(store, tmp_path, offload, journal=journal)
    await ledger.open()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(ledger.follow())
        await asyncio.sleep(0)
        await tell(store, "a")
        journal.ended.set()
        await written.wait()
        following.cancel()

    assert ids(tmp_path) == ["a"]


async def test_more_ends_than_one_read_gives_are_all_written(tmp_path):
    store = MemoryStore()
    names = [f"g{n:08d}.0" for n in range(2500)]
    await tell_anew(store, names)

    ledger = await opened(store, tmp_path)
    await opened(store, tmp_path, token=2)

    assert ids(tmp_path) == names
    assert ledger.index == 2500


async def test_lines_older_than_what_the_store_still_has_are_taken_on_trust(tmp_path):
    store = MemoryStore()
    await tell(store, *"abcd")
    await opened(store, tmp_path)
    await store.write({}, append=Append(ENDS, 5, [msgspec.msgpack.encode(end_of("e"))], forget=3))

    await opened(store, tmp_path, token=2)

    assert ids(tmp_path) == ["a", "b", "c", "d", "e"]
    assert not (tmp_path / "samples.lost.jsonl").exists()


async def test_the_files_of_samples_that_are_written_go(tmp_path):
    store = MemoryStore()
    (tmp_path / "samples").mkdir()
    for name in ("g1.0.1", "g1.0.2", "g1.1.1"):
        (tmp_path / "samples" / name).write_bytes(b"")
    await tell(store, "g1.0")

    await opened(store, tmp_path)

    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["g1.1.1"]


def test_a_missing_file_has_no_lines(tmp_path):
    assert read_tail(tmp_path / "samples.jsonl", 10)[0] == 0


def test_an_end_without_a_trajectory_still_makes_a_line():
    line = line_of(end_of("a"))

    assert (line["trajectory_id"], line["fate"], line["step"], line["epoch"]) == ("a", "failed", None, None)
    assert (line["version_first"], line["version_from"], line["age"], line["reward"]) == (None, None, None, None)


def test_the_age_of_a_trained_sample_counts_to_the_version_that_its_step_started_from():
    end = msgspec.structs.replace(end_of("a", "trained"), step=9, term=2, outcome=Outcome(6, 0.0))

    line = line_of(end)

    assert (line["step"], line["version_from"], line["version_first"], line["age"]) == (9, 8, 6, 2)


def test_a_sample_that_came_but_was_not_trained_has_a_version_and_no_age():
    line = line_of(msgspec.structs.replace(end_of("a", "stale"), outcome=Outcome(6, 0.5)))

    assert (line["version_first"], line["reward"], line["step"], line["age"]) == (6, 0.5, None, None)


def test_what_is_compared_reaches_beyond_what_the_store_keeps():
    assert ledger_module.COMPARED > ledger_module.ENDS_KEPT
