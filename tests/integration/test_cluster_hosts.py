"""A cluster on two hosts, network namespaces here: jobs train on one and roll out on the other, which is cut off, or whose processes of one
job stand still, for longer than a permit lasts. Needs root and iproute2.
"""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from rubato.actors.cluster.board import held_times, read_board
from rubato.runtime.observe.trace import wall_s
from tests.jobs import clean_environment, left_behind
from tests.namespaces import two_hosts
from tests.shared_jobs import Lab, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

CONFIGS = Path(__file__).parents[2] / "configs"
AWAY_S = 15.0
"""Longer than a permit that is not renewed (6 s), and than an actor's lease (10 s)."""
TTL_S, STEP_S, SLOTS = 6.0, 0.8, 16
"""Of a permit; one token, on a machine that has other things to do; sequences of an engine."""
STEPS = 6
JOB = (
    f"engine.kind='{Path(__file__).with_name('timed_engine.py')}:TimedEngine'",
    "engine.scripted={token_s: 0.4, stop_share: 0, vocab_size: 512}",
    "rollout.max_turns=1",
    "rollout.max_new_tokens=24",
    "train.scripted.step_s=1",
    f"run.steps={STEPS}",
    "model.path=model",
)
"""Rollouts of ten seconds, longer than a permit that is not renewed."""


class TwoHosts(Lab):
    """The cluster is on the first host, in `place`/C; what is of it on the second is in `place`/far."""

    def __init__(self, place, hosts):
        super().__init__(place)
        self.hosts = hosts
        self.joined = None

    def command(self, host, *words):
        return ["ip", "netns", "exec", host, sys.executable, "-m", "rubato.runtime.cli", *map(str, words)]

    def ok(self, *words):
        done = subprocess.run(self.command(self.hosts.first, *words), cwd=self.place, env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self):
        said = self.ok(
            "cluster", "start", CONFIGS / "cluster_hosts.yaml", "--dir", "C", f"bus.host={self.hosts.address}", "scheduler.slo=100"
        )
        token = self.ok("keys", "join-token", "--run", "C")
        with (self.place / "far.log").open("wb") as log:
            words = self.command(self.hosts.second, "add", "cluster_host", "--join", "-", "host.labels=[far]", "--run-dir", "far")
            self.joined = subprocess.Popen(words, cwd=self.place, env=clean_environment(), stdin=subprocess.PIPE, stdout=log, stderr=log)
        self.joined.stdin.write(token.encode())
        self.joined.stdin.close()
        return said

    def stop(self):
        if (self.folder / "run.json").exists():
            self.ok("cluster", "stop", "C")
        if self.joined is not None:
            self.joined.wait(60)

    def submit(self, name):
        return self.ok("submit", CONFIGS / "cluster_job.yaml", "--cluster", "C", f"run.name={name}", *JOB)

    def done(self):
        for step in range(1, STEPS + 1):
            for name in "ab":
                self.reached(name, step)
        for name in "ab":
            self.is_at(name, "done")

    def held(self, pool):
        """When each job held the pool, on the wall clock."""
        return held_times(asyncio.run(read_board(self.folder)).events.get(pool, []), wall_s())

    def holder(self, pool):
        line = asyncio.run(read_board(self.folder)).lines.get(pool)
        return line.holder.job if line is not None and line.holder is not None else ""

    def computed(self, name):
        """Times of all tokens that engines of the job computed, on the second host alone."""
        return sorted(
            float(line)
            for file in self.place.glob(f"far/hosts/runs/{name}-*/model/computed")
            for line in file.read_text().splitlines()
        )  # fmt: skip

    def pulled(self, name):
        """How often the second host brought each version of a blob from the first."""
        logs = self.place.glob(f"far/hosts/runs/{name}-*/logs/node-*.jsonl")
        events = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
        return Counter((event["blob"], event["version"]) for event in events if event["event"] == "blob_pulled")

    def processes(self, name):
        """Of the job, on the second host."""
        part = f"far/hosts/runs/{name}-".encode()
        return [int(entry.parent.name) for entry in Path("/proc").glob("[0-9]*/cmdline") if part in _read(entry)]


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.fixture
def lab(tmp_path):
    with two_hosts() as hosts:
        lab = TwoHosts(tmp_path, hosts)
        yield lab
        lab.stop()
        assert left_behind(tmp_path) == []


