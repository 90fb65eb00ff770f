"""Several jobs on one cluster, as a user has them: real processes, killed at bad moments, and sentences for mistakes."""

import asyncio
import json
import re
from pathlib import Path

import msgspec
import pytest

from rubato.actors.cluster.board import read_board
from rubato.runtime.launch.card import read_card
from rubato.runtime.launch.shared import open_shared
from rubato.runtime.store.redis import RedisStore
from rubato.runtime.store.store import StoreUnavailable
from tests.jobs import left_behind
from tests.shared_jobs import Lab, until, write_jobs

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def lab(tmp_path):
    write_jobs(tmp_path, "a", "b", "c")
    lab = Lab(tmp_path)
    yield lab
    if (lab.folder / "run.json").exists():
        lab.run("cluster", "stop", "C")
    assert left_behind(tmp_path) == []


@pytest.mark.nightly
def test_two_jobs_finish_though_scheduler_and_launcher_are_killed_between(lab):
    said = lab.start()
    assert "submit with: rubato submit JOB.yaml --cluster" in said
    lab.submit("a", "run.steps=80")
    lab.submit("b", "run.steps=40")
    lab.reached("a", 3)
    lives = [lab.pid_of("rubato.actors.cluster.job"), lab.pid_of("trainer-1")]

    lab.kill(lab.pid_of("scheduler-1"))
    lab.reached("b", 3)
    lab.kill(read_card(lab.folder).launcher_pid)
    down = lab.run("submit", "c.yaml", "--cluster", "C")
    assert Path(f"/proc/{lives[0]}").exists(), "a job goes on while there is no scheduler"
    lab.start()

    lab.is_at("a", "done")
    lab.is_at("b", "done")
    assert lab.steps("a") == list(range(1, 81)), "no step is lost or made twice"
    assert lab.steps("b") == list(range(1, 41)), "no step is lost or made twice"
    assert down.code == 2
    assert "is down: nothing was submitted. Start it again with: rubato cluster start" in down.err
    assert lab.ok("cluster", "stop", "C").startswith("stopped. Go on with: rubato cluster start")
    assert left_behind(lab.place) == []


def test_what_a_stop_saved_the_next_start_goes_on_with(lab):
    lab.start()
    lab.submit("a", "run.steps=60", "phases.rollout_s=0.2")
    lab.reached("a", 3)

    lab.ok("cluster", "stop", "C")
    assert left_behind(lab.place) == []
    stopped_at = len(lab.steps("a"))
    lab.ok("cluster", "start", "C", "scheduler.slo=3")
    lab.reached("a", stopped_at + 3)
    assert asyncio.run(read_board(lab.folder)).book.section.slo == 3

    assert lab.steps("a") == list(range(1, len(lab.steps("a")) + 1))


@pytest.mark.nightly
def test_a_job_that_crashes_is_its_own_trouble_and_comes_back_after_its_last_step(lab):
    lab.start()
    lab.submit("a", "run.steps=30")
    lab.submit("b", "run.steps=6", "phases.crash_at=2")
    lab.submit("c", "phases.never=true")

    lab.is_at("b", "done")
    lab.is_at("a", "done")
    lab.is_at("c", "failed")

    assert lab.steps("a") == list(range(1, 31))
    assert lab.steps("b") == list(range(1, 7))
    log = (lab.folder / "cluster.log").read_text()
    assert "job c is failed: crashed 4 times without finishing a step (exit 1: it crashed before its first step)" in log
    assert "job b is queued: crashed (exit 1: it crashed, as it was told to); it goes on after step 2" in log


def test_jobs_are_cancelled_where_they_are(lab):
    lab.start()
    lab.submit("a", "run.steps=500")
    lab.submit("b", "run.steps=500")
    lab.reached("a", 2)

    assert lab.ok("cancel", "C", "a") == "cancelled: it drains and saves\n"
    lab.is_at("a", "cancelled")
    lab.reached("b", 2)
    lab.ok("stop", "--run", lab.folder / "jobs" / "b")
    lab.is_at("b", "cancelled")

    again = lab.run("cancel", "C", "a")
    unknown = lab.run("cancel", "C", "z")
    assert again.code == unknown.code == 2
    assert again.err.startswith("a is over already: cancelled after step")
    assert unknown.err == "z is no job of this cluster. Its jobs: a, b.\n"


def test_what_can_t_be_is_refused_in_a_sentence_and_nothing_is_lost(lab):
    nobody = lab.run("submit", "a.yaml", "--cluster", "C")
    lab.start()
    lab.submit("a", "run.steps=500")
    (lab.place / "bad.yaml").write_text("run: {name: x}\nactors: {engine: {class: 'worker.py:Engine'}}\n")

    refused = {
        "holds no cluster: nothing was submitted": nobody,
        "job a is there already (running) in this cluster": lab.run("submit", "a.yaml", "--cluster", "C"),
        "--slo 0.5: a job's bound is at least 1": lab.run("submit", "b.yaml", "--cluster", "C", "--slo", "0.5"),
        "bad.yaml has no trainer": lab.run("submit", "bad.yaml", "--cluster", "C"),
        "is up already": lab.run("cluster", "start", "cluster.yaml", "--dir", "C"),
        "cluster.rollout_pool=fast is no pool that a job can choose": lab.run(
            "submit", "b.yaml", "--cluster", "C", "cluster.rollout_pool=fast"
        ),
        "cluster.pool is not a key": lab.run("submit", "b.yaml", "--cluster", "C", "cluster.pool=mine"),
        "is no cluster's config": lab.run("cluster", "start", "b.yaml", "--dir", "D"),
    }

    for sentence, ended in refused.items():
        assert ended.code == 2, sentence
        assert sentence in ended.err
        assert "Traceback" not in ended.err
    assert lab.state("a") == "running"
    assert len([line for line in lab.ok("jobs", "C").splitlines() if " running " in line]) == 1


