"""Worker processes survive nothing; their parent survives everything."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rubato.runtime.pool.errors import BadResult, TargetMissing, UserCodeRaised, WorkerDied, WorkerKilled, WorkerTimeout
from rubato.runtime.pool.pool import WorkerPool
from rubato.runtime.pool.sandbox import WorkerLimits
from rubato.runtime.pool.values import Unsendable, decode, encode_call

USER = str(Path(__file__).with_name("user_code.py"))
NOTHING = encode_call()


@pytest.fixture
async def lines():
    return []


@pytest.fixture
async def pool(lines):
    pool = WorkerPool(workers=1, limits=WorkerLimits(max_reply_bytes=100_000), on_output=lines.append)
    yield pool
    await pool.close()


async def run(pool, function, *arguments, deadline_s=20.0):
    return decode(await pool.apply(f"{USER}:{function}", encode_call(*arguments), deadline_s=deadline_s))


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nothing tells of another process's end
            await asyncio.sleep(0.01)


async def test_instances_keep_their_state_and_methods_may_be_coroutines(pool):
    await pool.build("a", f"{USER}:Well", encode_call(start=10), deadline_s=20)
    await pool.build("b", f"{USER}:Well", NOTHING, deadline_s=20)

    sums = [
        decode(await pool.call("a", "add", encode_call(1), deadline_s=20)),
        decode(await pool.call("b", "add", encode_call(1), deadline_s=20)),
        decode(await pool.call("a", "add_later", encode_call(1), deadline_s=20)),
    ]

    assert sums == [11, 1, 12]


async def test_an_infinite_loop_is_killed_and_the_next_call_gets_a_new_worker(pool):
    with pytest.raises(WorkerTimeout, match=r"no answer within 0\.3 s"):
        await run(pool, "hang", deadline_s=0.3)

    assert decode(await pool.apply(f"{USER}:big", encode_call(3), deadline_s=20)) == "xxx"


async def test_bystanders_of_a_hung_call_end_as_killed_and_their_instances_are_gone(pool):
    await pool.build("a", f"{USER}:Well", NOTHING, deadline_s=20)

    hung, waiting = await asyncio.gather(
        pool.call("a", "hang", NOTHING, deadline_s=0.3), pool.call("a", "add", encode_call(1), deadline_s=20), return_exceptions=True
    )

    assert isinstance(hung, WorkerTimeout)
    assert isinstance(waiting, WorkerKilled)
    with pytest.raises(WorkerKilled):
        await pool.call("a", "add", encode_call(1), deadline_s=20)


async def test_a_call_that_waited_behind_a_slow_one_is_not_blamed_for_it(pool):
    await pool.build("a", f"{USER}:Well", NOTHING, deadline_s=20)
    slow = [pool.apply("time:sleep", encode_call(0.2), deadline_s=20) for _ in range(2)]

    *_, added = await asyncio.gather(*slow, pool.call("a", "add", encode_call(5), deadline_s=0.3))

    assert decode(added) == 5


@pytest.mark.parametrize(
    ("function", "ending"), [("leave", "ended with exit code 3"), ("crash", "died of SIGSEGV")], ids=["exit", "segfault"]
)
async def test_a_dying_process_ends_its_call_with_the_cause(pool, function, ending):
    with pytest.raises(WorkerDied, match=ending):
        await run(pool, function)

    assert await run(pool, "big", 1) == "x"


async def test_a_segfault_leaves_its_stack_in_the_output(pool, lines):
    with pytest.raises(WorkerDied):
        await run(pool, "crash")

    assert any("Segmentation fault" in line for line in lines)
    assert any("user_code.py" in line for line in lines)


async def test_an_exception_comes_back_with_type_text_and_place(pool, lines):
    with pytest.raises(UserCodeRaised) as caught:
        await run(pool, "fail")

    assert (caught.value.kind, caught.value.text) == ("ValueError", "ValueError('no such map')")
    assert caught.value.where.endswith("in fail")
    await until(lambda: any(line.startswith("Traceback") for line in lines))


async def test_an_exception_that_can_not_even_be_printed_is_still_named(pool):
    with pytest.raises(UserCodeRaised, match="BrokenRepr"):
        await run(pool, "fail_badly")


async def test_a_result_above_the_limit_is_refused_and_the_worker_lives_on(pool):
    with pytest.raises(BadResult, match="at most 100,000"):
        await run(pool, "big", 200_000)

    assert await run(pool, "big", 2) == "xx"


@pytest.mark.parametrize("function", ["circle"])
async def test_a_result_that_has_no_encoding_is_refused(pool, function):
    with pytest.raises(BadResult, match="can't be sent"):
        await run(pool, function)


async def test_odd_values_arrive_as_they_are_or_as_their_type_name(pool):
    assert str(await run(pool, "nan")) == "nan"
    assert await run(pool, "strange") == {"set": Unsendable("object"), "fine": 1}
    assert await run(pool, "safe_path") is True


@pytest.mark.parametrize("target", [f"{USER}:Nothing", "no_such_module_here:f", "nowhere/env.py:Env", "plain", "os:sep"])
async def test_a_target_that_leads_nowhere_is_told_apart_from_one_that_raises(pool, target):
    with pytest.raises(TargetMissing):
        await pool.apply(target, NOTHING, deadline_s=20)


async def test_a_constructor_that_raises_leaves_no_instance_behind(pool):
    with pytest.raises(UserCodeRaised, match="KeyError"):
        await pool.build("a", f"{USER}:BrokenInit", NOTHING, deadline_s=20)

    with pytest.raises(WorkerKilled):
        await pool.call("a", "step", NOTHING, deadline_s=20)


async def test_output_of_user_code_goes_to_the_log_and_a_flood_is_cut(pool, lines):
    await run(pool, "shout", "hello", 5_000)
    await until(lambda: len(lines) >= 100)

    assert lines[0] == "hello"
    assert len(lines) < 1_000


async def test_a_worker_imports_nothing_heavy_by_itself(pool):
    assert await run(pool, "modules") == ["asyncio"]  # user_code.py imports it


async def test_memory_is_bounded_where_asked():
    pool = WorkerPool(limits=WorkerLimits(memory_mb=512))

    with pytest.raises(UserCodeRaised, match="MemoryError"):
        await run(pool, "gulp", 1_000)
    small = await run(pool, "gulp", 1)

    await pool.close()
    assert small == 1 << 20


async def test_close_ends_the_process_and_what_user_code_started(pool):
    worker, child = await run(pool, "fork_and_return")
    assert is_running(worker)
    assert is_running(child)

    await pool.close()

    await until(lambda: not is_running(worker) and not is_running(child))


async def test_a_cancelled_call_does_not_disturb_the_next(pool):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await pool.apply("time:sleep", encode_call(0.3), deadline_s=20)

    assert await run(pool, "big", 1) == "x"


PARENT = """
import asyncio, sys
from rubato.runtime.pool.pool import WorkerPool
from rubato.runtime.pool.values import decode, encode_call

async def main():
    pool = WorkerPool()
    print(decode(await pool.apply("os:getpid", encode_call(), deadline_s=20)), flush=True)
    await pool.apply(sys.argv[1], encode_call(), deadline_s=100)

asyncio.run(main())
"""


def start_and_kill_parent(busy_with):
    root = Path(__file__).resolve().parents[2]
    command = (sys.executable, "-c", PARENT, busy_with)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as parent:
        worker = int(parent.stdout.readline())
        assert is_running(worker)
        os.kill(parent.pid, signal.SIGKILL)
    return worker


@pytest.mark.parametrize("busy_with", [f"{USER}:hang", "signal:pause"])
async def test_workers_die_with_a_killed_parent(busy_with):
    worker = start_and_kill_parent(busy_with)

    await until(lambda: not is_running(worker))
