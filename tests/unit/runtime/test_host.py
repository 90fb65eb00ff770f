"""Supervision over any back end: what is started again, how often, and in which order it ends."""

import asyncio
from contextlib import asynccontextmanager

from rubato.runtime.errors import ActorFailed
from rubato.runtime.host import Death, Ending, JobHost, RestartBudget
from tests.virtual import virtual


def test_delays_double_until_the_budget_is_spent_then_the_failure_escalates():
    budget = RestartBudget(limit=3, window_s=60.0, pauses_s=(0.5, 8.0))

    plans = [budget.died(now) for now in (0.0, 1.0, 2.0, 3.0)]

    assert [p.delay_s for p in plans] == [0.5, 1.0, 2.0, None]
    assert [p.attempt for p in plans] == [1, 2, 3, 4]


def test_deaths_older_than_the_window_are_forgotten():
    budget = RestartBudget(limit=1, window_s=10.0)

    first, second = budget.died(0.0), budget.died(20.0)

    assert (first.attempt, second.attempt) == (1, 1)
    assert second.delay_s == 0.5


def test_a_budget_of_zero_never_restarts():
    assert RestartBudget(limit=0, window_s=10.0).died(5.0).delay_s is None


class Scripted:
    """An instance, and the back end that starts it: its test says when it ends, unless it ends when it is asked to."""

    def __init__(self, *, obeys: bool = True) -> None:
        self.obeys = obeys
        self.said: list[str] = []
        self.starts: list[str] = []
        self.running: dict[str, asyncio.Event] = {}
        self.refuse = ""
        self.ending = Ending("exit 1", "it broke")
        self.stopped = False

    async def start(self, name: str) -> "Instance":
        if self.refuse:
            raise ActorFailed(self.refuse)
        self.starts.append(name)
        self.running[name] = asyncio.Event()
        return Instance(self, name, self.running[name])


class Instance:
    def __init__(self, backend: Scripted, name: str, over: asyncio.Event) -> None:
        self._backend, self._name, self._over = backend, name, over

    def drain(self) -> None:
        self._backend.said.append(f"drain {self._name}")
        if self._backend.obeys:
            self._over.set()

    def kill(self) -> None:
        self._backend.said.append(f"kill {self._name}")
        self._over.set()

    def is_stopped(self) -> bool:
        return self._backend.stopped

    async def ended(self) -> Ending:
        await self._over.wait()
        return self._backend.ending


@asynccontextmanager
async def hosting(backend: Scripted):
    """A host over `backend`, and the deaths that it told of."""
    deaths: list[Death] = []

    async def died(death: Death) -> None:
        deaths.append(death)

    async with asyncio.TaskGroup() as tasks:
        yield JobHost(backend, tasks.create_task, died), deaths


@virtual
async def test_what_ends_is_started_again_until_its_budget_is_spent():
    backend = Scripted()
    async with hosting(backend) as (host, deaths):
        host.start("engine-1", RestartBudget(2, 60.0))
        for _ in range(3):
            await asyncio.sleep(10.0)
            backend.running["engine-1"].set()

    assert backend.starts == ["engine-1"] * 3
    assert [(death.attempt, death.restart_in_s) for death in deaths] == [(1, 0.5), (2, 1.0), (3, None)]
    assert host.names() == []


@virtual
async def test_what_another_start_would_meet_again_is_not_started_again():
    backend = Scripted()
    backend.ending = Ending("exit 2", "no such file: model.bin", permanent=True)
    async with hosting(backend) as (host, deaths):
        host.start("engine-1", RestartBudget(5, 60.0))
        await asyncio.sleep(10.0)
        backend.running["engine-1"].set()

    assert backend.starts == ["engine-1"]
    assert [death.restart_in_s for death in deaths] == [None]


@virtual
async def test_what_ran_before_is_started_again_whatever_ends_it_now():
    backend = Scripted()
    async with hosting(backend) as (host, deaths):
        host.start("engine-1", RestartBudget(1, 60.0))
        await asyncio.sleep(10.0)
        backend.running["engine-1"].set()
        await asyncio.sleep(10.0)
        backend.ending = Ending("exit 2", "no such file", permanent=True)
        backend.running["engine-1"].set()

    assert [death.restart_in_s for death in deaths] == [0.5, None]


@virtual
async def test_what_can_not_be_started_counts_as_dead():
    backend = Scripted()
    backend.refuse = "no process can be started"
    async with hosting(backend) as (host, deaths):
        host.start("engine-1", RestartBudget(1, 60.0))

    assert [death.ending for death in deaths] == [Ending("not started", "no process can be started")] * 2
    assert deaths[-1].restart_in_s is None


@virtual
async def test_ranks_drain_one_after_another_and_what_does_not_obey_is_killed():
    backend = Scripted(obeys=False)
    async with hosting(backend) as (host, deaths):
        for name, rank in (("engine-1", 50), ("trainer-1", 20), ("engine-2", 50)):
            host.start(name, RestartBudget(5, 60.0), rank)
        await asyncio.sleep(1.0)
        await host.drain_all(25.0, by_rank=True)

    assert backend.said[:2] == ["drain trainer-1", "kill trainer-1"]
    assert sorted(backend.said[2:4]) == ["drain engine-1", "drain engine-2"]
    assert sorted(backend.said[4:]) == ["kill engine-1", "kill engine-2"]
    assert all(death.expected for death in deaths)


@virtual
async def test_a_restart_costs_no_budget_and_a_drain_ends_the_pause_before_one():
    backend = Scripted()
    async with hosting(backend) as (host, deaths):
        host.start("engine-1", RestartBudget(1, 60.0, (30.0, 30.0)))
        await asyncio.sleep(1.0)
        await host.restart("engine-1", 25.0)
        await asyncio.sleep(1.0)
        backend.running["engine-1"].set()
        await asyncio.sleep(1.0)
        await host.drain("engine-1", 25.0)

    assert backend.starts == ["engine-1"] * 2
    assert [(death.ending.how, death.restart_in_s) for death in deaths] == [("restart", 0.0), ("exit 1", 30.0)]


@virtual
async def test_what_is_held_still_is_killed_where_it_is_to_be_restarted():
    backend = Scripted()
    async with hosting(backend) as (host, deaths):
        host.start("engine-1", RestartBudget(1, 60.0))
        await asyncio.sleep(1.0)
        backend.stopped = True
        await host.restart("engine-1", 25.0)
        backend.stopped = False
        await asyncio.sleep(1.0)
        await host.drain("engine-1", 25.0)

    assert backend.said == ["kill engine-1", "drain engine-1"]
    assert backend.starts == ["engine-1"] * 2
    assert [death.expected for death in deaths] == [True, True]
