"""Two hosts with addresses of their own, as network namespaces: they work as one job, are cut apart, and become one again.

RUBATO_CUT_S=30 cuts for that long; the default is just longer than the leases. Needs root and iproute2.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.jobs import SMALL, clean_environment, left_behind, write_model
from tests.namespaces import Hosts, two_hosts

pytestmark = pytest.mark.slow

CUT_S = float(os.environ.get("RUBATO_CUT_S", "13"))
"""Longer than a lease of 10 s, so that the cut host is given up."""
LIMIT_S = 240.0
"""Of one stage, on a machine that has other things to do."""

FIRST_HOST = ("env_manager-1", "engine-1", "llm_proxy-1", "sample_buffer-1", "trainer-1")

SLOWER = ("engine.scripted.token_s=0.02", "rollout.max_turns=6")
"""A rollout takes a second or so: some run at any moment, on either host."""


@pytest.fixture
def hosts():
    with two_hosts() as found:
        yield found


class Job:
    """Runs `rubato` commands on either host, and looks at what the run has written."""

    def __init__(self, hosts: Hosts, place: Path, stack: ExitStack) -> None:
        self.hosts, self.place, self._stack = hosts, place, stack
        self.run = place / "first"

    def start(self, host: str, log: str, *arguments: object) -> "subprocess.Popen[bytes]":
        file = self._stack.enter_context((self.place / log).open("wb"))
        process = subprocess.Popen(self._command(host, arguments), cwd=self.place, env=clean_environment(), stdin=subprocess.DEVNULL, stdout=file, stderr=file)  # fmt: skip
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def ask(self, *arguments: object) -> str:
        """What the command prints on the first host, or nothing when it fails."""
        done = self.ended(*arguments)
        return done.stdout if done.returncode == 0 else ""

    def ended(self, *arguments: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(self._command(self.hosts.first, arguments), cwd=self.place, env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False)  # fmt: skip

    def steps(self) -> list[int]:
        return [row["step"] for row in lines(self.run / "metrics.jsonl")]

    def events(self, actor: str, event: str) -> list[dict]:
        return [e for log in self.place.glob(f"*/logs/{actor}.jsonl") for e in lines(log) if e["event"] == event]

    def _command(self, host: str, arguments: tuple[object, ...]) -> list[str]:
        return ["ip", "netns", "exec", host, sys.executable, "-m", "rubato.runtime.cli", *map(str, arguments)]


def lines(path: Path) -> list[dict]:
    """Whole lines only: the last one may be under way."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def until(condition, what: str):
    """What `condition` returns once it is true; the processes under test can only be watched from outside."""
    deadline = time.perf_counter() + LIMIT_S
    while not (found := condition()):
        assert time.perf_counter() < deadline, f"{what} did not happen within {LIMIT_S} s"
        time.sleep(0.1)  # noqa: TID251 - another process's progress can't be awaited
    return found


@pytest.mark.timeout(900)  # ten processes start on two cores, and a cut must outlast a lease
def test_a_joined_host_works_is_cut_off_and_comes_back_as_a_new_incarnation(hosts, tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "small.yaml").write_text(SMALL)
    with ExitStack() as stack:
        job = Job(hosts, tmp_path, stack)
        job.ask("keys", "new", "--run", job.run)
        launch = ("launch", "small.yaml", f"model.path={tmp_path / 'model'}", "run.steps=100000", *SLOWER)
        launcher = job.start(hosts.first, "first.log", *launch, f"bus.host={hosts.address}", "--run-dir", job.run)
        until(lambda: job.events("env_manager-1", "ready"), "the first host")
        token = job.ask("keys", "join-token", "--run", job.run).strip()
        managers = job.start(hosts.second, "managers.log", "add", "env_manager", "-n", 2, "--join", token, "--run-dir", "managers")
        engines = job.start(hosts.second, "engines.log", "add", "engine", "--join", token, "--run-dir", "engines")
        joined = ("env_manager-2", "env_manager-3", "engine-2")
        until(lambda: all(job.events(name, "ready") for name in joined), "the second host")
        at = len(job.steps())
        until(lambda: len(job.steps()) > at + 5, "steps with both hosts")

        hosts.link("down")
        time.sleep(CUT_S)  # noqa: TID251 - the length of the cut is what is tested
        during = len(job.steps())
        until(lambda: len(job.steps()) > during + 2, "steps on the first host alone")
        hosts.link("up")
        until(lambda: all(_anew(job, name) for name in joined), "new incarnations of everything that was cut off")
        healed = len(job.steps())
        until(lambda: len(job.steps()) > healed + 5, "steps after the cut")
        until(lambda: _told_of_the_cut(job), "figures of what was asked and said across the cut")
        wrong = job.ended("add", "env_manager", "--run", "managers")
        job.ask("stop", "--run", job.run)
        codes = launcher.wait(LIMIT_S), managers.wait(LIMIT_S), engines.wait(LIMIT_S)

    assert codes == (130, 130, 130)
    # The second host's folder, from the network of the first.
    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (2, 1), wrong.stderr
    assert wrong.stderr.startswith("10.203.7.2, the address of node-"), wrong.stderr
    assert job.steps() == list(range(1, len(job.steps()) + 1))
    ledger = lines(job.run / "samples.jsonl")
    assert max(Counter(line["trajectory_id"] for line in ledger).values()) == 1
    assert all(line["age"] <= 1 for line in ledger if line["fate"] == "trained")
    assert any(line["attempt"] > 0 for line in ledger if line["fate"] in ("trained", "zero_spread"))
    assert [event for event in job.events("sample_buffer-1", "tickets_taken_back") if event["reason"] == "holder_left"]
    pulled = Counter((e["blob"], e["version"]) for node in ("node-2", "node-3") for e in job.events(node, "blob_pulled"))
    assert len(pulled) > 1
    assert set(pulled.values()) == {1}, "the second host pulled some weights more than once"
    assert not left_behind(tmp_path)


def _anew(job: Job, name: str) -> bool:
    """Whether `name` noticed that its lease had lapsed, and came back under a higher incarnation."""
    first = job.events(name, "ready")[0]["incarnation"]
    return any(e["silent_s"] > 10 and e["incarnation"] > first for e in job.events(name, "rejoined"))


def _told_of_the_cut(job: Job) -> bool:
    """Whether what was asked across it ended on either side, without anybody's knowing whether it ran, and what the cut host still said of
    rollouts that had gone to another attempt was not taken. Figures come with heartbeats, and a rollout's end with its last turn."""
    shown = json.loads(job.ask("monitor", job.run, "--json"))
    metrics = {actor["name"]: actor["metrics"] for actor in shown["actors"]}
    unknown = {name for name, figures in metrics.items() if figures.get("bus/asks_unknown", 0) > 0}
    refused = metrics["sample_buffer-1"].get("tickets/refused", 0)
    return unknown >= {"env_manager-2", "env_manager-3"} and bool(unknown & {*FIRST_HOST}) and refused > 0
