"""Whether there is memory for one more worker."""

import pytest

from rubato.runtime.pool.pool import has_room, left_bytes, own_bytes

MIB = 1 << 20


@pytest.fixture
def system(tmp_path):
    """Of 1000 MiB, with an init of 5 MiB above a worker of 95 MiB; (proc, cgroup)."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    for pid, mib, children in ((7, 5, "8 "), (8, 95, "")):
        (proc / str(pid) / "task" / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "task" / str(pid) / "children").write_text(children)
        (proc / str(pid) / "smaps_rollup").write_text(f"00 [rollup]\nRss: 9 kB\nPss: {mib * 1024} kB\n")
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {1000 * 1024} kB\n")
    cgroup.mkdir()
    return proc, cgroup


def test_a_worker_counts_with_all_that_it_started(system):
    assert own_bytes(7, system[0]) == 100 * MIB


def test_half_of_what_is_left_must_hold_another_one(system):
    proc, cgroup = system

    assert has_room([7], proc, cgroup)
    (proc / "meminfo").write_text(f"MemAvailable: {199 * 1024} kB\n")
    assert not has_room([7], proc, cgroup)


def test_the_limit_of_a_container_counts_where_it_is_closer(system):
    proc, cgroup = system
    (cgroup / "memory.current").write_text(f"{700 * MIB}\n")

    (cgroup / "memory.max").write_text("max\n")
    assert left_bytes(proc, cgroup) == 1000 * MIB
    (cgroup / "memory.max").write_text(f"{800 * MIB}\n")
    assert left_bytes(proc, cgroup) == 100 * MIB


def test_where_nothing_is_known_there_is_room(tmp_path):
    assert has_room([7], tmp_path, tmp_path)
