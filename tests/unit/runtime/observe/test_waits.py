"""Waits: what is said about a wait while it lasts."""

import asyncio

import pytest

from runtime.clock import run_virtual
from runtime.observe.waits import MAX_VIEWS, Waits, WaitView


def test_a_wait_is_seen_with_its_age_until_its_block_ends():
    async def main():
        waits, loop = Waits(), asyncio.get_running_loop()

        with waits.on("batch 42", detail="29 of 32 groups", holder="sample_buffer", limit="train.claim_s=60") as wait:
            await asyncio.sleep(2.5)
            wait.update(detail="30 of 32 groups")
            during = waits.snapshot(loop.time())

        assert during == [WaitView("batch 42", "30 of 32 groups", "sample_buffer", 2.5, "train.claim_s=60")]
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


def test_age_may_count_from_before_the_block():
    async def main():
        waits = Waits()
        await asyncio.sleep(10.0)

        with waits.on("member", age_from=4.0):
            assert waits.snapshot(10.0)[0].age_s == 6.0

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
