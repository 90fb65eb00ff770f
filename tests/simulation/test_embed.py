"""An embedded job of small actors: how its block begins and ends."""

import asyncio

import pytest

from rubato.bus.message import Message, Request
from rubato.runtime.actor import Actor, handler
from rubato.runtime.config import ActorConfig, Section
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.embed import embed
from rubato.runtime.errors import ActorFailed, ConfigError, LaunchError
from rubato.runtime.memory import MemoryStore
from tests.virtual import virtual


class Doubled(Message, frozen=True):
    n: int


class Double(Request[Doubled], frozen=True):
    n: int


class PaceSection(Section):
    ends: str = "well"


class Worker(Actor):
    role = "worker"
    least = most = 1

    class Config(ActorConfig):
        pace: PaceSection = PaceSection()

    config: Config

    async def on_start(self):
        if self.config.pace.ends != "never":
            self.spawn(self.work(), name="work")

    async def work(self):
        for step in (1, 2):
            self.progress(step, {"step": float(step)})
        if self.config.pace.ends == "by a crash" or (self.config.pace.ends == "by a crash once" and self.incarnation == 2):
            raise OSError("no disk")
        self.finish("worked", failed=self.config.pace.ends == "badly")

    @handler
    async def double(self, request: Double) -> Doubled:
        return Doubled(2 * request.n)


class Caller(Actor):
    role = "caller"
    answer = 0

    async def on_start(self):
        self.spawn(self.call(), name="call")

    async def call(self):
        reply = await self.ref("worker").ask(Double(21), timeout=5)
        self.finish(f"the answer is {reply.n}")


def job(*overrides):
    return from_mapping({"actors": {"worker": {"class": f"{__file__}:Worker"}}}, overrides)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


async def test_rows_come_from_the_first_step_to_the_end(folder):
    async with embed(job(), folder) as running:
        rows = [row async for row in running.rows()]

        assert rows == [{"step": 1.0}, {"step": 2.0}]
        assert await running.done() == "worked"


async def test_a_job_that_ends_badly_raises_from_rows_and_done(folder):
    with pytest.raises(ActorFailed, match="worked"):
        async with embed(job("pace.ends=badly"), folder) as running:
            await running.done()


async def test_an_actor_that_raises_too_often_ends_the_block_and_is_named(folder):
    with pytest.raises(ActorFailed, match=r"worker-1 died once \(raised\): worker-1: OSError: no disk"):
        async with embed(job("pace.ends=by a crash", "actors.worker.restarts=0"), folder):
            await asyncio.get_running_loop().create_future()


@virtual
async def test_an_actor_that_raises_is_started_again_within_its_budget(tmp_path):
    async with embed(job("pace.ends=by a crash once"), tmp_path / "run") as running:
        assert await running.done() == "worked"

    assert running.notices[0].startswith("worker-1 died (raised) after 0.0 s: worker-1: OSError: no disk; restarting in 0.5 s (1 of 5)")
    assert running.notices[1].startswith("worker-1 is back (incarnation 3) after 0.5 s")


async def test_an_exception_in_the_block_is_raised_as_itself(folder):
    with pytest.raises(KeyError, match="mine"):
        async with embed(job("pace.ends=never"), folder):
            raise KeyError("mine")

    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_extra_actors_ask_and_are_asked(folder):
    async with embed(job("pace.ends=never"), folder, extra={"caller-1": (Caller, ActorConfig())}) as running:
        assert await running.done() == "the answer is 42"


async def test_a_folder_that_holds_a_step_is_cleared_only_when_forced(folder):
    async with embed(job(), folder) as running:
        await running.done()

    async with embed(job(), folder) as running:
        await running.done()  # nothing was made that could be lost

    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(LaunchError, match="already holds a run"):
        async with embed(job(), folder):
            pass

    async with embed(job(), folder, force=True) as running:
        assert await running.done() == "worked"


async def test_a_run_is_resumed_with_the_store_that_it_had_and_with_no_other(folder):
    store = MemoryStore()
    async with embed(job(), folder, store=store) as running:
        await running.done()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')

    for other, why in ((None, "ended with its block"), (MemoryStore(), "knows nothing of it")):
        with pytest.raises(LaunchError, match=f"can't be resumed: .* {why}"):
            async with embed(job(), folder, resume=True, store=other):
                pass
    with pytest.raises(LaunchError, match=r"\(step 1\). Add resume=True and its store= to go on, force=True to overwrite"):
        async with embed(job(), folder):
            pass
    async with embed(job(), folder, resume=True, store=store) as running:
        assert await running.done() == "worked"


async def test_a_program_that_is_killed_leaves_nothing_in_the_temporary_folder(folder, tmp_path, monkeypatch):
    """What is not made can't be left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()

    async with embed(job("pace.ends=never"), folder):
        assert list((tmp_path / "temporary").iterdir()) == []


def test_a_mapping_is_checked_like_a_file():
    with pytest.raises(ConfigError, match=r"pace.edns is not a key. Did you mean pace.ends\?"):
        job("pace.edns=well")


def test_a_role_has_as_many_actors_as_its_class_asks_for():
    with pytest.raises(ConfigError, match=r"actors.worker.count is 0; a job needs at least 1 worker. Set actors.worker.count=1."):
        job("actors.worker.count=0")