def foreign(tokens, others):
    """Tokens that were computed while another job held the pool."""
    return [at for at in tokens for each in others if each.began_s <= at < each.ended_s]


@pytest.mark.nightly
def test_jobs_take_turns_on_a_node_of_another_host(lab):
    lab.start()
    for name in "ab":
        lab.submit(name)
    lab.done()

    held = lab.held("rollout-0")
    for name, other in ("ab", "ba"):
        tokens = lab.computed(name)
        assert lab.steps(name) == list(range(1, STEPS + 1))
        assert len(tokens) > STEPS * SLOTS, "the node is on the other host"
        assert foreign(tokens, [each for each in held if each.job == other]) == []
        pulled = lab.pulled(name)
        assert {1, STEPS - 1} <= {version for _, version in pulled}
        assert set(pulled.values()) == {1}, "weights cross to the other host once"
    turns = [job for job, _ in itertools.groupby(each.job for each in held)]
    assert min(turns.count("a"), turns.count("b")) >= STEPS // 2
    assert not list(lab.place.glob("C/jobs/*/model/computed"))


def rolls_out(lab):
    """A job that has a rollout under way, once each has made one."""
    for name in "ab":
        lab.reached(name, 1)
    before = lab.holder("rollout-0")
    return until(lambda: (now := lab.holder("rollout-0")) != before and now, "the next rollout")


def test_a_host_that_is_cut_off_computes_nothing_into_its_successor_s_phase(lab):
    lab.start()
    for name in "ab":
        lab.submit(name)
    rolls_out(lab)

    lab.hosts.link("down")
    cut_at = wall_s()
    time.sleep(AWAY_S)  # noqa: TID251 - the length of the cut is what is tested
    lab.hosts.link("up")
    back_at = wall_s()
    lab.done()

    held, tokens = lab.held("rollout-0"), {name: lab.computed(name) for name in "ab"}
    for name, other in ("ab", "ba"):
        assert lab.steps(name) == list(range(1, STEPS + 1))
        assert foreign(tokens[name], [each for each in held if each.job == other]) == []
    cut = [at for each in tokens.values() for at in each if cut_at < at < back_at]
    assert max(cut, default=cut_at) < cut_at + TTL_S + STEP_S, "who can't be sure of the permit computes no further token"
    assert any(cut_at < each.began_s < back_at + AWAY_S for each in held)


@pytest.mark.nightly
def test_of_a_job_that_stood_still_on_its_host_nothing_is_computed_into_its_successor_s_phase(lab):
    lab.start()
    for name in "ab":
        lab.submit(name)
    name = rolls_out(lab)
    other = "b" if name == "a" else "a"

    stopped = lab.processes(name)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    stopped_at = wall_s()
    try:
        until(lambda: any(each.job == other and each.began_s > stopped_at for each in lab.held("rollout-0")), "the successor's phase")
    finally:
        time.sleep(AWAY_S - (wall_s() - stopped_at) % AWAY_S)  # noqa: TID251 - the length is what is tested
        back_at = wall_s()
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    lab.done()

    held = lab.held("rollout-0")
    late = foreign(lab.computed(name), [each for each in held if each.job == other])
    assert lab.steps(name) == lab.steps(other) == list(range(1, STEPS + 1))
    assert len(late) <= SLOTS, "a token of each sequence was begun before"
    assert all(back_at <= at < back_at + STEP_S for at in late)
    assert foreign(lab.computed(other), [each for each in held if each.job == name]) == []
