"""Waits: what is said about a wait while it lasts."""

import asyncio

import pytest

from runtime.observe.figures import MAX_VIEWS, REFUSAL_S, Waits, WaitView
from sim.virtual import run_virtual


def test_a_wait_is_seen_with_its_age_until_its_block_ends():
    async def main():
        waits, loop = Waits(), asyncio.get_running_loop()

        with waits.on("batch 42", detail="29 of 32 groups", holder="sample_buffer", limit="train.claim_s=60") as wait:
            await asyncio.sleep(2.5)
            wait.update(detail="30 of 32 groups")
            during = waits.snapshot(loop.time())

        limit = "train.claim_s=60"
        assert during == [WaitView("batch 42", "30 of 32 groups", "sample_buffer", 2.5, limit, "batch 42", 2.5)]
        assert waits.snapshot(loop.time()) == []

    run_virtual(main)


def test_a_wait_that_fails_is_over_too():
    async def main():
        waits = Waits()

        async def wait_in_vain():
            async with asyncio.timeout(1.0):
                with waits.on("nothing"):
                    await asyncio.Event().wait()

        with pytest.raises(TimeoutError):
            await wait_in_vain()

        assert waits.snapshot(1.0) == []

    run_virtual(main)


def test_of_many_waits_the_oldest_are_shown():
    async def main():
        waits = Waits()
        for number in range(MAX_VIEWS + 10):
            waits.on(f"w{number}").__enter__()
            await asyncio.sleep(1.0)

        shown = waits.snapshot(asyncio.get_running_loop().time())

        assert [view.what for view in shown] == [f"w{number}" for number in range(MAX_VIEWS)]

    run_virtual(main)


def test_a_stage_tells_how_many_are_in_it_on_average_and_how_long_the_longest_took():
    async def main():
        waits, loop = Waits(), asyncio.get_running_loop()
        for seconds in (1.0, 3.0):
            with waits.on("t1", stage="env.step"):
                await asyncio.sleep(seconds)
        with waits.on("t2", stage="env.step"):
            await asyncio.sleep(1.0)

            (stage,) = waits.stages(loop.time())

        assert (stage.stage, stage.num, stage.load, stage.longest_s) == ("env.step", 1, 1.0, 3.0)

    run_virtual(main)


def test_what_moves_is_quiet_since_it_last_moved_and_its_gaps_count_not_its_age():
    async def main():
        waits, loop = Waits(), asyncio.get_running_loop()
        with waits.on("r1", stage="decode") as wait:
            for _ in range(10):
                await asyncio.sleep(1.0)
                wait.moved()
            await asyncio.sleep(0.5)

            (view,), (stage,) = waits.snapshot(loop.time()), waits.stages(loop.time())

        assert (view.age_s, view.quiet_s, stage.longest_s) == (10.5, 0.5, 1.0)

    run_virtual(main)


def test_a_refusal_is_shown_until_the_holder_answers_or_some_seconds_passed():
    async def main():
        waits, loop = Waits(), asyncio.get_running_loop()
        waits.refused("engine-1", "Generate", "it is draining")
        await asyncio.sleep(1.0)
        shown = waits.snapshot(loop.time())

        assert [(view.stage, view.what, view.holder, view.age_s) for view in shown] == [
            ("refused", "Generate", "engine-1", 1.0)
        ]
        await asyncio.sleep(REFUSAL_S)
        assert waits.snapshot(loop.time()) == []
        waits.refused("engine-1", "Generate", "it is draining")
        waits.answered("engine-1")
        assert waits.snapshot(loop.time()) == []

    run_virtual(main)


def test_a_crowd_in_one_stage_hides_no_other():
    async def main():
        waits, loop = Waits(), asyncio.get_running_loop()
        for number in range(MAX_VIEWS * 2):
            waits.on(f"t{number}", stage="generate").open()
        await asyncio.sleep(1.0)
        waits.on("late", stage="score").open()

        shown = waits.snapshot(loop.time())

        assert len(shown) == MAX_VIEWS
        assert "late" in [view.what for view in shown]

    run_virtual(main)


def test_what_changes_by_itself_is_asked_for_at_each_look():
    async def main():
        waits, loop, ready = Waits(), asyncio.get_running_loop(), [1]
        with waits.on("batch 1").described_by(lambda: (f"{len(ready)} groups", "env_manager-1")):
            ready.append(2)

            (view,) = waits.snapshot(loop.time())

        assert (view.detail, view.holder) == ("2 groups", "env_manager-1")

    run_virtual(main)


def test_a_wait_may_end_after_its_loop():
    async def main():
        waits = Waits()
        return waits, waits.on("nothing").open()

    waits, wait = run_virtual(main)
    wait.close()

    assert waits.open == {}
