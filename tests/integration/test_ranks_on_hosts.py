"""A trainer whose ranks are on two hosts with addresses and files of their own: one is killed, one's host is cut off, and the job is saved."""

import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack

import pytest

from rubato.actors.checkpoints import checkpoint as checkpoints
from tests.integration.test_two_hosts import CUT_S, LIMIT_S, Job, lines, until
from tests.integration.test_two_hosts import hosts as hosts
from tests.jobs import LEARNING, clean_environment, left_behind, write_model

pytestmark = pytest.mark.slow

RANKS = "actors.trainer_rank={class: 'rubato.actors.ranks.rank:TrainRank', count: 1, restarts: 60}"


class RanksJob(Job):
    """The second host sees nothing of the folder of the first one's run."""

    def _command(self, host, arguments):
        words = super()._command(host, arguments)
        if host == self.hosts.first:
            return words
        hidden = f'mount -t tmpfs none "{self.run}" && exec "$@"'
        return [*words[:4], "unshare", "--mount", "sh", "-c", hidden, "sh", *words[4:]]

    def ranks(self):
        told = json.loads(self.ask("monitor", self.run, "--json") or '{"actors": []}')
        trainer = next((actor for actor in told["actors"] if actor["name"] == "trainer-1"), {})
        return {rank["rank"]: rank["pid"] for rank in trainer.get("ranks", [])}

    def more(self, num=2):
        at = len(self.steps())
        until(lambda: len(self.steps()) >= at + num, "more steps")


@pytest.mark.timeout(900)  # eleven processes start on two cores, and a cut must outlast a lease
def test_ranks_of_two_hosts_train_as_one_outlive_a_kill_and_a_cut_and_save_their_last_step(hosts, tmp_path):
    if shutil.which("unshare") is None:
        pytest.skip("a host with files of its own needs unshare (util-linux)")
    write_model(tmp_path / "model")
    (tmp_path / "small.yaml").write_text(LEARNING.replace("checkpoint: {every: 1,", "checkpoint: {every: 5,"))
    with ExitStack() as stack:
        job = RanksJob(hosts, tmp_path, stack)
        job.ask("keys", "new", "--run", job.run)
        more = ("train.mesh.shard=2", RANKS, "actors.trainer.restarts=30", "run.steps=100000", f"bus.host={hosts.address}")
        launcher = job.start(
            hosts.first, "first.log", "launch", "small.yaml", f"model.path={tmp_path / 'model'}", *more, "--run-dir", job.run
        )
        until(lambda: job.events("env_manager-1", "ready"), "the first host")
        token = job.ask("keys", "join-token", "--run", job.run).strip()
        joined = job.start(hosts.second, "second.log", "add", "trainer_rank", "--join", token, "--run-dir", "second")

        until(lambda: len(job.steps()) >= 6, "a checkpoint")
        before = job.ranks()
        os.kill(before[1], signal.SIGKILL)
        until(lambda: (now := job.ranks()) and len(now) == 2 and now != before, "other ranks")
        job.more()
        copied = list((tmp_path / "second" / "ranks").glob("step_*"))
        hosts.link("down")
        time.sleep(CUT_S)  # noqa: TID251 - the length of the cut is what is tested
        hosts.link("up")
        job.more()
        job.ask("stop", "--run", job.run)
        codes = launcher.wait(LIMIT_S), joined.wait(LIMIT_S)

    assert codes == (130, 130)
    steps = job.steps()
    assert steps == list(range(1, len(steps) + 1))
    terms = [event for event in job.events("trainer-1", "term_begun") if event["hosts"] == 2]
    assert len(terms) >= 3
    assert len(copied) == 1
    newest, passed_over = checkpoints.newest(job.run / "checkpoints")
    assert passed_over == []
    assert newest is not None
    assert checkpoints.check(newest).step == steps[-1]
    assert not left_behind(tmp_path)

    # One process goes on from what ranks of two hosts have saved.
    told = subprocess.run(
        job._command(hosts.first, ("launch", "--resume", str(job.run), "train.mesh.shard=1", f"run.steps={len(steps) + 2}")),
        cwd=tmp_path, env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert len(job.steps()) == len(steps) + 2


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_engines_of_several_hosts_bring_the_rows_of_each_host_from_where_they_were_written(hosts, tmp_path):
    if shutil.which("unshare") is None:
        pytest.skip("a host with files of its own needs unshare (util-linux)")
    write_model(tmp_path / "model")
    (tmp_path / "small.yaml").write_text(LEARNING.replace("engine: {kind: scripted, scripted: {token_s: 0.0}}", "engine: {kind: torch}"))
    with ExitStack() as stack:
        job = RanksJob(hosts, tmp_path, stack)
        job.ask("keys", "new", "--run", job.run)
        more = ("train.mesh.shard=2", RANKS, "actors.trainer.restarts=30", "run.steps=100000", f"bus.host={hosts.address}")
        launcher = job.start(
            hosts.first, "first.log", "launch", "small.yaml", f"model.path={tmp_path / 'model'}", *more, "--run-dir", job.run
        )
        until(lambda: job.events("env_manager-1", "ready"), "the first host")
        token = job.ask("keys", "join-token", "--run", job.run).strip()
        joined = job.start(hosts.second, "second.log", "add", "trainer_rank", "--join", token, "--run-dir", "second")
        engines = job.start(hosts.second, "third.log", "add", "engine", "--join", token, "--run-dir", "third")
        until(lambda: _swapped(job, "engine-2"), "weights on the third host")

        before = job.ranks()
        os.kill(before[1], signal.SIGKILL)
        until(lambda: (now := job.ranks()) and len(now) == 2 and now != before, "other ranks")
        for engine in ("engine-1", "engine-2"):
            until(lambda engine=engine: len([at for at in _swapped(job, engine) if at[0] > 1]) > 2, f"weights of the new term at {engine}")
        job.ask("stop", "--run", job.run)
        codes = launcher.wait(LIMIT_S), joined.wait(LIMIT_S), engines.wait(LIMIT_S)

    assert codes == (130, 130, 130)
    # The host of the trainer brings what it lacks for its engine; that of a rank alone brings nothing.
    assert _pulled(tmp_path / "first") == {"weights.part1"}
    assert _pulled(tmp_path / "second") == set()
    assert _pulled(tmp_path / "third") == {"weights", "weights.part0", "weights.part1"}
    assert not left_behind(tmp_path)


def _swapped(job, engine):
    """Term and version of what the engine took in."""
    return [(event["term"], event["version"]) for event in job.events(engine, "weights_swapped")]


def _pulled(run):
    """Blobs that this host brought, as a whole or as what changed."""
    found = [event for log in run.glob("logs/node-*.jsonl") for event in lines(log) if event["event"] == "blob_pulled"]
    return {event["blob"].removesuffix(".delta") for event in found}
