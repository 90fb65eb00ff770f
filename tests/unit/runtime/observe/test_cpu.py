import os

import pytest

from runtime.observe.cpu import busy_seconds, cpu_seconds

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


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
