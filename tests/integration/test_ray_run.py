"""Runs whose hosts Ray places, as a user starts them: on three nodes of this host, over tcp with keys, without a shared folder."""

import json
import re
from pathlib import Path

import pytest

from tests.integration.test_joining import _steps, _told, hosts_of, started, until
from tests.jobs import SMALL, left_behind, rubato, write_model
from tests.ray_cluster import commands_running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # hosts start one after the other beside three nodes, on two cores

HOSTS = "launch.hosts={far: {pools: {engine: 1, env_manager: 1}}}"
ALONE = ("bus.host=127.0.0.1", "actors.engine.count=0", "actors.env_manager.count=0", "launch.backend=ray", HOSTS)
"""All engines and environments are on hosts that Ray places."""

LIMIT_S = 120.0


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("place")
    write_model(place / "model")
    (place / "small.yaml").write_text(SMALL)
    return place


def rows_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def namespace_of(run: Path) -> str:
    return f"rubato-{json.loads((run / 'run.json').read_text())['id']}"


def test_the_quickstart_ends_with_its_engine_and_environments_on_a_host_of_ray(place, ray_cluster, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)  # as `ray job submit` does
    run = place / "quickstart"
    short = ("run.steps=3", "eval.every=0", "eval.final_num_tasks=8", "train.batch_groups=4", "train.group_size=4", "report.finish=''")
    with started(place / "quickstart.log", "launch", "quickstart", *short, *ALONE, "--run-dir", run, cwd=place) as launcher:
        code = launcher.wait(3 * LIMIT_S)

    said = (place / "quickstart.log").read_text()
    assert code == 0, said
    assert rows_of(run) == [1, 2, 3]
    assert "Traceback" not in said
    assert [line["host"] for line in _told(run, "placed")] == ["far-1"]
    assert "joined" in (run / "hosts" / "far.1.log").read_text()
    assert ray_cluster.left(namespace_of(run)) == set()
    assert not left_behind(run)


def test_a_run_goes_on_when_a_node_is_killed_and_when_its_launcher_is(place, ray_cluster):
    run, far = place / "killed", (f"launch.address={ray_cluster.address}", f"model.path={place / 'model'}", *ALONE)
    with started(place / "first.log", "launch", "small.yaml", "run.steps=100000", *far, "--run-dir", run, cwd=place) as launcher:
        until(lambda: _steps(run) > 1, "steps with the host of Ray")
        (brought,) = (actors for name, actors in hosts_of(run).items() if name != "node-1")
        (placed,) = _told(run, "placed")
        ray_cluster.lose(ray_cluster.node_of(namespace_of(run), placed["id"]))
        until(lambda: len(_told(run, "placed")) > 1, "another host")
        before = _steps(run)
        until(lambda: _steps(run) > before + 2, "steps with the host that came in its place")
        launcher.kill()
    first = (place / "first.log").read_text()
    lost = _steps(run)

    resume = ("launch", "--resume", run, f"run.steps={lost + 5}")
    with started(place / "second.log", *resume, cwd=place) as launcher:
        code = launcher.wait(2 * LIMIT_S)
    second = (place / "second.log").read_text()

    assert sorted(brought) == ["engine-1", "env_manager-1"]
    assert re.search(r"the host far-1 is gone \(lost\) after .* s: its node .* went away, or Ray ended what it had there; asking", first)
    assert code == 0, second
    assert rows_of(run) == list(range(1, lost + 6))
    assert "Traceback" not in first + second
    assert ray_cluster.left(namespace_of(run)) == set()
    assert not left_behind(run)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "launch.hosts.far.gpus=99",
            r"no node of the Ray cluster has 99 GPUs: the most that one has is .* 1 GPUs\. Change launch\.hosts\.far .*",
        ),
        (
            "launch.hosts.far.labels=[h999]",
            r"no node of the Ray cluster has the label h999 \(its labels are .*\)\. Change launch\.hosts\.far .*",
        ),
        ("launch.address=127.0.0.1:1", r"no Ray cluster answers at launch\.address=127\.0\.0\.1:1 \(Connection refused\)\. Is it up, .*\?"),
    ],
)
def test_a_host_that_can_not_be_had_ends_the_launch_with_one_sentence(place, ray_cluster, tmp_path, more, said):
    address = f"launch.address={ray_cluster.address}"
    model = f"model.path={place / 'model'}"
    ended = rubato("launch", "small.yaml", model, address, *ALONE, more, "--run-dir", tmp_path / "run", cwd=place)

    assert ended.code == 1
    assert re.search(rf"^the host far-1 can't be had \(not placed\): {said}$", ended.err.splitlines()[-1])
    assert "Traceback" not in ended.err + ended.out
    assert commands_running() == []
