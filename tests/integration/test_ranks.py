"""Jobs whose trainer has ranks: what the monitor shows of them, and what a job does when one of them is killed or held still."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

from tests import held_ranks
from tests.chaos.test_kills import LIMIT_S, actors_of, rows_of, until
from tests.held_ranks import Holds
from tests.jobs import LEARNING, SMALL, clean_environment, left_behind, rubato, write_model

pytestmark = pytest.mark.slow

MORE = ["train.mesh.shard=2", "run.steps=100000", "actors.trainer.restarts=20"]


HELD = f'actors:\n  trainer_rank: {{class: "{held_ranks.__file__}:HeldRank", count: 2, restarts: 60}}\n'


@pytest.fixture
def job(tmp_path, request):
    """The folder of a run that goes on until the test ends."""
    trainer = getattr(request, "param", "scripted")
    config = LEARNING.replace("checkpoint: {every: 1,", "checkpoint: {every: 5,") if trainer == "torch" else SMALL
    environment = clean_environment()
    if trainer == "held":
        config = config.replace("actors:\n", HELD)
        environment |= Holds(tmp_path / "holds").environment
    (tmp_path / "small.yaml").write_text(config)
    model = f"model.path={write_model(tmp_path / 'model')}"
    command = [sys.executable, "-m", "rubato.runtime.cli", "launch", "small.yaml", model, *MORE, "--run-dir", str(tmp_path / "run")]
    with (tmp_path / "said").open("wb") as said:
        launcher = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=said, stderr=said, start_new_session=True)
    yield tmp_path / "run"
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGTERM)
    launcher.wait(60)
    assert left_behind(tmp_path / "run") == []


def ranks_of(run):
    """Rank → pid, as the monitor has it."""
    trainer = actors_of(run).get("trainer-1", {})
    return {rank["rank"]: rank["pid"] for rank in trainer.get("ranks", [])}


def hurt(run, number, rank, *, trainer=False):
    """Send it to a rank, and kill the trainer beside it; returns once the job trains again, with other ranks."""
    before = until(lambda: len(ranks := ranks_of(run)) == 2 and ranks, "two ranks")
    at, head = max(rows_of(run)), actors_of(run)["trainer-1"]["pid"]
    os.kill(before[rank], number)
    if trainer:
        os.kill(head, signal.SIGKILL)
    after = until(lambda: len(ranks := ranks_of(run)) == 2 and not {*ranks.values()} & {*before.values()} and ranks, "two other ranks")
    trains_on(run, at)
    return after


def trains_on(run, at):
    until(lambda: max(rows_of(run)) > at + 1, f"another step than {at}")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("job", [pytest.param("scripted", marks=pytest.mark.nightly), "torch"], indirect=True)
def test_a_job_outlives_a_rank_that_is_killed_and_one_that_is_held_still(job):
    until(lambda: len(rows_of(job)) >= 2, "the second step")

    hurt(job, signal.SIGKILL, 1)
    hurt(job, signal.SIGSTOP, 0)
    hurt(job, signal.SIGSTOP, 1, trainer=True)
    rubato("stop", "--run", job, cwd=job.parent)

    steps = rows_of(job)
    assert steps == list(range(1, len(steps) + 1))
    newest = max((job / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
    assert json.loads((newest / "manifest.json").read_text())["step"] == steps[-1]


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("job", ["held"], indirect=True)
def test_a_rank_is_lost_in_each_stage_and_no_sample_is_lost_or_trained_twice(job):
    holds = Holds(job.parent / "holds")
    until(lambda: len(rows_of(job)) >= 2, "the second step")

    for number in (signal.SIGKILL, signal.SIGSTOP):
        first, loading = holds.hold("forward", 0), holds.hold("load", 1)
        os.kill(holds.held("forward", 0, first, LIMIT_S), number)
        os.kill(holds.held("load", 1, loading, LIMIT_S), number)  # in the term that follows
        for stage, rank in (("reduce", 1), ("publish", 0), ("checkpoint", 1)):
            other = holds.hold(stage, 1 - rank)  # as a collective holds it
            handle = holds.hold(stage, rank)
            pid = holds.held(stage, rank, handle, LIMIT_S)
            holds.held(stage, 1 - rank, other, LIMIT_S)
            os.kill(pid, number)
            trains_on(job, max(rows_of(job)))
    rubato("stop", "--run", job, cwd=job.parent)

    steps = rows_of(job)
    assert steps == list(range(1, len(steps) + 1))
    ledger = [json.loads(line) for line in (job / "samples.jsonl").read_text().splitlines()]
    assert max(Counter(line["trajectory_id"] for line in ledger).values()) == 1
    assert {line["step"] for line in ledger if line["fate"] in ("trained", "zero_spread")} == set(steps)
