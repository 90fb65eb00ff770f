"""Rows and checkpoints between a rank and a trainer on another host."""

import asyncio
import socket
from collections import Counter

import pytest

from rubato.actors.checkpoints.checkpoint import CheckpointError
from rubato.actors.messages.ranks import RowsPart
from rubato.actors.ranks import far, meeting
from rubato.actors.ranks.copies import CheckpointCopy, CopiedRows
from rubato.bus.message import Buffer


@pytest.fixture
def rows():
    """Of two files, 3, 0 and 5 bytes of one and 2 of the other."""
    return CopiedRows.of(
        {"a": [(10, memoryview(b"abc")), (20, memoryview(b"")), (30, memoryview(b"defgh"))], "b": [(0, memoryview(b"xy"))]}
    )


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4, 7, 10, 100])
def test_rows_that_are_read_in_parts_of_any_size_come_to_their_places(rows, num_bytes, tmp_path):
    sizes = {"a": 35, "b": 2}

    handles = far.open_files(tmp_path, sizes)
    for begin in range(0, rows.num_bytes, num_bytes):
        places, data = rows.part(begin, num_bytes)
        assert len(data) == min(num_bytes, rows.num_bytes - begin) == sum(num for *_, num in places)
        far.write_into(handles)(RowsPart(places, Buffer(data)))
    far.close_files(handles)

    assert rows.num_bytes == 10
    assert (tmp_path / "a").read_bytes() == bytes(10) + b"abc" + bytes(17) + b"defgh"
    assert (tmp_path / "b").read_bytes() == b"xy"


async def test_of_each_rank_on_another_host_no_more_than_two_parts_are_under_way_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(far, "PART_BYTES", 4)
    values = {name: bytes(range(at, at + 30)) for at, name in enumerate(("rank-2", "rank-3"))}
    rows = {name: CopiedRows.of({name: [(0, memoryview(of))]}) for name, of in values.items()}
    under_way, most = Counter(), Counter()

    async def ask(name, request):
        under_way[name] += 1
        most[name] = max(most[name], under_way[name])
        await asyncio.sleep(0)
        places, data = rows[name].part(request.begin, request.num_bytes)
        return RowsPart(places, Buffer(data))

    async def offload(put, part):
        await asyncio.sleep(0)
        put(part)
        under_way[part.places[0][0]] -= 1

    handles = far.open_files(tmp_path, dict.fromkeys(values, 30))
    await far.read_rows(ask, offload, 1, "checkpoint", dict.fromkeys(values, 30), far.write_into(handles))
    far.close_files(handles)

    assert {name: (tmp_path / name).read_bytes() for name in values} == values
    assert most == dict.fromkeys(values, 2)


def test_rows_of_weights_come_to_their_places_in_the_image():
    rows = CopiedRows.of({"": [(1, memoryview(b"ab")), (5, memoryview(b"c"))]})
    image = memoryview(bytearray(6))

    for begin in range(rows.num_bytes):
        places, data = rows.part(begin, 1)
        far.put_into(image)(RowsPart(places, Buffer(data)))

    assert bytes(image) == b"\0ab\0\0c"


def test_a_rank_without_rows_has_none_to_read():
    assert CopiedRows.of({"a": []}).num_bytes == 0


def test_a_copy_of_a_checkpoint_is_whole_once_its_manifest_is_there_and_replaces_older_ones(tmp_path):
    old, new = (CheckpointCopy(tmp_path, f"/elsewhere/checkpoints/step_{step}") for step in (1, 2))
    for copy in (old, new):
        assert copy.found(b"manifest") == ""
        copy.put("part/model.safetensors", 4, memoryview(b"late"))
        copy.put("part/model.safetensors", 0, memoryview(b"soon"))
        assert copy.found(b"manifest") == ""
        copy.put("part/model.safetensors", 0, memoryview(b"soonlate"))
        copy.put("manifest.json", 0, memoryview(b"manifest"))

    found = new.found(b"manifest")

    assert found == str(tmp_path / "ranks" / "step_2")
    assert (tmp_path / "ranks" / "step_2" / "part" / "model.safetensors").read_bytes() == b"soonlate"
    assert [path.name for path in (tmp_path / "ranks").iterdir()] == ["step_2"]
    assert new.found(b"another") == ""


def test_a_checkpoint_that_the_host_sees_is_read_where_it_lies(tmp_path):
    there = tmp_path / "checkpoints" / "step_3"
    there.mkdir(parents=True)
    (there / "manifest.json").write_bytes(b"manifest")

    assert CheckpointCopy(tmp_path / "run", str(there)).found(b"manifest") == str(there)


@pytest.mark.parametrize("name", ["../step_2/x", "/etc/x", "a/../../x"])
def test_a_file_that_leads_out_of_the_copy_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="is no file of a checkpoint"):
        CheckpointCopy(tmp_path, "/elsewhere/step_1").put(name, 0, memoryview(b"x"))


def test_ranks_of_one_host_meet_by_a_file_and_others_at_the_first_ones_port(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    listener, store = meeting.listen("127.0.0.1")
    with listener:
        other = meeting.Meeting.at(store, address="127.0.0.1")
        with socket.create_connection((other.place, other.port)) as came:
            assert came.getpeername() == listener.getsockname()

    assert meeting.Meeting.at("/run/ranks/term_3").port == 0
    assert (meeting.interface_of("127.0.0.1"), meeting.interface_of("203.0.113.9")) == ("lo", None)
