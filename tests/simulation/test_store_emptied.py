"""A Store that comes back empty in the middle of a run: whatever the run makes of it, the audit of its files notices."""

import asyncio

import pytest

from rubato.sim.audit import AuditLimits, audit
from rubato.sim.simtest import setup as setups
from rubato.sim.simtest.checks import InvariantChecks
from rubato.sim.simtest.journal import Record
from rubato.sim.simtest.loop import SimLoop
from rubato.sim.simtest.run import Bench, SeedJob, settings
from rubato.sim.simtest.store import State
from rubato.sim.virtual import run_virtual


class Silent(InvariantChecks):
    """Judges nothing: here the audit does."""

    def fail(self, invariant, text):
        pass


def audited(folder, *, seed, empty_at, restart=None):
    """The problems of a simulated run, whose Store is emptied at that step; then the process `restart` is killed."""
    bench, setup = Bench(), setups.draw(seed)._replace(tail=False, drops=False)
    loop = SimLoop(seed, limit_s=300.0)
    monitor = Silent(setup.alpha, setup.window)
    job = SeedJob(setup, [], folder, bench.model, Record(loop.time, keep=False), monitor)

    async def empty():
        while not hasattr(job, "world") or job.world.step < empty_at:  # noqa: ASYNC110 - virtual time; steps have no event yet
            await asyncio.sleep(0.1)
        store = job.world.store
        store.crash()
        store.state = State()
        await asyncio.sleep(0.5)
        store.restart()
        if restart:
            job.world.processes[restart].kill()

    async def main():
        async with asyncio.TaskGroup() as tasks:
            emptying = tasks.create_task(empty())
            await job.main()
            emptying.cancel()

    try:
        with settings(setup):
            run_virtual(main, loop=loop)
    finally:
        bench.close()
    return audit(folder, AuditLimits(setup.steps, setup.batch_groups, setup.group_size + setup.extra_rollouts, setup.alpha)).problems


def test_a_run_whose_store_keeps_its_state_has_no_problems(tmp_path):
    assert audited(tmp_path, seed=3, empty_at=1000) == []


@pytest.mark.parametrize("restart", [None, "trainer-1"])
def test_a_store_that_lost_everything_is_filled_again_by_the_living_buffer(tmp_path, restart):
    assert audited(tmp_path, seed=3, empty_at=10, restart=restart) == []


def test_a_store_that_lost_everything_with_its_buffer_is_noticed(tmp_path):
    problems = audited(tmp_path, seed=3, empty_at=10, restart="sample_buffer-1")

    assert any("trained samples were forgotten by the Store" in problem for problem in problems), problems
