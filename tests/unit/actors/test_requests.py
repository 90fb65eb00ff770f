"""A request that is asked for more than once: one run, for all who ask."""

import asyncio

import pytest

from rubato.actors.messages.generation import Aborted, Completion, Generate, Sampling, Tokens
from rubato.actors.requests import SharedRequest, SharedRequests, in_task


class Fatal(Exception):
    """Ends the actor."""


class Bench:
    """A table whose runs end when the test says so."""

    def __init__(self, tasks, **limits):
        self.runs: list[str] = []
        self.ends: dict[str, asyncio.Future] = {}
        begin = in_task(self._run, tasks.create_task, fatal=(Fatal,))
        self.table = SharedRequests(SharedRequest, begin, **limits)

    async def _run(self, shared):
        request_id = shared.request.request_id
        self.runs.append(request_id)
        end = self.ends[request_id] = asyncio.get_running_loop().create_future()
        return await end

    def ask(self, request_id):
        return self.table.ask(Generate(request_id, "s", b"", Sampling(1)))

    async def finish(self, request_id, num_tokens=1):
        """Ask for it, and have it run to its end."""
        asking = self.ask(request_id)
        await settle()
        self.ends[request_id].set_result(Completion(request_id, Tokens(bytes(4 * num_tokens)), "stop", "engine-1"))
        return await asking


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_asks_again_joins_the_run_or_gets_the_result():
    async with asyncio.TaskGroup() as tasks:
        bench = Bench(tasks, max_results=2)
        first = bench.ask("r")
        second = bench.ask("r")

        result = await bench.finish("r")
        late = await bench.ask("r")

    assert bench.runs == ["r"]
    assert await first == await second == result == late
    assert bench.table.finished() == ("r",)


async def test_a_run_ends_with_its_last_asker_and_whoever_asks_meanwhile_gets_one_of_its_own():
    async with asyncio.TaskGroup() as tasks:
        bench = Bench(tasks, max_results=2)
        first, second = bench.ask("r"), bench.ask("r")
        await settle()
        first.cancel()
        await settle()
        runs_while_one_was_left = list(bench.runs)
        assert not bench.ends["r"].cancelled()

        second.cancel()
        await asyncio.sleep(0)
        result = await bench.finish("r")

    assert runs_while_one_was_left == ["r"]
    assert bench.runs == ["r", "r"]
    assert result.request_id == "r"


async def test_results_are_bounded_in_number_and_bytes():
    async with asyncio.TaskGroup() as tasks:
        bench = Bench(tasks, max_results=2, max_mb=1)
        for i in range(4):
            await bench.finish(f"r{i}")
        by_number = bench.table.finished()
        await bench.finish("large", 2**18)

    assert by_number == ("r2", "r3")
    assert bench.table.finished() == ("large",)


async def test_an_error_is_the_askers_to_hear_and_only_a_fatal_one_the_actors_too():
    heard: list[BaseException | None] = []

    async def play():
        async with asyncio.TaskGroup() as tasks:
            bench = Bench(tasks, max_results=2)
            for name, error in (("refused", ValueError("too long")), ("broken", Fatal("out of memory"))):
                bench.ask(name).add_done_callback(lambda asking: heard.append(asking.exception()))
                await settle()
                bench.ends[name].set_exception(error)
                await settle()

    with pytest.raises(ExceptionGroup) as ended:
        await play()
    await settle()

    assert [type(error) for error in heard] == [ValueError, Fatal]
    assert [type(error) for error in ended.value.exceptions] == [Fatal]


async def test_it_is_idle_once_nothing_runs_and_every_asker_has_its_answer():
    async with asyncio.TaskGroup() as tasks:
        bench = Bench(tasks, max_results=0)
        asking = bench.ask("r")
        await settle()
        busy = not bench.table.idle.is_set()
        bench.ends["r"].set_result(Aborted("r", Tokens(), "asked"))
        await asyncio.wait([asking])
        await settle()

    assert busy
    assert bench.table.idle.is_set()
    assert bench.table.finished() == ()
