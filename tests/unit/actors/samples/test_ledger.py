"""samples.jsonl: line i is record i, also after a crash and on a full disk."""

import asyncio
import json

import pytest

from actors.samples.journal import Journal
from actors.samples.ledger import SampleLedger, line_of
from actors.samples.ledger_file import read_tail
from actors.samples.wake import Wake
from runtime.observe.log import logger
from runtime.store.errors import Fenced
from runtime.store.memory import MemoryStore
from runtime.store.store import Fence
from runtime.store.workset import Ended


async def inline(fn, *args):
    return fn(*args)


def ledger_of(store, folder, offload=inline, token=1):
    journal = Journal(store, Fence("x", token), logger("test"), on_outage=lambda away: None)
    return SampleLedger(folder, store.workset("samples"), journal, token, lambda: None, offload, logger("test"))


def ids(folder, name="samples.jsonl"):
    return [json.loads(line)["trajectory_id"] for line in (folder / name).read_text().splitlines()]


async def write(folder, names):
    store = MemoryStore()
    for name in names:
        await store.workset("samples").end(name, "g", "failed")
    ledger = ledger_of(store, folder)
    await ledger.open()
    await ledger.catch_up()


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


async def outlived(ledger, workset):
    """A buffer's whole life as the ledger sees it, with a last end at which it learns that it was replaced."""
    try:
        await ledger.open()
        await ledger.catch_up()
        while True:
            await asyncio.sleep(0)
            await ledger._journal.prove()
    except Fenced:
        return "fenced"


async def test_it_goes_on_at_the_next_record(tmp_path):
    store = MemoryStore()
    workset = store.workset("samples")
    for name in "ab":
        await workset.end(name, "g", "failed")
    first = ledger_of(store, tmp_path)
    await first.open()
    await first.catch_up()
    await workset.end("c", "g", "failed")

    again = ledger_of(store, tmp_path)
    await again.open()
    await again.catch_up()

    assert ids(tmp_path) == ["a", "b", "c"]


async def test_a_torn_last_line_is_written_anew(tmp_path):
    store = MemoryStore()
    for name in "ab":
        await store.workset("samples").end(name, "g", "failed")
    first = ledger_of(store, tmp_path)
    await first.open()
    await first.catch_up()
    path = tmp_path / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-7])

    again = ledger_of(store, tmp_path)
    await again.open()
    await again.catch_up()

    assert ids(tmp_path) == ["a", "b"]


async def test_lines_that_the_store_lost_go_and_are_kept_elsewhere(tmp_path):
    await write(tmp_path, "abc")
    store = MemoryStore()
    for name in "ax":
        await store.workset("samples").end(name, "g", "failed")

    ledger = ledger_of(store, tmp_path)
    await ledger.open()

    assert ledger.index == 1
    assert ids(tmp_path) == ["a"]
    assert ids(tmp_path, "samples.lost.jsonl") == ["b", "c"]


async def test_a_store_that_forgets_ends_while_the_buffer_lives_is_noticed_at_the_next_end(tmp_path):
    store = MemoryStore()
    for name in "abc":
        await store.workset("samples").end(name, "g", "failed")
    ledger = ledger_of(store, tmp_path)
    await ledger.open()
    await ledger.catch_up()

    store._worksets["samples"].__init__(lambda epoch: epoch + 1)
    for name in "axy":
        await store.workset("samples").end(name, "g", "failed")
    await ledger.catch_up()

    assert ids(tmp_path) == ["a", "x", "y"]
    assert ids(tmp_path, "samples.lost.jsonl") == ["b", "c"]


async def test_a_store_that_forgot_and_then_made_the_same_last_end_is_noticed_at_the_end(tmp_path):
    store = MemoryStore()
    for name in "abc":
        await store.workset("samples").end(name, "g", "failed")
    ledger = ledger_of(store, tmp_path)
    await ledger.open()
    await ledger.catch_up()

    store._worksets["samples"].__init__(lambda epoch: epoch + 1)
    for name in "bac":
        await store.workset("samples").end(name, "g", "failed")
    await ledger.check()

    assert ids(tmp_path) == ["b", "a", "c"]


