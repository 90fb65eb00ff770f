"""tools/chaos_cluster.py: whose process is whose, and which samples are another job's."""

from tools.chaos_cluster import Lab, Victim, _role, compared
from tools.chaos_job import Process


def test_a_sample_that_was_trained_in_the_same_step_with_another_reward_is_another_job_s():
    alone = {("g0.0", 1): 3.0, ("g0.1", 1): 4.0, ("g1.0", 2): 5.0}

    assert compared({("g0.0", 1): 3.0, ("g0.1", 1): 4.0, ("g1.0", 3): 0.0}, alone) == (2, [])
    assert compared({("g0.0", 1): 3.0, ("g0.1", 1): 6.0}, alone) == (2, ["g0.1"])


def test_processes_are_told_apart_by_the_launcher_that_they_are_below(tmp_path):
    lab = Lab(tmp_path, 10, ())
    lines = [
        (2, 1, "python -m rubato.runtime.cli launch cluster.yaml"),
        (3, 2, f"python -m rubato.runtime.node {lab.folder} scheduler-1"),
        (4, 3, f"python -m rubato.actors.cluster.job {lab.run_of('b')} cluster.job=b"),
        (5, 4, f"python -m rubato.runtime.node {lab.run_of('b')} env_manager-2"),
        (6, 5, "python -m rubato.runtime.pool.worker"),
        (7, 4, "/usr/bin/redis-server unixsocket:/tmp/x"),
        (8, 2, "/usr/bin/redis-server unixsocket:/tmp/y"),
        (9, 1, "python -m rubato.runtime.cli cluster start"),
    ]
    tree = {pid: Process(pid, parent, "S", line.split()) for pid, parent, line in lines}

    found = [Victim(role, lab._owner(tree, each), each.pid) for each in tree.values() if (role := _role(tree, each))]

    assert found == [
        ("launcher", "cluster", 2),
        ("scheduler", "cluster", 3),
        ("launcher", "b", 4),
        ("env_manager", "b", 5),
        ("worker", "b", 6),
        ("Store", "b", 7),
        ("Store", "cluster", 8),
    ]
