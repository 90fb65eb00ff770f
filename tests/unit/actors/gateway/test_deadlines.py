"""Blocks that end at their deadline, or earlier by others, with one timer for all."""

import asyncio

import pytest

from rubato.actors.gateway.deadlines import Deadlines


async def test_blocks_that_take_too_long_end_in_the_order_in_which_they_began():
    deadlines, ended = Deadlines(0.01), []

    async def wait(number):
        with pytest.raises(TimeoutError):
            async with deadlines.block():
                await asyncio.sleep(60)
        ended.append(number)

    async with asyncio.TaskGroup() as tasks:
        for number in range(3):
            tasks.create_task(wait(number))
            await asyncio.sleep(0)
    async with asyncio.TaskGroup() as tasks:  # the timer is set anew
        tasks.create_task(wait(3))

    assert ended == [0, 1, 2, 3]


async def test_a_block_that_is_over_in_time_is_left_alone():
    deadlines = Deadlines(0.02)
    async with deadlines.block() as block:
        pass

    await asyncio.sleep(0.04)

    assert not block.is_cut


@pytest.mark.parametrize("within_s", [None, 60.0])
async def test_a_block_may_be_cut_off_before_and_once_is_enough(within_s):
    deadlines, loop = Deadlines(within_s), asyncio.get_running_loop()

    async def wait():
        async with deadlines.block() as block:
            loop.call_soon(block.cut)
            loop.call_soon(block.cut)
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await wait()


async def test_who_cancels_a_block_beside_is_not_told_of_its_deadline():
    deadlines, entered = Deadlines(60.0), asyncio.get_running_loop().create_future()

    async def wait():
        async with deadlines.block() as block:
            entered.set_result(block)
            await asyncio.sleep(60)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(wait())
        block = await entered
        block.cut()
        task.cancel()

    assert task.cancelled()
