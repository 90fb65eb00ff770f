"""A cluster whose processes are killed at drawn moments: no job is lost, none makes a step twice, and nothing is left running."""

import os
import random
import time

import pytest

from rubato.runtime.launch.card import read_card
from tests.jobs import left_behind
from tests.shared_jobs import Lab, write_jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEED = int(os.environ.get("CLUSTER_SEED", "1"))
KILLS, STEPS = 8, 60
VICTIMS = ("scheduler-1", "redis-server", "launcher", "jobs/a cluster", "jobs/b cluster", "jobs/c trainer-1")


def test_no_job_is_lost_whoever_is_killed(tmp_path):
    write_jobs(tmp_path, "a", "b", "c")
    lab, rng = Lab(tmp_path), random.Random(SEED)
    lab.start()
    for name in "abc":
        lab.submit(name, f"run.steps={STEPS}")

    for _ in range(KILLS):
        time.sleep(rng.uniform(0.2, 3.0))  # noqa: TID251 - moments are what is drawn
        victim = rng.choice(VICTIMS)
        print(f"kill {victim}")
        if victim == "launcher":
            lab.kill(read_card(lab.folder).launcher_pid)
            lab.ok("cluster", "start", "C")
        elif victim == "redis-server":
            lab.kill(lab.redis())
        elif pid := lab.find(victim):
            lab.kill(pid)

    for name in "abc":
        lab.is_at(name, "done")
        assert lab.steps(name) == list(range(1, STEPS + 1))
    lab.ok("cluster", "stop", "C")
    assert left_behind(tmp_path) == []
