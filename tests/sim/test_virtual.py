"""The virtual loop: jumps its clock, repeats from its seed, and explains a deadlock."""

import asyncio
import threading

import pytest

from rubato.runtime.observe.figures import Waits
from rubato.sim.virtual import Deadlock, VirtualLoop, run_virtual


def test_sleeping_costs_virtual_time_only():
    async def main():
        await asyncio.sleep(3600.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == 3600.0


def test_timeouts_fire_at_their_virtual_time():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == 5.0


def test_without_a_seed_tasks_run_first_in_first_out():
    assert interleaving(None) == [0, 1, 2, 0, 1, 2, 0, 1, 2]


def test_plain_callbacks_keep_their_order_under_any_seed():
    async def main():
        seen = []
        for number in range(20):
            asyncio.get_running_loop().call_soon(seen.append, number)
        await asyncio.sleep(1.0)
        return seen

    for seed in range(10):
        assert run_virtual(main, seed) == list(range(20))


def test_different_seeds_give_different_interleavings():
    assert len({tuple(interleaving(seed)) for seed in range(10)}) > 3


def interleaving(seed):
    async def main():
        seen = []

        async def work(number):
            for _ in range(3):
                seen.append(number)
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            for number in range(3):
                tasks.create_task(work(number))
        return seen

    return run_virtual(main, seed)


def test_a_deadlock_names_what_every_task_waits_for():
    async def main():
        waits = Waits()
        asyncio.get_running_loop().waits.append(("trainer-1", waits))

        async def claim_batch():
            with waits.on("batch 4", detail="3 of 4 groups", holder="sample_buffer"):
                await asyncio.Event().wait()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(claim_batch(), name="trainer-1.claim")
            tasks.create_task(asyncio.Queue().get(), name="engine-1.mailbox")

    with pytest.raises(Deadlock) as caught:
        run_virtual(main, 1)

    said = str(caught.value)
    assert said.startswith("deadlock at 0.000 s: nothing can happen any more")
    assert "trainer-1.claim: waits on a future in Event.wait" in said
    assert "claim_batch (test_virtual.py:" in said
    assert "engine-1.mailbox: waits on a future in Queue.get" in said
    assert "trainer-1 waits 0.0 s for batch 4 (3 of 4 groups, sample_buffer)" in said


def test_a_system_that_only_beats_for_ever_is_ended_by_the_limit():
    async def main():
        while True:  # noqa: ASYNC110 - a heartbeat
            await asyncio.sleep(1.0)

    with pytest.raises(Deadlock, match=r"virtual time ran past 100 s\n  main: waits on a future in sleep"):
        run_virtual(main, limit_s=100.0)


def test_tasks_that_wake_each_other_for_ever_are_ended_though_time_stands_still():
    async def main():
        async def passes(mine, other):
            while True:
                await mine.wait()
                mine.clear()
                other.set()

        ping, pong = asyncio.Event(), asyncio.Event()
        ping.set()
        await asyncio.sleep(3.0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(passes(ping, pong), name="ping")
            tasks.create_task(passes(pong, ping), name="pong")

    with pytest.raises(Deadlock, match=r"livelock at 3\.000 s: time stands still after 200000 callbacks") as caught:
        run_virtual(main, 1, limit_s=100.0)

    assert "passes (test_virtual.py:" in str(caught.value)


def test_executors_run_inline_and_hand_on_errors():
    async def main():
        loop = asyncio.get_running_loop()
        thread = await asyncio.to_thread(threading.get_ident)
        with pytest.raises(KeyError):
            await loop.run_in_executor(None, {}.__getitem__, "goal")
        return thread

    assert run_virtual(main) == threading.get_ident()


def test_real_input_and_output_is_refused():
    async def main():
        await asyncio.open_connection("127.0.0.1", 1)

    with pytest.raises(RuntimeError, match="on a virtual loop"):
        run_virtual(main)


def test_another_thread_cannot_call_in():
    loop, errors = VirtualLoop(), []

    def intrude():
        try:
            loop.call_soon_threadsafe(print)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join()
    loop.close()

    assert errors == ["another thread called into a virtual loop; use offload(), which runs inline there"]


def test_calling_threadsafe_from_the_loops_own_thread_works():
    async def main():
        done = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon_threadsafe(done.set_result, 3)
        return await done

    assert run_virtual(main) == 3


def test_tasks_left_behind_are_cancelled_and_may_clean_up():
    cleaned = []

    async def main():
        async def linger():
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(1.0)
                cleaned.append(asyncio.current_task().get_name())

        left = asyncio.get_running_loop().create_task(linger(), name="lingering")
        await asyncio.sleep(1.0)
        return left.done()

    assert run_virtual(main) is False
    assert cleaned == ["lingering"]


def test_an_error_in_a_callback_is_raised_not_logged():
    async def main():
        asyncio.get_running_loop().call_soon({}.__getitem__, "goal")
        await asyncio.sleep(1.0)

    with pytest.raises(KeyError):
        run_virtual(main)


def test_a_cancelled_timer_does_not_move_the_clock():
    async def main():
        loop = asyncio.get_running_loop()
        loop.call_later(50.0, print).cancel()
        await asyncio.sleep(1.0)
        return loop.time()

    assert run_virtual(main) == 1.0
