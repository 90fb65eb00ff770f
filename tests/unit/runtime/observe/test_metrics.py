"""Metrics: what a snapshot says, how idleness is measured, and what processes cost."""

import asyncio
import math
import os

import pytest

from runtime.observe import figures as module
from runtime.observe.figures import Metrics, busy_seconds, cpu_seconds, measure_loop_lag, percentile
from sim.virtual import run_virtual

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
