import asyncio
import fcntl
import json
import os
import subprocess
import sys
from contextlib import contextmanager

import msgspec
import pytest

from rubato.runtime import cli
from rubato.runtime.launch.card import RunCard
from rubato.runtime.memory import MemoryStore
from rubato.runtime.monitor.source import RunSource
from rubato.runtime.observe.trace import wall_s
from rubato.runtime.store.store import StoreUnavailable


class LoopStore(MemoryStore):
    """A MemoryStore with one actor in it, leased on whichever loop asks."""

    def __init__(self, record) -> None:
        super().__init__()
        self._record = record

    async def leases(self, prefix):
        await self.lease(f"actor/{self._record.name}", 1, msgspec.msgpack.encode(self._record), 10.0)
        return await super().leases(prefix)


class DeadStore(MemoryStore):
    async def leases(self, prefix):
        raise StoreUnavailable("redis is away")


def main(argv):
    return cli.main(["monitor", *argv])


@pytest.fixture
def opens(monkeypatch):
    """Has the monitor see the store that the test makes."""

    def use(make):
        monkeypatch.setattr("rubato.runtime.monitor.source.RedisStore", lambda url, run_id, patience_s: make())

    return use


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "a-run"
    folder.mkdir()
    (folder / "config.yaml").write_text("run: {steps: 3}\nstaleness: {alpha: 0}\n")
    (folder / "metrics.jsonl").write_text('{"step": 2, "reward/mean": 0.5, "time/wall_s": 7.0}\n')
    write_card(folder, sockets=tmp_path, pid=os.getpid())
    return folder


def write_card(folder, *, sockets, pid):
    (folder / "run.json").write_bytes(msgspec.json.encode(RunCard("a-run-1", str(sockets), "mem://", pid, 0.0)))


def test_json_is_one_object_about_the_live_run(run_folder, make_record, opens, capsys):
    opens(lambda: LoopStore(make_record("engine-1")))
    code = main([str(run_folder), "--json"])

    told = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (told["run"], told["state"], told["step"], told["alpha"]) == ("a-run", "running", 2, 0)
    assert [actor["name"] for actor in told["actors"]] == ["engine-1"]


@pytest.mark.parametrize(("form", "expected"), [("--once", "run ended"), ("--why", "has ended")])
def test_a_run_that_ended_is_told_from_its_folder(run_folder, tmp_path, capsys, form, expected):
    write_card(run_folder, sockets=tmp_path / "gone", pid=os.getpid())

    code = main([str(run_folder), form])

    assert code == 0
    assert expected in capsys.readouterr().out


def test_json_of_a_run_that_ended_says_so(run_folder, capsys):
    (run_folder / "run.json").unlink()

    main([str(run_folder), "--json"])

    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["step"], told["actors"], told["elapsed_s"]) == ("ended", 2, [], 7.0)


def test_a_store_that_does_not_answer_is_a_state_and_no_error(run_folder, opens, capsys):
    opens(DeadStore)
    code = main([str(run_folder), "--json"])

    assert code == 0
    assert json.loads(capsys.readouterr().out)["state"] == "unreachable"


def test_why_names_the_store_that_does_not_answer_since_when_and_what_to_do(run_folder, tmp_path, opens, capsys):
    with stopped_listener(tmp_path / "redis.sock") as pid:
        url = f"unix://{tmp_path}/redis.sock?username=rubato&password=secret"
        card = RunCard("a-run-1", str(tmp_path), url, os.getpid(), 0.0)
        (run_folder / "run.json").write_bytes(msgspec.json.encode(card))
        (run_folder / "state" / "appendonlydir").mkdir(parents=True)
        log = run_folder / "state" / "appendonlydir" / "appendonly.aof.1.incr.aof"
        log.touch()
        os.utime(log, (wall_s() - 7200, wall_s() - 7200))

        for form in ("--why", "--once"):
            opens(DeadStore)
            code = main([str(run_folder), form])
            told = " ".join(capsys.readouterr().out.split())

            assert code == 0
            assert "does not answer for 120 min" in told
            assert form == "--once" or f"a-run: the Store at unix://{tmp_path}/redis.sock does not answer" in told
            assert f"Its process {pid} is stopped; continue it with: kill -CONT {pid}" in told
            assert "secret" not in told
            assert "nothing waits" not in told