async def test_a_disk_that_refuses_costs_nothing_once_it_takes_again(tmp_path):
    store = MemoryStore()
    refusals = [OSError("disk full")]

    async def offload(fn, *args):
        if refusals and fn.__name__ == "write_lines":
            raise refusals.pop()
        return fn(*args)

    ledger = ledger_of(store, tmp_path, offload)
    await ledger.open()
    await store.workset("samples").end("a", "g", "failed")
    with pytest.raises(OSError, match="disk full"):
        await ledger.catch_up()

    await ledger.catch_up()

    assert ids(tmp_path) == ["a"]


@pytest.mark.parametrize("last", ["b", "bc"])
@pytest.mark.parametrize("where", ["read_tail", "take_file", "write_lines"])
async def test_a_zombie_that_wakes_in_the_middle_of_its_write_leaves_one_line_per_end(tmp_path, where, last):
    """It stood still before `where`; a newer buffer took over meanwhile; it goes on, and finds out that it is fenced."""
    store, frozen = MemoryStore(), Frozen(where)
    workset = store.workset("samples")
    await workset.end("a", "g", "failed")
    zombie = ledger_of(store, tmp_path, frozen.offload, token=1)
    async with asyncio.TaskGroup() as tasks:
        dying = tasks.create_task(outlived(zombie, workset))
        await frozen.reached.wait()
        live = ledger_of(store, tmp_path, token=2)
        await Journal(store, Fence("x", 2), logger("test"), on_outage=lambda away: None).prove()
        await live.open()
        await workset.end("b", "g", "failed")
        await live.catch_up()
        frozen.thaw.set()
        await asyncio.sleep(0)
        for name in last[1:]:
            await workset.end(name, "g", "failed")
        await live.catch_up()
        await live.check()
        assert await dying == "fenced"
        await live.check()

    assert ids(tmp_path) == ["a", *last]
    assert not (tmp_path / "samples.lost.jsonl").exists()


async def test_a_kill_between_the_store_and_the_file_leaves_one_line_per_end(tmp_path):
    store, frozen = MemoryStore(), Frozen("write_lines")
    await store.workset("samples").end("a", "g", "failed")
    killed = ledger_of(store, tmp_path, frozen.offload, token=1)
    async with asyncio.TaskGroup() as tasks:
        dying = tasks.create_task(outlived(killed, store.workset("samples")))
        await frozen.reached.wait()
        dying.cancel()
    again = ledger_of(store, tmp_path, token=2)
    await again.open()
    await again.catch_up()

    assert ids(tmp_path) == ["a"]


async def test_a_killed_take_over_leaves_no_draft(tmp_path):
    (tmp_path / "samples.jsonl.7").write_text("half")
    ledger = ledger_of(MemoryStore(), tmp_path, token=8)
    await ledger.open()

    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


async def test_a_file_that_somebody_deleted_is_written_anew(tmp_path):
    store = MemoryStore()
    await store.workset("samples").end("a", "g", "failed")
    ledger = ledger_of(store, tmp_path)
    await ledger.open()
    await ledger.catch_up()
    (tmp_path / "samples.jsonl").unlink()
    await store.workset("samples").end("b", "g", "failed")
    await ledger.catch_up()

    assert ids(tmp_path) == ["a", "b"]


async def test_it_follows_what_ends(tmp_path):
    store, ended = MemoryStore(), Wake()
    written = asyncio.Event()

    async def offload(fn, *args):
        result = fn(*args)
        if fn.__name__ == "write_lines":
            written.set()
        return result

    ledger = ledger_of(store, tmp_path, offload)
    await ledger.open()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(ledger.follow(ended))
        await asyncio.sleep(0)
        await store.workset("samples").end("a", "g", "failed")
        ended.set()
        await written.wait()
        following.cancel()

    assert ids(tmp_path) == ["a"]


def test_a_missing_file_has_no_lines(tmp_path):
    assert read_tail(tmp_path / "samples.jsonl", 10).num == 0


def test_a_record_without_a_note_still_makes_a_line():
    line = line_of(Ended(1, "a", "g", "failed", 0, 0, b""))

    assert (line.trajectory_id, line.fate, line.step, line.age) == ("a", "failed", None, None)
