"""One seed gives one run of the virtual loop, whatever the program."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from rubato.sim.virtual import run_virtual

PROGRAMS = st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.25, 1.0]), max_size=6), min_size=1, max_size=8)


def history(program, seed):
    """What each task saw, at which virtual time, in which order, and how many callbacks it took."""

    async def main():
        loop, seen = asyncio.get_running_loop(), []
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=2)

        async def work(number, pauses):
            for pause in pauses:
                await asyncio.sleep(pause)
                await queue.put(number)
                seen.append((loop.time(), number, await queue.get()))

        async with asyncio.TaskGroup() as tasks:
            for number, pauses in enumerate(program):
                tasks.create_task(work(number, pauses))
        return seen, loop.num_steps

    return run_virtual(main, seed)


@settings(max_examples=60, deadline=None)
@given(program=PROGRAMS, seed=st.integers(0, 1000))
def test_the_same_seed_repeats_the_same_run(program, seed):
    assert history(program, seed) == history(program, seed)


@settings(max_examples=60, deadline=None)
@given(program=PROGRAMS, seed=st.integers(0, 1000))
def test_virtual_time_never_runs_backwards(program, seed):
    seen, _ = history(program, seed)

    times = [time for time, _, _ in seen]
    assert times == sorted(times)
    assert len(seen) == sum(map(len, program))
