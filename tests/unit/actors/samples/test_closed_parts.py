"""samples.jsonl is closed in parts: line i of them all is the i-th end, whatever crashed, whoever restarted, and whoever reads meanwhile."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubato.actors.report.summary import read_run
from rubato.actors.report.transcripts.reading import Filters, find
from rubato.actors.samples import run_files as ledger_module
from rubato.actors.samples.run_files import LOST, close_part, read_lines, reopen
from rubato.runtime.launch.folder import RunFolder
from rubato.runtime.memory import MemoryStore
from tests.unit.actors.samples.test_ledger import Frozen, ledger_of, opened, tell


def ids(folder, stem="samples"):
    return [json.loads(line)["trajectory_id"] for line in read_lines(folder, stem)]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write(folder, *texts):
    with (folder / "samples.jsonl").open("a") as file:
        file.writelines(json.dumps({"trajectory_id": text}) + "\n" for text in texts)


def closed(folder):
    """Close what is there as a part, as its writer does."""
    assert close_part(folder, 1, lambda: True) is not None


class Crash(Exception):
    pass


async def followed(ledger, until):
    """Follow the ends until one of the functions named `until` was carried out."""
    reached, offload = asyncio.Event(), ledger.offload

    async def watched(fn, *args):
        result = await offload(fn, *args)
        if fn.__name__ == until:
            reached.set()
        return result

    ledger.offload = watched
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(ledger.follow())
        await reached.wait()
        following.cancel()


async def three_parts(folder):
    """The Store of a run whose ends a, b and c lie in a part each."""
    store = MemoryStore()
    ledger = ledger_of(store, folder)
    ledger.rotate_bytes = 1
    await ledger.open()
    for name in "abc":
        await tell(store, name)
        await followed(ledger, until="close_part")
    return store


async def test_a_file_that_reaches_its_size_becomes_a_part_and_lines_are_counted_on(tmp_path):
    store = MemoryStore()
    ledger = ledger_of(store, tmp_path)
    ledger.rotate_bytes = 1
    await ledger.open()

    await tell(store, "a", "b")
    await followed(ledger, until="close_part")
    await tell(store, "c")
    await followed(ledger, until="close_part")
    await tell(store, "d")
    await ledger.catch_up()

    assert names(tmp_path) == ["samples-000001.jsonl.gz", "samples-000002.jsonl.gz", "samples.jsonl", "samples.parts.json"]
    assert ids(tmp_path) == ["a", "b", "c", "d"]
    assert ledger.index == 4


async def test_without_a_size_no_part_is_closed(tmp_path):
    store = MemoryStore()
    await tell(store, "a")
    ledger = ledger_of(store, tmp_path)
    await ledger.open()

    await followed(ledger, until="write_lines")

    assert names(tmp_path) == ["samples.jsonl"]


async def test_a_restarted_buffer_leaves_closed_what_it_needs_not_and_goes_on_at_the_next_end(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_module, "COMPARED", 2)
    store = await three_parts(tmp_path)
    await tell(store, "d")

    again = await opened(store, tmp_path, token=2)

    assert names(tmp_path) == ["samples-000001.jsonl.gz", "samples.jsonl", "samples.parts.json"]
    assert (ids(tmp_path), again.index) == (["a", "b", "c", "d"], 4)


async def test_lines_of_a_part_that_the_store_lost_go_where_lost_lines_are(tmp_path):
    store = MemoryStore()
    await tell(store, *"abc")
    await opened(store, tmp_path)
    closed(tmp_path)
    store = MemoryStore()
    await tell(store, "a", "x")

    await opened(store, tmp_path, token=2)

    assert (ids(tmp_path), ids(tmp_path, LOST)) == (["a", "x"], ["b", "c"])


async def test_parts_that_an_emptied_store_never_knew_are_kept_as_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_module, "COMPARED", 1)
    await three_parts(tmp_path)

    ledger = await opened(MemoryStore(), tmp_path, token=2)

    assert (ids(tmp_path), ledger.index) == ([], 0)
    assert ids(tmp_path, LOST) == ["a", "b", "c"]


async def test_lines_are_counted_on_where_a_user_removed_an_old_part(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_module, "COMPARED", 1)
    store = await three_parts(tmp_path)
    (tmp_path / "samples-000001.jsonl.gz").unlink()
    await tell(store, "d")

    ledger = await opened(store, tmp_path, token=2)
    closed(tmp_path)

    assert (ids(tmp_path), ledger.index) == (["b", "c", "d"], 4)
    assert [name for name in names(tmp_path) if name.endswith("gz")] == ["samples-000002.jsonl.gz", "samples-000003.jsonl.gz"]


@pytest.mark.parametrize("file", ["samples.jsonl", "samples.parts.json"])
@pytest.mark.parametrize("opening", [False, True])
def test_a_crash_before_a_file_is_replaced_costs_and_doubles_no_line(tmp_path, monkeypatch, opening, file):
    write(tmp_path, "a")
    closed(tmp_path)
    write(tmp_path, "b")
    replace = Path.replace

    def crash(path, target):
        if Path(target).name == file:
            raise Crash
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", crash)
        with pytest.raises(Crash):
            reopen(tmp_path, 100, 1) if opening else close_part(tmp_path, 1, lambda: True)
    before = ids(tmp_path)
    known = reopen(tmp_path, 0, 2) + (tmp_path / "samples.jsonl").read_text().count("\n")
    write(tmp_path, "c")
    closed(tmp_path)
    write(tmp_path, "d")

    assert before == ["a", "b"]
    assert ids(tmp_path) == ["a", "b", "c", "d"]
    assert known == 2


def test_whoever_reads_while_a_part_is_closed_sees_each_line_once(tmp_path):
    write(tmp_path, "a")
    closed(tmp_path)
    write(tmp_path, "b", "c")

    reading = read_lines(tmp_path)
    first = next(reading)
    closed(tmp_path)
    write(tmp_path, "d")

    assert [json.loads(line)["trajectory_id"] for line in (first, *reading)] == ["a", "b", "c"]


async def test_a_buffer_that_was_replaced_closes_no_part_of_its_successor(tmp_path):
    store, frozen = MemoryStore(), Frozen("close_part")
    await tell(store, "a")
    old = ledger_of(store, tmp_path, frozen.offload)
    old.rotate_bytes = 1
    await old.open()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(old.follow())
        await frozen.reached.wait()
        await opened(store, tmp_path, token=2)
        frozen.thaw.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        following.cancel()

    assert (names(tmp_path), ids(tmp_path)) == (["samples.jsonl"], ["a"])


@settings(max_examples=150, deadline=None)
@given(acts=st.lists(st.sampled_from(["end", "end", "close", "restart", "crash"]), max_size=30), compared=st.integers(1, 5))
def test_line_i_is_the_ith_end_whatever_was_closed_and_restarted(tmp_path_factory, acts, compared):
    folder, store = tmp_path_factory.mktemp("run"), MemoryStore()

    async def play():
        before, ledger_module.COMPARED = ledger_module.COMPARED, compared
        try:
            ledger = await opened(store, folder)
            for number, act in enumerate(acts):
                if act == "end":
                    await tell(store, f"s{number}")
                    await ledger.catch_up()
                elif act == "close":
                    ledger.rotate_bytes = 1
                    await ledger._rotate()
                else:
                    if act == "crash" and (folder / "samples.jsonl").stat().st_size:
                        # killed between the part and the empty file that takes its place
                        text = (folder / "samples.jsonl").read_bytes()
                        closed(folder)
                        (folder / "samples.jsonl").write_bytes(text)
                    ledger = await opened(store, folder, token=number + 2)
            return ledger.index
        finally:
            ledger_module.COMPARED = before

    index = asyncio.run(play())

    assert ids(folder) == [f"s{number}" for number, act in enumerate(acts) if act == "end"]
    assert index == acts.count("end")


def test_the_report_and_the_samples_command_read_closed_parts(tmp_path):
    line = {
        "group_id": "g",
        "attempt": 1,
        "row": 0,
        "task": "",
        "fate": "failed",
        "reason": "env_error",
        "step": None,
        "version_first": None,
    }
    for name in "ab":
        with (tmp_path / "samples.jsonl").open("a") as file:
            file.write(json.dumps({"trajectory_id": name, "reward": None, "purpose": "train", "cut": False, "scores": {}} | line) + "\n")
        closed(tmp_path)
    (tmp_path / "config.yaml").write_text("run: {steps: 1}\nstaleness: {alpha: 1}\n")

    run, found = read_run(tmp_path), find(tmp_path, Filters())

    assert (run.fates, run.reasons) == ({"failed": 2}, {"env_error": 2})
    assert found.fates == {"failed": 2}


def test_a_forced_launch_takes_the_parts_of_the_run_before_away(tmp_path):
    write(tmp_path, "a")
    closed(tmp_path)
    (tmp_path / ".lock").write_text("rubato\n")
    folder = RunFolder(tmp_path)

    folder.open(resume=False, force=True)
    folder.commit()
    folder.close()

    assert not [name for name in names(tmp_path) if name.startswith("samples")]
