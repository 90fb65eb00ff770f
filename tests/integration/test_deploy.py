"""The pods of configs/deploy/kubernetes, as processes of this host: their own commands, probes, signals and restarts."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.jobs import SMALL, clean_environment, left_behind, write_model

pytestmark = pytest.mark.slow

DEPLOY = Path(__file__).parents[2] / "configs/deploy"
LIMIT_S = 90.0
TOKEN = "a-token-of-the-test"


def until(condition, what):
    """What `condition` returns once it is true; the processes under test can only be watched from outside."""
    deadline = time.perf_counter() + LIMIT_S
    while not (found := condition()):
        assert time.perf_counter() < deadline, f"{what} did not happen within {LIMIT_S} s"
        time.sleep(0.1)  # noqa: TID251 - another process's progress can't be awaited
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


class Pod:
    """The one container of a workload, with /var/lib/rubato in a folder of its own; all pods share one address, so each has its ports."""

    def __init__(self, place: Path, name: str, address: str, **files: str) -> None:
        (container,) = yaml.safe_load((DEPLOY / f"kubernetes/{name}.yaml").read_text())["spec"]["template"]["spec"]["containers"]
        self.folder, self.port, self.log = place / name, free_port(), place / f"{name}.log"
        (self.folder / "bin").mkdir(parents=True)
        (self.folder / "etc").mkdir()
        for file, text in files.items():
            (self.folder / "etc" / file.replace("_", "-").replace("job", "job.yaml")).write_text(text)
        rubato = self.folder / "bin/rubato"
        rubato.write_text(f'#!/bin/sh\nexec {sys.executable} -m rubato.runtime.cli "$@"\n')
        rubato.chmod(0o755)
        shutil.copy(DEPLOY / "rubato-probe", self.folder / "bin")
        self._words = [
            w.replace("/etc/rubato", str(self.folder / "etc")).replace("0.0.0.0:9109", f"127.0.0.1:{self.port}") for w in container["args"]
        ]
        self._probes = {probe: container[f"{probe}Probe"]["exec"]["command"] for probe in ("liveness", "readiness")}
        given = {
            each["name"]: each.get("value", {"POD_IP": address, "RUBATO_HOST_TOKEN": TOKEN}.get(each["name"])) for each in container["env"]
        }
        more = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "RUBATO_PORT": str(self.port),
            "RUBATO_DONE": str(self.folder / "done"),
        }
        self._env = {**clean_environment(), **given, **more}

    @contextmanager
    def started(self) -> Iterator["subprocess.Popen[bytes]"]:
        with self.log.open("ab") as file:
            process = subprocess.Popen(
                self._words, cwd=self.folder, env=self._env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def ask(self, *words: str) -> str:
        """`kubectl exec` of that command."""
        return subprocess.run(words, cwd=self.folder, env=self._env, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout

    def passes(self, probe: str) -> bool:
        return subprocess.run(self._probes[probe], env=self._env, capture_output=True, check=False, timeout=30).returncode == 0

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def ended(self, process: "subprocess.Popen[bytes]") -> int:
        """The exit code after SIGTERM, which an init hands on to the group."""
        os.killpg(process.pid, signal.SIGTERM)
        return process.wait(LIMIT_S)


def head_in(place: Path, steps: int, **counts: int) -> Pod:
    """The first host's pod, which runs a small job; `counts` are those of roles."""
    write_model(place / "model")
    head, job = Pod(place, "head", "127.0.0.1"), yaml.safe_load(SMALL)
    job["run"]["steps"], job["model"] = steps, {"path": str(place / "model")}
    job |= {"bus": {"port": free_port()}, "host": {"listen": f"127.0.0.1:{head.port}"}}
    for role, count in counts.items():
        job["actors"][role]["count"] = count
    (head.folder / "etc/job.yaml").write_text(yaml.safe_dump(job))
    return head


def steps(head: Pod) -> int:
    rows = head.folder / "run/metrics.jsonl"
    return len(rows.read_text().splitlines()) if rows.exists() else 0


def test_pods_launch_join_drain_and_go_on_after_the_first_was_stopped_and_after_it_was_lost(tmp_path):
    head = head_in(tmp_path, 1_000_000, engine=0, env_manager=0)
    assert not head.passes("liveness")
    with head.started() as first:
        until(lambda: head.passes("readiness"), "the first host's readiness")
        token = head.ask("rubato", "keys", "join-token", "--run", "run", "--host", "localhost")
        engines, environments = (Pod(tmp_path, name, "127.0.0.1", join_token=token) for name in ("engines", "environments"))
        with engines.started() as engine, environments.started() as environment:
            until(lambda: engines.passes("readiness") and environments.passes("readiness"), "the hosts' readiness")
            until(lambda: steps(head) > 2, "steps with what the hosts brought")
            codes = head.ended(first), engine.wait(LIMIT_S), environment.wait(LIMIT_S)
            assert not head.passes("liveness")

    before = steps(head)
    with head.started() as lost:
        until(lambda: head.passes("readiness"), "the first host's readiness, restarted")
        with engines.started() as engine, environments.started() as environment:
            until(lambda: steps(head) > before + 2, "steps after a restart of all")
            os.killpg(lost.pid, signal.SIGKILL)
            lost.wait()
            before = steps(head)
            with head.started() as again:
                until(lambda: steps(head) > before + 2, "steps with the hosts that waited")
                codes += engines.ended(engine), head.ended(again), environment.wait(LIMIT_S)

    assert codes == (130,) * 6
    told = head.said() + engines.said() + environments.said()
    assert "Traceback" not in told
    assert TOKEN not in told
    assert not left_behind(tmp_path)


def test_the_first_pod_rests_when_its_run_has_reached_its_end(tmp_path):
    head = head_in(tmp_path, 2)
    with head.started() as process:
        until(lambda: (head.folder / "done").exists(), "the run's end")
        passed = head.passes("liveness"), head.passes("readiness")
        assert process.poll() is None
        head.ended(process)
    with head.started() as process:
        until(lambda: "the run has reached its end" in head.said(), "its rest after a restart")
        head.ended(process)

    assert passed == (True, True)
    assert steps(head) == 2
    assert not left_behind(tmp_path)
