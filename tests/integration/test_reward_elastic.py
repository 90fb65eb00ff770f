"""A pool of reward processes that grows with its calls and shrinks without them."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from rubato.actors.config import RewardSection
from rubato.actors.messages.samples import NotScored, Score, Scores
from rubato.actors.rewards.scorer import Scorer
from rubato.actors.rewards.service import RewardService
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryTransport
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore
from rubato.runtime.observe.figures import Metrics
from rubato.runtime.observe.log import logger
from tests.simulation.test_kernel import Client, cluster

USER = Path(__file__).parents[1] / "unit" / "actors" / "rewards" / "user_rewards.py"
GATED = """
import time
from pathlib import Path

def f(completions, gate, **columns):
    while not Path(gate[0]).exists():
        time.sleep(0.01)
    return [1.0] * len(completions)
"""


def request(text="a", **columns):
    return Score("t1.1", (text,), msgspec.msgpack.encode({"turns": 1, **columns}))


@asynccontextmanager
async def elastic(function, workers=3, **settings):
    metrics = Metrics()
    section = RewardSection(functions=(function,), workers=workers, min_workers=0, memory_mb=512, **settings)
    scorer = Scorer(section, metrics=metrics)
    try:
        assert await scorer.start() == ""
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(scorer.run())
            yield scorer, metrics, tasks
            running.cancel()
    finally:
        await scorer.close()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - processes start and end
            await asyncio.sleep(0.02)


async def test_it_grows_with_the_calls_up_to_its_most_and_every_call_is_answered(tmp_path):
    (tmp_path / "gated.py").write_text(GATED)
    async with elastic(f"{tmp_path}/gated.py:f") as (scorer, metrics, tasks):
        calls = [tasks.create_task(scorer.score([request(gate=str(tmp_path / "open"))])) for _ in range(5)]
        await until(lambda: metrics.snapshot()["reward/workers"] == 3 and len(scorer._local._busy) == 3)
        (tmp_path / "open").touch()

        assert [await call for call in calls] == [[Scores((1.0,))]] * 5
        assert metrics.snapshot()["reward/cold_starts"] == 2  # one was there from the start


async def test_it_is_empty_when_nobody_has_asked_for_a_while_and_serves_again(monkeypatch):
    monkeypatch.setattr("rubato.planning.autoscale.KEPT_STARTS", 0.1)
    async with elastic(f"{USER}:lengths") as (scorer, metrics, _):
        await until(lambda: metrics.snapshot()["reward/workers"] == 0)
        await until(lambda: not scorer._local._all)

        assert await scorer.score([request("abc")]) == [Scores((3.0,))]


async def test_a_call_that_kills_its_process_costs_no_other():
    async with elastic(f"{USER}:leave") as (scorer, _, _):
        replies = [await scorer.score([request()]) for _ in range(3)]

    assert [reply[0].reason for reply in replies] == ["exited"] * 3


async def test_where_no_process_can_start_any_more_each_call_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("rubato.planning.autoscale.KEPT_STARTS", 0.1)
    file = tmp_path / "fading.py"
    file.write_text("def f(completions, **columns):\n    return [1.0] * len(completions)\n")
    async with elastic(f"{file}:f") as (scorer, metrics, tasks):
        await until(lambda: metrics.snapshot()["reward/workers"] == 0)
        file.unlink()

        calls = [tasks.create_task(scorer.score([request()])) for _ in range(4)]
        replies = [(await call)[0] for call in calls]

    assert [type(reply) for reply in replies] == [NotScored] * 4
    assert {reply.reason for reply in replies} == {"lost"}
    assert "no process could be started" in replies[0].detail


async def test_a_caller_that_goes_away_leaves_its_place_to_the_next(tmp_path):
    (tmp_path / "gated.py").write_text(GATED)
    gate = tmp_path / "open"
    async with elastic(f"{tmp_path}/gated.py:f", workers=1) as (scorer, _, tasks):
        first = tasks.create_task(scorer.score([request(gate=str(gate))]))
        await until(lambda: scorer._local._busy)
        second = tasks.create_task(scorer.score([request(gate=str(gate))]))
        third = tasks.create_task(scorer.score([request(gate=str(gate))]))
        await until(lambda: len(scorer._local._waiting) == 2)
        second.cancel()
        gate.touch()

        assert await first == await third == [Scores((1.0,))]


async def test_a_reward_service_has_its_pool_grow_while_it_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("rubato.planning.autoscale.KEPT_STARTS", 1000)  # the one that is there from the start stays
    (tmp_path / "gated.py").write_text(GATED)
    async with cluster(tmp_path) as made:
        config = {"reward": {"functions": [f"{tmp_path}/gated.py:f"], "workers": 2, "min_workers": 0}}
        kernel = Kernel(
            RewardService,
            RewardService.Config.model_validate(config),
            name="reward_service-1",
            incarnation=await made.store.increment("incarnation"),
            run=made.run,
            transport=MemoryTransport(Identity("test", "reward_service-1", 1), made.network),
            store=made.store,
            blobs=MemoryBlobStore(),
            log=logger("rubato.test"),
        )
        service = kernel.build()
        serving = made.tasks.create_task(kernel.serve())
        await kernel.ready.wait()
        client, _ = await made.start(Client, "client-1")
        asked = []
        for number in range(2):
            score = request(str(number), gate=str(tmp_path / "open"))
            asked.append(made.tasks.create_task(client.ref("reward_service").ask(score, timeout=30, retry=False)))
            await until(lambda num=number: len(service._scorer._local._busy) == num + 1)
        (tmp_path / "open").touch()

        assert [await reply for reply in asked] == [Scores((1.0,))] * 2
        assert service.metrics.snapshot()["reward/cold_starts"] == 1
        serving.cancel()


@pytest.mark.parametrize("waits", [False, True])
async def test_closing_ends_calls_and_processes(tmp_path, waits):
    async with elastic(f"{USER}:hang", workers=1, timeout_s=60.0) as (scorer, _, tasks):
        call = tasks.create_task(scorer.score([request()]))
        await until(lambda: scorer._local._busy)
        other = tasks.create_task(scorer.score([request()])) if waits else None
        await asyncio.sleep(0)
        await scorer.close()

        assert isinstance((await call)[0], NotScored)
        assert other is None or isinstance((await other)[0], NotScored)
        assert not scorer._local._all
