"""Launched jobs that share pools: one that is killed in its phase frees its pool, and goes on from its last step where it is resumed."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rubato.actors.cluster.permits import permits_of
from rubato.actors.config import ClusterSection
from rubato.runtime.launch.shared import SharedScope, write_shared
from tests.jobs import SMALL, clean_environment, left_behind, rubato, write_model

pytestmark = pytest.mark.slow

STEPS = 3


@pytest.fixture
def place(tmp_path, packaged_redis) -> Path:
    """A folder with a cluster, and a config of a job that shares its pools."""
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "cluster").mkdir()
    write_shared(tmp_path / "cluster", SharedScope(tmp_path.name, packaged_redis))
    write_model(tmp_path / "model")
    return tmp_path


def arguments(place: Path, name: str, *overrides: str) -> list[str]:
    shared = (f"cluster.dir={place}/cluster", f"cluster.job={name}", "staleness.alpha=0")
    job = (f"model.path={place}/model", f"run.steps={STEPS}", "train.kind=scripted")
    return ["launch", "small.yaml", "--run-dir", name, *shared, *job, *overrides]


async def held(place: Path, job: str, *, wait_s: float = 60.0) -> list[str]:
    """Who held the rollout pool so far, in order, once `job` is among them."""
    async with asyncio.timeout(wait_s), permits_of(ClusterSection(dir=str(place / "cluster"))) as permits:
        while True:
            events = [event for _, event in await permits.events("rollout")]
            found = [event.stand.job for event in events if event.kind == "holds"]
            if job in found:
                return found
            await permits.events("rollout", len(events), wait_s=5)


@pytest.mark.timeout(240)
def test_a_job_that_is_killed_in_its_rollout_frees_the_pool_and_can_be_resumed(place):
    slow = ("engine.scripted.token_s=5", "rollout.max_new_tokens=50")
    with (place / "said").open("wb") as out:
        command = [sys.executable, "-m", "rubato.runtime.cli", *arguments(place, "a", *slow)]
        killed = subprocess.Popen(command, cwd=place, env=clean_environment(), stdout=out, stderr=out)
    try:
        asyncio.run(held(place, "a"))
    finally:
        killed.kill()
        killed.wait(30)

    other = rubato(*arguments(place, "b"), cwd=place)
    resumed = rubato("launch", "--run-dir", "a", "--resume", "engine.scripted.token_s=0", "rollout.max_new_tokens=2", cwd=place)

    assert other.code == 0, other.err + other.out
    assert resumed.code == 0, resumed.err + resumed.out
    turns = asyncio.run(held(place, "b"))
    assert turns[0] == "a"
    assert turns.count("b") == STEPS
    for name in ("a", "b"):
        samples, rows = (_lines(place / name / file) for file in ("samples.jsonl", "metrics.jsonl"))
        ended = [sample["trajectory_id"] for sample in samples]
        assert len(ended) == len(set(ended)) >= STEPS * 4
        assert [row["step"] for row in rows] == [1, 2, 3]
    for actor in ("engine-1", "trainer-1"):
        told = [line["event"] for line in _lines(place / "b" / "logs" / f"{actor}.jsonl")]
        assert told.count("model_loads") == 1
        assert told.count("woke") == STEPS
    assert left_behind(place) == []


def _lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]
