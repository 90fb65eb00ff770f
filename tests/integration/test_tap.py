"""`rubato tap` on a running job, as its user types it."""

import asyncio
import subprocess
import sys

import pytest

from rubato.actors.messages.generation import Inspect
from rubato.runtime.guest import join
from tests.faulty_job import write_tokenizer
from tests.integration.test_joining import actors_of, until
from tests.jobs import ACTING, clean_environment, rubato

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder of a run whose engines are asked all the time; its process."""
    place = tmp_path_factory.mktemp("tapped")
    (place / "acting.yaml").write_text(ACTING)
    write_tokenizer(place / "model")
    settings = [f"model.path={place / 'model'}", "run.steps=100000", "engine.scripted.vocab_size=257"]
    command = [sys.executable, "-m", "rubato.runtime.cli", "launch", "acting.yaml", *settings, "--run-dir", "run"]
    with (place / "out").open("wb") as out:
        process = subprocess.Popen(command, cwd=place, env=clean_environment(), stdout=out, stderr=out)
    run = place / "run"
    try:
        until(lambda: actors_of(run).get("engine-1", {}).get("state") == "ready" if run.exists() else False, "an engine")
        yield run
    finally:
        rubato("stop", "--run", run, "--now", cwd=place)
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()


async def tapped(run, *arguments) -> list[str]:
    """The lines that a tap of engine-1 prints while somebody inspects it again and again."""
    command = [sys.executable, "-m", "rubato.runtime.cli", "tap", run, "engine-1", "--seconds", "3", *arguments]
    tap = await asyncio.create_subprocess_exec(*map(str, command), cwd=run, env=clean_environment(), stdout=subprocess.PIPE)
    async with asyncio.TaskGroup() as tasks, join(run, name="guest-1") as guest:
        out = tasks.create_task(tap.communicate())
        while not out.done():
            await guest.ref("engine-1").ask(Inspect(), timeout=10)
            await asyncio.wait([out], timeout=0.2)
    assert tap.returncode == 0
    return out.result()[0].decode().splitlines()


async def test_the_messages_of_an_actor_are_printed_a_line_each(job):
    lines = await tapped(job)

    assert any(" from guest-1  ASK #" in line and line.endswith(" Inspect []") for line in lines), lines
    assert any(" to   guest-1  OK #" in line and " EngineStatus [['engine-1', " in line for line in lines), lines


async def test_only_the_messages_that_were_asked_for_are_printed(job):
    lines = await tapped(job, "--only", "Inspect")

    assert lines
    assert all(" Inspect " in line for line in lines)


def test_an_actor_that_is_not_there_is_answered_with_those_that_are(job):
    told = rubato("tap", job, "engine-7", cwd=job)

    assert (told.code, told.out) == (2, "")
    assert told.err.startswith(f"engine-7 does not run in {job}. Running: engine-1, env_manager-1, ")


def test_a_run_that_is_not_there_is_one_sentence(tmp_path):
    told = rubato("tap", tmp_path / "none", "engine-1", cwd=tmp_path)

    assert (told.code, told.out, len(told.err.splitlines())) == (2, "", 1)


def test_a_run_that_has_ended_is_one_sentence(job):
    assert rubato("stop", "--run", job, "--now", cwd=job).code == 0

    told = rubato("tap", job, "engine-1", cwd=job)

    assert (told.code, told.out, len(told.err.splitlines())) == (2, "", 1)
