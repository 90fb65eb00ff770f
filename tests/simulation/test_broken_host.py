"""A host whose environments break in the middle of a run: the others go on, and it is tried again until it works."""

import asyncio
import json
from collections import Counter

import pytest

from rubato.actors.envs.hosting import EnvFailure
from rubato.planning.failures import STREAK
from rubato.sim.simtest import setup as setups
from rubato.sim.simtest.checks import InvariantChecks
from rubato.sim.simtest.journal import Record
from rubato.sim.simtest.loop import SimLoop
from rubato.sim.simtest.run import Bench, SeedJob, settings
from rubato.sim.virtual import run_virtual

BROKEN = "env_manager-2"


async def broken(purpose):
    raise EnvFailure("env_reset_failed", "__init__", "raised in __init__: OSError('no space left on device')")


def played(folder, *, repaired_at):
    """A job of two managers, of which the second one's environments break at step 3. What it said, and the lines of its ledger."""
    bench = Bench()
    setup = setups.draw(3)._replace(
        num_managers=2, concurrency=8, steps=80, alpha=2, delay_s=0.002, extra_rollouts=0, window=64, tail=False
    )
    loop, monitor = SimLoop(3, limit_s=600.0), InvariantChecks(setup.alpha, setup.window)
    record = Record(loop.time, keep=True)
    job = SeedJob(setup, [], folder, bench.model, record, monitor)

    async def reached(step):
        while not hasattr(job, "world") or job.world.step < step:  # noqa: ASYNC110 - virtual time; steps have no event yet
            await asyncio.sleep(0.1)

    async def sabotage():
        await reached(3)
        host = job.world.processes[BROKEN].actor._hosts[""]
        works, host.borrow = host.borrow, broken
        if repaired_at:
            await reached(repaired_at)
            host.borrow = works

    async def main():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sabotage())
            await job.main()

    try:
        with settings(setup):
            run_virtual(main, loop=loop)
    finally:
        bench.close()
    assert monitor.violation is None
    told = [line.partition("notice: ")[2] for line in record.lines if "notice: " in line]
    return told, [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("repaired_at", [20, 0], ids=["repaired", "never"])
def test_a_host_whose_environments_break_is_set_aside_and_costs_few_samples(tmp_path, repaired_at):
    told, lines = played(tmp_path, repaired_at=repaired_at)

    aside = [text for text in told if text.startswith(f"{BROKEN} is set aside")]
    back = [text for text in told if text.startswith(f"{BROKEN} gets tickets again")]
    fates = Counter(line["fate"] for line in lines)
    assert (len(aside), len(back)) == (1, int(repaired_at > 0))
    assert 0 < fates["failed"] <= 4 * STREAK
    assert fates["trained"] + fates["zero_spread"] > 10 * fates["failed"]
