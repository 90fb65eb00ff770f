"""kill -9 of a vLLM engine in the middle of a switch, while its new vLLM starts: every request is answered in full, and the job goes on."""

import asyncio
import os
import signal

import psutil
import pytest

from rubato.actors.engines.engine import Work
from rubato.actors.messages.generation import Inspect, Sampling
from rubato.bus.errors import AskFailed
from rubato.runtime.guest import Guest, join
from tests.contract.engines import prompt_of
from tests.contract.test_engine import worst
from tests.integration.test_vllm_switch import CONFIG, LIMIT_S, TOKENS, answer, both_here, told, works
from tests.models import write_model
from tools.bench.paced_job import job
from tools.bench.peers.told_orchestrator import Become

ENGINES = ("engine-1", "engine-2")

DEATHS = [((1, 1), (2,), "engine-1"), ((2,), (1, 1), "engine-2")]
"""Degrees, those that are ordered, and who is killed: the engine that stays in a merge, the one that wakes in a split."""


def processes_of(pid: int) -> set[psutil.Process]:
    """vLLM's, of one engine. Python's resource tracker outlives them."""
    found = set[psutil.Process]()
    for each in psutil.Process(pid).children(recursive=True):
        try:
            if each.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(each.cmdline()):
                found.add(each)
        except psutil.NoSuchProcess:
            continue
    return found


async def kill_as_it_starts(pid: int, old: set[psutil.Process]) -> set[psutil.Process]:
    """Returns the processes of the vLLM that was starting then, none of which is of the `old` one."""
    async with asyncio.timeout(LIMIT_S):
        while not (new := processes_of(pid)) or not new.isdisjoint(old):  # noqa: ASYNC110 - processes of others
            await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return new


async def all_cores_used(me: Guest) -> None:
    """Returns once the engines that are awake have both cores, and neither twice."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                found = [await me.ref(name).ask(Inspect(), timeout=5.0) for name in ENGINES]
            except AskFailed:
                found = []
            if sum(each.info.degree for each in found if not each.info.asleep) == len(ENGINES):
                return
            await asyncio.sleep(0.5)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(5 * LIMIT_S)
@pytest.mark.filterwarnings("default")  # vLLM and what it imports warn in many places of their own
@pytest.mark.parametrize(("before", "wanted", "victim"), DEATHS, ids=["merge", "split"])
async def test_an_engine_that_dies_as_its_vllm_starts_costs_no_request_and_leaves_no_process(tmp_path, before, wanted, victim):
    pytest.importorskip("vllm")
    model = write_model(tmp_path / "model")
    overrides = [f"model.path={model}", "model.device=cpu"]
    loop = asyncio.get_running_loop()
    async with job("vllm-killed", CONFIG, overrides, LIMIT_S) as folder, join(folder) as me:
        await both_here(me)
        await me.ref("orchestrator").ask(Become(before, 2), timeout=LIMIT_S)
        record = me.directory.find(victim)
        assert record is not None
        pid = record.pid
        old = processes_of(pid)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(answer(me, Work("first", "", prompt_of(99), Sampling(8))))
            asked = {work.request_id: tasks.create_task(answer(me, work)) for work in works("a")}
            await first
            tasks.create_task(me.ref("orchestrator").ask(Become(wanted, 2), timeout=LIMIT_S))
            orphans, killed_s = await kill_as_it_starts(pid, old), loop.time()
        left = [each for each in orphans if each.is_running()]
        print(f"after {loop.time() - killed_s:.1f} s all requests are answered and the switch is over")
        await all_cores_used(me)
        async with asyncio.TaskGroup() as tasks:
            later = {work.request_id: tasks.create_task(answer(me, work)) for work in works("b")}
        for each in told(folder, "orchestrator", "switched", "switch_failed", "switch_not_taken_back", "server_put_right"):
            print({name: each[name] for name in ("event", "seconds", "error", "engines") if name in each})

    answers = {name: each.result().tokens for name, each in (asked | later).items()}
    found = [(work, answers[work.request_id]) for batch in "ab" for work in works(batch)]
    assert not left, "what was starting is still there"
    assert {len(tokens.ids) // 4 for _, tokens in found} == {TOKENS}
    assert worst(model, found) < 1e-4
