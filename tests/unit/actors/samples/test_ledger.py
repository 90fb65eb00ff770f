"""samples.jsonl: line i is record i, also after a crash and on a full disk."""

import asyncio
import json

import pytest

from actors.samples.journal import Journal
from actors.samples.ledger import Ledger, keep_lines, line_of
from actors.samples.wake import Wake
from runtime.observe.log import logger
from runtime.store.memory import MemoryStore
from runtime.store.store import Fence
from runtime.store.workset import Ended


async def inline(fn, *args):
    return fn(*args)


def ledger_of(store, folder, offload=inline):
    journal = Journal(store, Fence("x", 1), logger("test"), on_outage=lambda away: None)
    return Ledger(folder, store.workset("samples"), journal, offload, logger("test"))


def ids(folder):
    return [json.loads(line)["trajectory_id"] for line in (folder / "samples.jsonl").read_text().splitlines()]


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


async def test_lines_that_the_store_lost_go(tmp_path):
    (tmp_path / "samples.jsonl").write_text('{"trajectory_id": "a"}\n{"trajectory_id": "b"}\n')
    store = MemoryStore()
    await store.workset("samples").end("a", "g", "failed")

    ledger = ledger_of(store, tmp_path)
    await ledger.open()

    assert ledger.index == 1
    assert ids(tmp_path) == ["a"]


async def test_a_disk_that_refuses_costs_nothing_once_it_takes_again(tmp_path):
    store = MemoryStore()
    refusals = [OSError("disk full")]

    async def offload(fn, *args):
        if refusals:
            raise refusals.pop()
        return fn(*args)

    ledger = ledger_of(store, tmp_path, offload)
    await ledger.open()
    await store.workset("samples").end("a", "g", "failed")
    with pytest.raises(OSError, match="disk full"):
        await ledger.catch_up()

    await ledger.catch_up()

    assert ids(tmp_path) == ["a"]


async def test_it_follows_what_ends(tmp_path):
    store, ended = MemoryStore(), Wake()
    written = asyncio.Event()

    async def offload(fn, *args):
        fn(*args)
        written.set()

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
    assert keep_lines(tmp_path / "samples.jsonl", 10) == 0


def test_a_record_without_a_note_still_makes_a_line():
    line = line_of(Ended(1, "a", "g", "failed", 0, 0, b""))

    assert (line.trajectory_id, line.fate, line.step, line.age) == ("a", "failed", None, None)
