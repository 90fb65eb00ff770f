"""A run whose disk is full: its folder, its Store and its logs at once. It pauses until there is room, says so, and loses nothing."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.runtime.errors import ExitCode
from rubato.runtime.launch.card import read_card
from rubato.runtime.launch.folder import RunFolder
from tests.jobs import SMALL, clean_environment, write_model

ROOM_MB = 64
PATIENCE_S = 90.0
"""For what a job does next on a machine with two busy cores."""

pytestmark = pytest.mark.slow


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={ROOM_MB}m", "tmpfs", folder]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(path: Path) -> None:
    """Take all room that is left, to the last byte."""
    size = 1 << 20
    with path.open("ab", buffering=0) as file:
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


async def eventually(holds: Callable[[], bool], job: subprocess.Popen[bytes]) -> None:
    """What another process writes sends no event."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            assert job.poll() is None, "it ended instead"
            await asyncio.sleep(0.05)


def test_a_run_that_ends_on_a_full_disk_still_says_how(disk):
    folder = RunFolder(disk / "run")
    card = folder.open(resume=False, force=False)
    folder.write(card)
    fill(disk / "filler")

    card.stopped_s, card.checkpoint_s = 1234.567, 123.456
    folder.write_end(card)
    folder.close()

    told = read_card(disk / "run")
    assert (told.stopped_s, told.checkpoint_s) == (1234.567, 123.456)


async def kept_full(path: Path, seconds: float) -> None:
    """What the run itself frees is taken too."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while loop.time() < until:
        fill(path)
        await asyncio.sleep(0.05)


def launched(place: Path, output: Path, *words: str) -> subprocess.Popen[bytes]:
    with output.open("w") as file:
        command = [sys.executable, "-m", "rubato.runtime.cli", "launch", *words]
        return subprocess.Popen(command, cwd=place, env=clean_environment(), stdout=file, stderr=file)


@pytest.mark.parametrize("durability", ["everysec", "always"])
async def test_a_run_pauses_on_a_full_disk_says_so_twice_and_goes_on_with_everything(tmp_path, disk, durability):
    write_model(tmp_path / "model")
    (tmp_path / "small.yaml").write_text(SMALL)
    run, output = disk / "run", tmp_path / "output"
    overrides = [f"model.path={tmp_path / 'model'}", "run.steps=100000", f"state.durability={durability}"]
    job = launched(tmp_path, output, "small.yaml", *overrides, "--run-dir", str(run))
    try:
        await eventually(lambda: len(lines(run / "metrics.jsonl")) > 2, job)

        await kept_full(disk / "filler", 6.0)
        full = len(lines(run / "metrics.jsonl"))
        (disk / "filler").unlink()
        await eventually(lambda: len(lines(run / "metrics.jsonl")) > full + 2, job)
        await eventually(lambda: "there is room again" in output.read_text(), job)
        job.terminate()
        code = await asyncio.to_thread(job.wait)
        ended = lines(run / "samples.jsonl")
        steps = [row["step"] for row in lines(run / "metrics.jsonl")]
        said = "".join(path.read_text() for path in (run / "logs").glob("*.stderr"))
        whole = [checkpoints.check(path).step for path in checkpoints.by_step(run / "checkpoints")]
    finally:
        job.kill()
        await asyncio.to_thread(job.wait)

    told = output.read_text()
    assert code == ExitCode.INTERRUPTED
    assert told.count(f"no room on the disk of {run}") == told.count("there is room again") == 1
    assert "bytes free" in told
    assert " died " not in told.replace("the embedded redis died", "")
    assert "Traceback" not in told + said
    assert steps == list(range(1, len(steps) + 1))
    assert len({end["trajectory_id"] for end in ended}) == len(ended)
    assert whole[-1] == steps[-1]
