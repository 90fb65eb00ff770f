"""A launch whose output goes nowhere, or to somebody who reads no more: it runs, and ends in order, as over a terminal that is there."""

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rubato.runtime.errors import ExitCode
from rubato.runtime.launch.folder import is_held
from tests.jobs import clean_environment, rubato

pytestmark = pytest.mark.slow

IDLE = '{run: {name: idle}, actors: {sample_buffer: {class: "rubato.actors.samples.buffer:SampleBuffer"}}, report: {finish: ""}}'
ENDS_S = 60.0
"""A launcher that hangs is one that takes so long; an idle one ends within a second."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "idle.yaml").write_text(IDLE)
    return tmp_path


def launched(place: Path, output: int, **options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rubato.runtime.cli", "launch", "idle.yaml", "--run-dir", "run"]
    return subprocess.Popen(
        command, cwd=place, env=clean_environment(), stdout=output, stderr=output, start_new_session=True, **options
    )  # fmt: skip


def events(place: Path, name: str) -> list[str]:
    log = place / "run" / "logs" / f"{name}.jsonl"
    return [json.loads(line)["event"] for line in log.read_text().splitlines()] if log.exists() else []


async def eventually(holds: Callable[[], bool], job: subprocess.Popen[bytes]) -> None:
    """What another process writes sends no event."""
    while not holds():
        assert job.poll() is None, "it ended instead"
        await asyncio.sleep(0.05)


def is_up(place: Path) -> bool:
    return "ready" in events(place, "sample_buffer-1")


def closed_terminal(place: Path) -> tuple[subprocess.Popen[bytes], Callable[[], None]]:
    ours, theirs = pty.openpty()
    job = launched(place, theirs, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))  # these tests may run under nohup
    os.close(theirs)

    def end() -> None:
        os.close(ours)
        for _ in range(2):  # a shell passes on what its terminal's end sends to the job anyway
            job.send_signal(signal.SIGHUP)

    return job, end


def closed_pipe(place: Path) -> tuple[subprocess.Popen[bytes], Callable[[], None]]:
    ours, theirs = os.pipe()
    job = launched(place, theirs)
    os.close(theirs)
    os.close(ours)
    return job, job.terminate


def reader_that_pauses(place: Path) -> tuple[subprocess.Popen[bytes], Callable[[], None]]:
    _, theirs = os.pipe()
    os.set_blocking(theirs, False)
    try:
        while os.write(theirs, bytes(4096)):
            pass
    except BlockingIOError:
        os.set_blocking(theirs, True)
    job = launched(place, theirs)
    return job, job.terminate


def full_disk(place: Path) -> tuple[subprocess.Popen[bytes], Callable[[], None]]:
    full = os.open("/dev/full", os.O_WRONLY)
    job = launched(place, full)
    os.close(full)
    return job, job.terminate


def no_input(place: Path) -> tuple[subprocess.Popen[bytes], Callable[[], None]]:
    job = launched(place, subprocess.DEVNULL, preexec_fn=lambda: os.close(0))
    return job, lambda: job.send_signal(signal.SIGINT)


@pytest.mark.parametrize("over", [closed_terminal, closed_pipe, reader_that_pauses, full_disk, no_input])
async def test_a_run_ends_in_order_whatever_became_of_its_output(place, over):
    job, end = over(place)
    await eventually(lambda: is_up(place), job)

    end()
    code = job.wait(ENDS_S)

    assert code == ExitCode.INTERRUPTED
    assert events(place, "sample_buffer-1")[-2:] == ["draining", "stopped"]
    assert not is_held(place / "run")


async def test_a_stop_waits_until_the_run_is_over_and_its_folder_free(place):
    job = launched(place, subprocess.DEVNULL, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    await eventually(lambda: is_up(place), job)

    stopped = rubato("stop", "--run", "run", "--json", cwd=place)

    assert stopped.code == ExitCode.DONE, stopped.err
    assert job.poll() == ExitCode.INTERRUPTED
    assert sorted(json.loads(stopped.out)) == ["checkpoint_s", "stopped_s"]
    told = [json.loads(line) for line in (place / "run" / "logs" / "node-1.jsonl").read_text().splitlines()]
    assert any(f"kill -TERM {job.pid}" in line.get("text", "") for line in told), "SIGINT does not reach it"
