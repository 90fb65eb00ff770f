"""Figures and waits: what a snapshot says, how idleness is measured, and what is said about a wait while it lasts."""

import asyncio
import math
import os

import pytest

from rubato.runtime.observe import figures as module
from rubato.runtime.observe.figures import (
    MAX_VIEWS,
    REFUSAL_S,
    Metrics,
    Waits,
    WaitView,
    busy_seconds,
    cpu_seconds,
    measure_loop_lag,
    percentile,
)
from rubato.sim.virtual import run_virtual

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def test_counts_add_up_and_gauges_keep_the_newest_value():
    async def main():
        metrics = Metrics()

        metrics.count("rollout/finished")
        metrics.count("rollout/finished", 2)
        metrics.gauge("queue/ready/depth", 3.0)
        metrics.gauge("queue/ready/depth", 4.0)

        found = metrics.snapshot()
        assert found["rollout/finished"] == 3.0
        assert found["queue/ready/depth"] == 4.0

    run_virtual(main)


def test_a_distribution_is_told_by_median_p99_mean_and_maximum():
    async def main():
        metrics = Metrics()

        for value in range(1, 101):
            metrics.observe("wall_s", value)

        found = metrics.snapshot()
        assert (found["wall_s_p50"], found["wall_s_p99"], found["wall_s_max"]) == (50.0, 99.0, 100.0)
        assert found["wall_s_mean"] == 50.5

    run_virtual(main)


def test_old_values_leave_a_distribution():
    async def main():
        metrics = Metrics()
        metrics.observe("wall_s", 1e9)

        for _ in range(module.RECENT):
            metrics.observe("wall_s", 1.0)

        assert metrics.snapshot()["wall_s_max"] == 1.0

    run_virtual(main)


def test_values_that_are_not_finite_are_counted_and_never_stored():
    async def main():
        metrics = Metrics()

        metrics.gauge("policy/kl", math.nan)
        metrics.observe("policy/kl", math.inf)

        found = metrics.snapshot()
        assert found["metrics/not_finite"] == 2.0
        assert all(math.isfinite(value) for value in found.values())
        assert not any(name.startswith("policy") for name in found)

    run_virtual(main)


def test_names_are_bounded_and_the_overflow_is_counted():
    async def main():
        metrics = Metrics()

        for number in range(module.MAX_NAMES + 10):
            metrics.count(f"name/{number}")

        found = metrics.snapshot()
        assert found["metrics/names_dropped"] == 10.0
        assert len(found) <= module.MAX_NAMES + 4

    run_virtual(main)


def test_overlapping_busy_tasks_count_once():
    async def main():
        metrics = Metrics()

        async def work(seconds):
            with metrics.busy():
                await asyncio.sleep(seconds)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(work(1.0))
            tasks.create_task(work(2.0))
        await asyncio.sleep(2.0)

        assert metrics.idle() == 0.5

    run_virtual(main)


def test_idle_looks_back_over_the_window_only():
    async def main():
        metrics = Metrics()
        metrics.idle()
        await asyncio.sleep(100.0)
        metrics.idle()

        with metrics.busy():
            for _ in range(40):
                await asyncio.sleep(0.5)
                metrics.idle()

            assert metrics.idle() == 0.0
        assert 0.8 < metrics.snapshot()["idle_total"] < 0.9

    run_virtual(main)


def test_an_actor_that_never_was_busy_is_idle():
    async def main():
        assert Metrics().idle() == 1.0

    run_virtual(main)


def test_loop_lag_is_measured_in_milliseconds():
    async def main():
        metrics = Metrics()
        async with asyncio.TaskGroup() as tasks:
            probe = tasks.create_task(measure_loop_lag(metrics))
            await asyncio.sleep(1.0)
            probe.cancel()

        assert metrics.snapshot()["loop/lag_p99"] == 0.0

    run_virtual(main)


def test_percentile_takes_the_nearest_rank():
    ordered = [1.0, 2.0, 3.0, 4.0]

    assert [percentile(ordered, share) for share in (0.0, 0.25, 0.5, 0.99, 1.0)] == [1.0, 1.0, 2.0, 4.0, 4.0]


def process(proc, pid, ticks, children=()):
    task = proc / str(pid) / "task" / str(pid)
    task.mkdir(parents=True)
    (proc / str(pid) / "stat").write_text(f"{pid} (a (name) S) S 1 {'0 ' * 9}{ticks} 1 0 0\n")
    (task / "children").write_text("".join(f"{child} " for child in children))


def test_a_process_counts_with_what_it_started_but_not_with_other_actors(tmp_path):
    process(tmp_path, 10, 99, children=(11, 12))
    process(tmp_path, 11, 199)
    process(tmp_path, 12, 299, children=(13,))
    process(tmp_path, 13, 399)

    found = cpu_seconds({"node-1": 10, "engine-1": 11}, tmp_path)

    assert found == {"node-1": pytest.approx((100 + 300 + 400) * TICK_S), "engine-1": pytest.approx(200 * TICK_S)}


def test_what_is_gone_or_shares_a_process_is_left_out(tmp_path):
    process(tmp_path, 10, 99)
    process(tmp_path, 11, 99)

    assert set(cpu_seconds({"a": 10, "b": 10, "c": 11, "d": 12}, tmp_path)) == {"c"}


def test_the_host_is_busy_with_all_but_idling_and_waiting_for_disks(tmp_path):
    (tmp_path / "stat").write_text("cpu  100 20 30 4000 500 6 7 8 0 0\ncpu0 1 1 1 1\n")

    assert busy_seconds(tmp_path) == pytest.approx((100 + 20 + 30 + 6 + 7) * TICK_S)
    assert busy_seconds(tmp_path / "none") is None


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

        assert [(view.stage, view.what, view.holder, view.age_s) for view in shown] == [("refused", "Generate", "engine-1", 1.0)]
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
