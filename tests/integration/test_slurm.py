"""A run under Slurm, as its user starts it: `rubato slurm`, sbatch, and what a cluster does to its jobs. The cluster is real, and the tests' own."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import SMALL, clean_environment, left_behind, rubato, write_model
from tests.slurm_cluster import SlurmCluster, missing, slurm_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FAR = "launch.hosts={far: {pools: {env_manager: 1}}}"
LONG = ("run.steps=100000", "run.lease_s=10", "engine.scripted.token_s=0.1")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    if lacking := missing():
        pytest.skip(f"Slurm is not here: {lacking}")
    with slurm_cluster({"n1": "", "n2": "", "n3": "", "n4": "Feature=h20"}) as cluster:
        cluster.environment |= {key: value for key, value in clean_environment().items() if key.startswith("PYTHON")}
        cluster.environment |= {"OMP_NUM_THREADS": "1"}
        yield cluster


class SlurmJob:
    """One job of the cluster, in a folder of its own."""

    def __init__(self, cluster: SlurmCluster, place: Path, *changes: str, spare: int = 1, alone: bool = True) -> None:
        self.cluster, self.place = cluster, place
        place.mkdir(exist_ok=True)
        (place / "small.yaml").write_text(SMALL)
        write_model(place / "model")
        if alone:
            cluster.until_idle()
        made = rubato(
            "slurm", "small.yaml", "--out", "job.sh", f"model.path={place}/model", *changes, "--spare", spare, "--run-dir", "run", cwd=place
        )
        assert made.code == 0, made.err
        self.id = cluster.run("sbatch", "--parsable", place / "job.sh").partition(";")[0]
        self.run = place / "run"

    def said(self) -> str:
        return (self.place / f"small-{self.id}.log").read_text()

    def rows(self) -> list[str]:
        path = self.run / "metrics.jsonl"
        return [line for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []

    def steps(self) -> list[int]:
        """The steps that were trained, in the order of their rows."""
        return [json.loads(row)["step"] for row in self.rows()]

    def hosts(self) -> list[dict]:
        told = rubato("hosts", "--run", self.run, "--json", cwd=self.place)
        return json.loads(told.out)["hosts"] if told.code == 0 else []

    def placed(self) -> dict[str, str]:
        """Step of each host that is in the run, by its node agent."""
        return {host["node"]: host["id"] for host in self.hosts() if host["backend"] == "slurm" and host["state"] == "ready"}

    def until(self, holds, what: str, limit_s: float = 60.0):
        try:
            self.cluster.wait_until(holds, what, limit_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()[:3000]}") from None

    def trains(self) -> None:
        """Return once it is further by some steps."""
        there = len(self.steps())
        self.until(lambda: len(self.steps()) > there + 3, f"more than {there + 3} steps")

    def over(self) -> None:
        """Return once Slurm no longer has it, and nothing of it is left."""
        self.until(lambda: not self.cluster.run("squeue", "-h", "-j", self.id, check=False), "the job is over")
        assert self.cluster.processes() == []
        assert left_behind(self.place) == []


def test_a_node_is_killed_and_the_run_goes_on_with_another_host(cluster, tmp_path):
    job = SlurmJob(cluster, tmp_path, *LONG, FAR)
    job.until(job.placed, "the host is placed")
    job.trains()
    ((agent, step),) = job.placed().items()
    node = cluster.steps()[step]

    cluster.kill_node(node)
    job.until(lambda: job.placed().keys() - {agent}, "another host is placed")
    (again,) = job.placed().keys() - {agent}
    there = cluster.steps()[job.placed()[again]]
    job.trains()

    assert there != node
    assert "far-1 is gone (lost)" in job.said()
    cluster.run("scancel", "--batch", "--signal=TERM", job.id)
    job.over()


@pytest.mark.nightly
def test_a_job_whose_first_node_is_lost_is_queued_again_and_goes_on_without_a_gap_and_cancelled_it_leaves_nothing(cluster, tmp_path):
    job = SlurmJob(cluster, tmp_path, *LONG, FAR)
    job.until(job.placed, "the host is placed")
    job.trains()

    cluster.kill_node("n1", noticed=True)
    job.until(lambda: job.said().count("rubato · run") == 2, "it is resumed")
    there = len(job.steps())
    job.until(job.placed, "the host is placed again")
    job.trains()
    cluster.run("scancel", job.id)
    job.over()

    assert job.steps() == list(range(1, len(job.steps()) + 1))
    assert len(job.steps()) > there


def test_hosts_lie_on_nodes_that_are_what_they_need_and_a_signal_drains_the_job(cluster, tmp_path):
    job = SlurmJob(cluster, tmp_path, *LONG, "launch.hosts={far: {pools: {env_manager: 1}, labels: [h20]}}", spare=0)
    job.until(job.placed, "the host is placed")

    assert list(cluster.steps().values()) == ["n4"]

    cluster.run("scancel", "--batch", "--signal=TERM", job.id)  # as Slurm does it by --signal=B:TERM@S
    job.over()

    assert "stopped. Go on with: rubato launch --resume" in job.said()


@pytest.mark.nightly
def test_at_its_time_limit_a_job_drains_and_saves_and_one_that_is_to_be_done_is_queued_again_and_goes_on_without_a_gap(cluster, tmp_path):
    limit = (*LONG, "checkpoint.every=100000", "--sbatch=--time=1", "--grace", "10")
    once = SlurmJob(cluster, tmp_path / "once", *limit)
    again = SlurmJob(cluster, tmp_path / "again", *limit, FAR, "--until-done", spare=0, alone=False)
    again.until(again.placed, "the host is placed")
    again.trains()

    again.until(lambda: again.said().count("rubato · run") > 1, "its time is over, and it is resumed", 120.0)
    before = again.rows()
    again.until(again.placed, "the host is placed again")
    again.trains()
    cluster.run("scancel", "--batch", "--signal=TERM", again.id)
    again.over()
    once.over()

    assert again.rows()[: len(before)] == before
    for job in (once, again):
        assert job.steps() == list(range(1, len(job.steps()) + 1))
        assert "stopped. Go on with: rubato launch --resume" in job.said()
        assert "DUE TO TIME LIMIT" not in job.said()
    assert once.said().count("rubato · run") == 1


@pytest.mark.parametrize(
    ("changes", "why"), [((), "there is none here: SLURM_JOB_ID is not set"), (("launch.address=n1",), "launch.address=n1 is no job's id")]
)
def test_outside_of_an_allocation_nothing_is_launched(changes, why, tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "small.yaml").write_text(SMALL)

    done = rubato("launch", "small.yaml", FAR, "bus.host=127.0.0.1", "launch.backend=slurm", *changes, "--run-dir", "run", cwd=tmp_path)

    assert done.code == 2
    assert done.err.startswith(
        f"launch.backend=slurm needs an allocation, and {why}. Make a script with: rubato slurm CONFIG --out job.sh\n"
    )
    assert not (tmp_path / "run").exists()
