"""Runs that `ray job submit` launches: the launcher is a job of the cluster that places the run's hosts."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_joining import _steps, _told, until
from tests.integration.test_ray_run import ALONE, namespace_of, rows_of
from tests.jobs import SMALL, Ended, clean_environment, left_behind, write_model
from tests.ray_cluster import JobNodes, job_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # hosts start one after the other beside the cluster, on two cores

LIMIT_S = 240.0
RUBATO = ("--", sys.executable, "-P", "-m", "rubato.runtime.cli")


@pytest.fixture(scope="module")
def cluster() -> Iterator[JobNodes]:
    pytest.importorskip("ray.dashboard.optional_deps", reason="needs ray with its job server (ray[default])", exc_type=ImportError)
    with job_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("place")
    write_model(place / "model")
    (place / "small.yaml").write_text(SMALL)
    return place


def ray_job(cluster: JobNodes, command: str, *arguments: object) -> Ended:
    """`ray job COMMAND …`, to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "job", command, "--address", cluster.job_server, *map(str, arguments)],
        cwd="/", env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


def test_a_quickstart_that_a_job_of_ray_launches_has_its_hosts_on_the_same_cluster_and_ends_well(place, cluster):
    run = place / "quickstart"
    short = ("run.steps=3", "eval.every=0", "eval.final_num_tasks=8", "train.batch_groups=4", "train.group_size=4", "report.finish=''")
    done = ray_job(cluster, "submit", *RUBATO, "launch", "quickstart", *short, *ALONE, "--run-dir", run)

    assert done.code == 0, done.out + done.err
    assert re.search(r"Job '\S+' succeeded", done.out)
    assert f"rubato · run quickstart · {run}" in done.out
    assert "Traceback" not in done.out
    assert rows_of(run) == [1, 2, 3]
    assert [line["host"] for line in _told(run, "placed")] == ["far-1"]
    assert "joined" in (run / "hosts" / "far.1.log").read_text()
    assert cluster.left(namespace_of(run)) == set()
    assert (left_behind(run), cluster.hosts_running()) == ([], [])


def test_a_job_of_ray_that_is_stopped_leaves_nothing_and_another_goes_on_with_its_run(place, cluster):
    run, far = place / "stopped", (f"model.path={place / 'model'}", *ALONE)
    begun = ray_job(
        cluster, "submit", "--no-wait", "--submission-id", "endless",
        *RUBATO, "launch", place / "small.yaml", "run.steps=100000", *far, "--run-dir", run,
    )  # fmt: skip
    assert begun.code == 0, begun.err
    until(lambda: _steps(run) > 1, "steps with the host of Ray")
    there = cluster.hosts_running()

    stopped = ray_job(cluster, "stop", "endless")
    until(
        lambda: not left_behind(run) and not cluster.hosts_running() and not cluster.left(namespace_of(run)), "the end of all that it had"
    )
    steps = _steps(run)
    again = ray_job(cluster, "submit", *RUBATO, "launch", "--resume", run, f"run.steps={steps + 5}")

    assert there != []
    assert stopped.code == 0, stopped.out + stopped.err
    assert "Job 'endless' was stopped" in stopped.out
    assert again.code == 0, again.out + again.err
    assert rows_of(run) == list(range(1, steps + 6))
    assert cluster.left(namespace_of(run)) == set()
    assert (left_behind(run), cluster.hosts_running()) == ([], [])
