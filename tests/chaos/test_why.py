"""What `monitor --why` names in a real run whose processes are stopped and killed."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rubato.runtime.monitor.source import RunSource
from tests.faulty_job import write_tokenizer
from tests.jobs import ACTING, clean_environment, rubato

pytestmark = pytest.mark.slow

START_S = 60.0
WITHIN_S = 15.0
"""Patience: on idle cores it is told within five seconds."""
LOOK_S = 0.1


@pytest.fixture
def run(tmp_path: Path):
    """A job without a trainer, and so without torch, that stands until it is ended."""
    (tmp_path / "acting.yaml").write_text(ACTING)
    write_tokenizer(tmp_path / "model")
    command = [sys.executable, "-m", "rubato.runtime.cli", "launch", "acting.yaml", f"model.path={tmp_path / 'model'}"]
    out = (tmp_path / "out").open("wb")
    launcher = subprocess.Popen(
        [*command, "run.steps=100000", "engine.scripted.vocab_size=257", "--run-dir", "run"],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=out,
        stderr=subprocess.STDOUT,
    )
    try:
        yield tmp_path / "run"
    finally:
        rubato("stop", "--run", tmp_path / "run", "--now", cwd=tmp_path)
        try:
            launcher.wait(30)
        finally:
            launcher.kill()
            launcher.wait()
            out.close()


async def until(look, condition, within_s):
    """The first look that meets `condition`."""
    async with asyncio.timeout(within_s):
        while not condition(shown := await look()):  # noqa: ASYNC110 - other processes can only be watched
            await asyncio.sleep(LOOK_S)
    return shown


def named(shown):
    """Without what is the case all the time: once its slots are full, this job waits for the trainer that it does not have."""
    found = {(row["holder"], row["kind"]) for row in shown["blocked"] if row["kind"] != "slow"}
    return found - {("trainer", "dead")}


def back(shown, name, pid):
    """Whether another process than `pid` is ready: one that is there within a look's time was never missed."""
    return any(actor["name"] == name and actor["state"] == "ready" and actor["pid"] != pid for actor in shown["actors"])


def stopped(shown):
    return {row["holder"] for row in shown["blocked"] if "SIGSTOP" in row["reason"]}


async def all_ready(folder: Path):
    source = None
    async with asyncio.timeout(START_S):
        while source is None:
            if (folder / "run.json").exists():
                source = RunSource(folder)
            await asyncio.sleep(LOOK_S)

    async def look():
        return (await source.read()).shown

    def up(shown):
        names = {actor["name"] for actor in shown["actors"] if actor["state"] == "ready"}
        return {"engine-1", "env_manager-1", "llm_proxy-1", "sample_buffer-1", "node-1"} <= names and not named(shown)

    return source, look, await until(look, up, START_S)


async def test_a_stopped_store_is_named_with_its_process(run):
    source, look, _ = await all_ready(run)
    pid = next(int(p.name) for p in Path("/proc").glob("[0-9]*") if serves(p, run))
    os.kill(pid, signal.SIGSTOP)
    try:
        shown = await until(look, lambda shown: shown["state"] != "running", 2 * WITHIN_S)
        told = rubato("monitor", run, "--why", cwd=run.parent).out
    finally:
        os.kill(pid, signal.SIGCONT)
    await until(look, lambda shown: shown["state"] == "running", START_S)
    await source.close()

    assert shown["state"] == "unreachable"
    assert "redis.sock does not answer for" in shown["trouble"]
    assert f"kill -CONT {pid}" in " ".join(told.split())


def serves(process: Path, run: Path) -> bool:
    """Whether this is the Redis whose working folder is that of the run."""
    try:
        return (process / "cwd").readlink() == run / "state" and "redis" in (process / "comm").read_text()
    except OSError:
        return False  # it ended


async def test_a_stopped_and_a_killed_process_are_named(run):
    source, look, shown = await all_ready(run)
    pids = {actor["name"]: actor["pid"] for actor in shown["actors"]}
    try:
        for name in ("engine-1", "sample_buffer-1"):
            os.kill(pids[name], signal.SIGSTOP)
            shown = await until(look, lambda shown, n=name: stopped(shown) == {n}, WITHIN_S)
            assert (name, "stalled") in named(shown)
            os.kill(pids[name], signal.SIGCONT)
            await until(look, lambda shown: not named(shown), 2 * WITHIN_S)

        for name in ("llm_proxy-1", "env_manager-1"):
            os.kill(pids[name], signal.SIGKILL)
            shown = await until(look, lambda shown, n=name: named(shown) or back(shown, n, pids[n]), WITHIN_S)
            assert named(shown) <= {(name, "dead"), (name, "starting")}
            await until(look, lambda shown, n=name: not named(shown) and back(shown, n, pids[n]), START_S)
    finally:
        await source.close()