def test_real_jobs_take_turns_and_one_that_never_fits_is_told_so(lab):
    (lab.place / "cluster.yaml").write_text((CONFIGS / "cluster.yaml").read_text())
    quick = ["engine.scripted.token_s=0.01", "train.scripted.step_s=0.2", "run.steps=3"]
    lab.start()
    for name in "ab":
        lab.ok("submit", CONFIGS / "cluster_job.yaml", "--cluster", "C", f"run.name={name}", "--slo", "3", *quick)
    large = "engine.pace={hardware: h20, model: qwen3-8b}"
    refused = lab.run("submit", CONFIGS / "cluster_job.yaml", "--cluster", "C", "run.name=c", large)
    ahead = lab.run("submit", CONFIGS / "cluster_job.yaml", "--cluster", "C", "run.name=c", "staleness.alpha=1")

    by_hand = ["launch", CONFIGS / "cluster_job.yaml", f"cluster.dir={lab.folder}"]
    mistyped = lab.run(*by_hand, "cluster.rollout_pool=rolout-0", "cluster.training_pool=training-0")
    left_out = lab.run(*by_hand, "cluster.rollout_pool=rollout-0")

    lab.is_at("a", "done")
    lab.is_at("b", "done")
    held = asyncio.run(read_board(lab.folder)).events

    for pool in ("rollout-0", "training-0"):
        holders = [event.stand.job for event in held[pool] if event.kind == "holds"]
        assert min(holders.count("a"), holders.count("b")) >= 3
    for typo, near, ended in (("rollout_pool=rolout-0", "rollout-0", mistyped), ("training_pool=training", "training-0", left_out)):
        assert ended.code == 2
        assert (
            f"cluster.{typo}: the cluster in {lab.folder} has no such pool. Did you mean {near}? It has rollout-0, training-0.\n"
            in ended.err
        )
    assert lab.steps("a") == lab.steps("b") == [1, 2, 3]
    assert refused.code == ahead.code == 2
    assert re.match(r"job c needs .* GB of host memory on a rollout node, which has 8\.0 GB\.\n", refused.err)
    assert "set staleness.alpha=0" in ahead.err


@pytest.mark.nightly
def test_the_monitor_shows_a_cluster(lab):
    lab.start()
    lab.submit("a", "run.steps=500", "phases.rollout_s=1")
    lab.submit("b", "run.steps=500", "phases.rollout_s=1")
    lab.reached("b", 2)

    table, data = lab.ok("monitor", "C", "--once"), json.loads(lab.ok("monitor", "C", "--json"))

    assert "group 0: a, b on rollout 0 · 7.13 $/h" in table
    assert "rollout-0" in table
    assert [job["name"] for job in data["jobs"]] == ["a", "b"]
    assert data["permits"].keys() >= {"rollout-0", "training-0"}
    waits = re.compile(r"job [ab] waits [\d.]+ s for rollout-0: [ab] holds it")
    until(lambda: waits.search(lab.ok("monitor", "C", "--why")), "a wait across jobs")


def test_only_who_has_the_token_submits(lab):
    lab.start()
    token = lab.folder / "token"
    mine = token.read_text()
    assert token.stat().st_mode & 0o777 == 0o600

    token.chmod(0o644)
    open_to_all = lab.run("submit", "a.yaml", "--cluster", "C")
    token.chmod(0o600)
    token.write_text("guessed")
    guessed = lab.run("submit", "a.yaml", "--cluster", "C")
    token.write_text(mine)

    assert open_to_all.code == guessed.code == 2
    assert "may be read by others (mode 644)" in open_to_all.err
    assert "the token is not this cluster's" in guessed.err
    assert lab.ok("jobs", "C").startswith("no jobs")


def test_a_job_reaches_permits_and_nothing_else_of_cluster_or_other_jobs(lab):
    lab.start()
    lab.submit("a", "run.steps=500")
    lab.submit("b", "run.steps=500")
    lab.reached("b", 1)
    cluster, a, b = read_card(lab.folder), *(read_card(lab.folder / "jobs" / name) for name in "ab")

    permits, others = asyncio.run(what_a_job_sees(lab.folder, [cluster.id, b.id]))

    assert permits
    assert others == ["nothing", "refused", "refused"]
    assert len({cluster.state_url, a.state_url, b.state_url}) == 3
    assert len({cluster.sockets, a.sockets, b.sockets}) == 3
    for path in (lab.folder / "cluster.json", lab.folder / "submitted" / "a.yaml", lab.folder / "jobs" / "b" / "run.json"):
        assert path.stat().st_mode & 0o777 == 0o600
    for path in (lab.folder / "submitted", lab.folder / "jobs", Path(b.sockets)):
        assert path.stat().st_mode & 0o777 == 0o700


async def what_a_job_sees(cluster: Path, scopes: list[str]) -> tuple[dict[str, bytes], list[str]]:
    """Of the cluster by the address that jobs are given: permits, then job records beside them, and any key of other scopes."""
    way = msgspec.json.decode((cluster / "cluster.json").read_bytes())["state_url"]
    shared = open_shared(cluster)
    permits = await shared.scan("permits/line/")
    found = ["something" if await shared.scan("jobs/") else "nothing"]
    await shared.close()
    for scope in scopes:
        store = RedisStore(way, scope, patience_s=1)
        try:
            await store.scan("")
            found.append("something")
        except StoreUnavailable:
            found.append("refused")
        await store.close()
    return permits, found
