"""A pool grows where calls wait, and only there."""

import asyncio
from pathlib import Path

import pytest

from rubato.actors.envs.hosting import EnvHost
from rubato.actors.envs.section import EnvSection
from rubato.runtime.pool.pool import WorkerPool
from rubato.runtime.pool.values import encode_call

USER = str(Path(__file__).with_name("user_code.py"))
SLEEPS = """
import threading

class Env:
    def reset(self, *, seed):
        return "x", {}

    def step(self, action):
        threading.Event().wait(float(action))
        return "x", 1.0, False, False, {}

    def close(self): ...
"""


@pytest.fixture
async def host(tmp_path):
    (tmp_path / "env.py").write_text(SLEEPS)
    hosts = []

    async def start(**settings):
        hosts.append(EnvHost(EnvSection.model_validate({"class": f"{tmp_path}/env.py:Env", **settings})))
        await hosts[-1].start()
        return hosts[-1]

    yield start
    for each in hosts:
        await each.close()


async def play(host, num, seconds):
    """All of them step at once; as many instances are kept as played."""
    envs = [(await host.begin("train", 1))[0] for _ in range(num)]
    async with asyncio.TaskGroup() as tasks:
        for env in envs:
            tasks.create_task(env.step(seconds))
    for env in envs:
        host.give_back(env, "train")


async def test_steps_that_wait_get_workers_up_to_the_bound_and_instances_move_to_them(host, monkeypatch):
    monkeypatch.setattr("rubato.actors.envs.pooled.usable_cores", lambda: 1)
    auto = await host(concurrency=16)

    while auto.pool.size < 4:
        await play(auto, 8, "0.3")
    for _ in range(8):
        await play(auto, 8, "0")

    assert auto.pool.size == 4
    assert sorted(len(worker.instances) for worker in auto.pool._workers) == [2, 2, 2, 2]


async def test_steps_that_do_not_wait_get_none_and_an_explicit_number_is_obeyed(host, monkeypatch):
    monkeypatch.setattr("rubato.runtime.pool.pool.GROW_S", 30.0)  # longer than a busy machine makes anybody wait here
    quick, explicit = await host(concurrency=16), await host(concurrency=16, workers=1)

    for _ in range(5):
        await play(quick, 8, "0")
    monkeypatch.undo()
    await play(explicit, 3, "0.2")

    assert (quick.pool.size, explicit.pool.size) == (2, 1)


async def test_a_call_is_told_when_its_worker_begins_with_it():
    pool = WorkerPool(workers=1)
    await pool.build("a", f"{USER}:Well", encode_call(start=1), deadline_s=20)
    begun = []

    calls = [
        asyncio.get_running_loop().create_task(
            pool.call("a", "add", encode_call(1), deadline_s=20, began=lambda name=name: begun.append(name))
        )
        for name in ("first", "second")
    ]
    await asyncio.sleep(0)
    at_once = [*begun]
    await asyncio.wait(calls)
    await pool.close()

    assert (at_once, begun) == (["first"], ["first", "second"])
