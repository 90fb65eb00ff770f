"""The watchdog's memory: what it sees of processes, and what it told already."""

import asyncio

from rubato.runtime.launch.agent import DRAINED, Watch
from rubato.runtime.observe.figures import Waits
from rubato.sim.virtual import run_virtual


def row(holder="engine-1", kind="stalled"):
    return {"actor": "trainer-1", "stage": "batch", "holder": holder, "kind": kind}


def test_what_is_blocked_is_told_once_when_it_was_so_for_the_limit_and_again_when_it_came_back():
    watch = Watch(Waits())

    told = [len(watch.overdue([row()] if now != 50.0 else [], now, 30.0)) for now in (0.0, 29.0, 30.0, 40.0, 50.0, 60.0, 90.0)]

    assert told == [0, 0, 1, 0, 0, 0, 1]


def test_a_process_that_is_not_as_it_should_be_is_a_wait_of_the_node_agent():
    async def main():
        waits = Waits()
        watch, seen = Watch(waits), []

        def look():
            seen.append([(view.stage, view.what) for view in waits.snapshot(asyncio.get_running_loop().time())])

        watch.sees("engine-1", "starting")
        look()
        watch.well("engine-1")
        watch.stopped("engine-1", now=True)
        look()
        watch.stopped("engine-1", now=False)
        look()
        watch.sees("engine-1", "dead", "signal 9", "actors.engine.restarts=5")
        watch.stopped("engine-1", now=False)
        look()
        watch.well("engine-1")
        look()
        return seen

    assert run_virtual(main) == [[("starting", "engine-1")], [("stopped", "engine-1")], [], [("dead", "engine-1")], []]


def test_of_those_that_were_drained_the_newest_are_known():
    async def main():
        waits = Waits()
        watch = Watch(waits)
        for number in range(DRAINED + 3):
            watch.drained(f"engine-{number}")
        return {view.what for view in waits.snapshot(asyncio.get_running_loop().time())}

    assert run_virtual(main) == {f"engine-{number}" for number in range(3, DRAINED + 3)}