@contextmanager
def stopped_listener(path):
    """A process that listens at `path` and is stopped: it accepts connections and answers nothing."""
    code = (
        f"import os,signal,socket; s=socket.socket(socket.AF_UNIX); s.bind({str(path)!r}); s.listen(); os.kill(os.getpid(), signal.SIGSTOP)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def test_why_names_a_store_that_is_elsewhere_by_its_address_alone(run_folder, tmp_path, opens, capsys):
    card = RunCard("a-run-1", str(tmp_path), "rediss://rubato:secret@10.1.2.3:6380", os.getpid(), 0.0)
    (run_folder / "run.json").write_bytes(msgspec.json.encode(card))

    opens(DeadStore)
    main([str(run_folder), "--why"])

    told = " ".join(capsys.readouterr().out.split())
    assert told.startswith("a-run: the Store at rediss://10.1.2.3:6380 does not answer: actors that need it wait.")
    assert f"without it end the run by its launcher: kill -TERM {os.getpid()}" in told


def test_a_live_run_that_lost_its_card_has_not_ended(run_folder, capsys):
    (run_folder / "run.json").unlink()
    with (run_folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        main([str(run_folder), "--why"])
        during = " ".join(capsys.readouterr().out.split())
    main([str(run_folder), "--why"])

    assert "run.json is missing" in during
    assert "its launcher runs" in during
    assert "has ended" in capsys.readouterr().out


def test_a_run_whose_store_is_not_there_yet_is_running(run_folder, tmp_path, capsys):
    (run_folder / "run.json").write_bytes(msgspec.json.encode(RunCard("a-run-1", str(tmp_path), "", os.getpid(), 0.0)))

    assert main([str(run_folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "running"


def test_a_folder_that_holds_no_run_is_one_sentence_and_exit_2(tmp_path, capsys):
    code = main([str(tmp_path / "nothing"), "--json"])

    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "holds no run" in err


def test_the_live_view_without_a_terminal_is_one_sentence_and_exit_2(run_folder, capsys):
    assert main([str(run_folder)]) == 2
    assert "needs a terminal" in capsys.readouterr().err


async def test_the_store_is_opened_once_for_many_looks(run_folder, make_record, monkeypatch):
    opened = []

    def open_store(url, run_id, patience_s):
        opened.append((url, run_id))
        return LoopStore(make_record("engine-1"))

    monkeypatch.setattr("rubato.runtime.monitor.source.RedisStore", open_store)
    source = RunSource(run_folder)
    await source.read()
    await source.read()
    await source.close()

    assert opened == [("mem://", "a-run-1")]


async def test_a_store_that_hangs_is_left_after_a_while(run_folder, opens, monkeypatch):
    class HangingStore(MemoryStore):
        async def leases(self, prefix):
            await asyncio.get_running_loop().create_future()

    monkeypatch.setattr("rubato.runtime.monitor.source.READ_S", 0.01)
    opens(HangingStore)
    view = await RunSource(run_folder).read()

    assert view.shown["state"] == "unreachable"


@pytest.mark.parametrize("form", ["--why", "--once"])
def test_a_store_without_room_is_named_beside_everything_else(form, run_folder, make_record, opens, capsys):
    class FullStore(LoopStore):
        async def full(self):
            return "the Store has no room"

    opens(lambda: FullStore(make_record("engine-1")))
    main([str(run_folder), form])

    told = capsys.readouterr().out
    assert "the Store has no room" in told
    assert "engine-1" in told
