"""A second host joins a running job, as its user does it: with a token, over tcp with keys, and nothing of the first host's but that."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import redis

from tests.jobs import SMALL, clean_environment, left_behind, rubato, write_model

pytestmark = pytest.mark.slow

LIMIT_S = 120.0


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("place")
    write_model(place / "model")
    (place / "small.yaml").write_text(SMALL)
    return place


def until(condition, what: str):
    """What `condition` returns once it is true; the processes under test can only be watched from outside."""
    deadline = time.perf_counter() + LIMIT_S
    while not (found := condition()):
        assert time.perf_counter() < deadline, f"{what} did not happen within {LIMIT_S} s"
        time.sleep(0.1)  # noqa: TID251 - another process's progress can't be awaited
    return found


@contextmanager
def started(log: Path, *arguments: object, cwd: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """`rubato ARGUMENTS…` while the block runs; what it says is in `log`."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "rubato.runtime.cli", *map(str, arguments)],
            cwd=cwd, env=clean_environment(), stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def actors_of(run: Path) -> dict[str, dict]:
    told = rubato("monitor", run, "--json", cwd=run)
    return {a["name"]: a for a in json.loads(told.out)["actors"]} if told.code == 0 else {}


def test_a_host_joins_by_token_works_and_leaves_when_the_job_ends(place):
    run, second = place / "first", place / "second"
    assert rubato("keys", "new", "--run", run, cwd=place).code == 0
    launch = ("launch", "small.yaml", f"model.path={place / 'model'}", "run.steps=100000", "bus.host=127.0.0.1")
    ports = "bus.ports=31400-31460"
    with started(place / "first.log", *launch, ports, "--run-dir", run, cwd=place) as launcher:
        until(lambda: "env_manager-1" in actors_of(run), "the first manager")
        token = rubato("keys", "join-token", "--run", run, cwd=place).out
        join = ("add", "env_manager", "--join", token.strip(), "--run-dir", second)
        with started(place / "second.log", *join, cwd=place) as joiner:
            until(lambda: "env_manager-2" in actors_of(run), "the second manager")
            bound = _bound_ports(run)
            drained = until(lambda: _drained(run), "the drain of the only manager on the first host")
            again = rubato("drain", "env_manager-1", "--run", run, cwd=run)  # as when the answer to the first was lost
            before = _steps(run)
            until(lambda: _steps(run) > before + 3, "steps from the joined manager's rollouts alone")
            stopped = rubato("stop", "--run", run, cwd=place)
            codes = launcher.wait(LIMIT_S), joiner.wait(LIMIT_S)

    assert len(bound) >= len(("node-1", "node-2", "gate", "env_manager-2"))
    assert bound <= set(range(31400, 31461))
    assert drained.code == stopped.code == 0
    assert (again.code, again.out) == (0, drained.out)
    assert codes == (130, 130)
    assert "env_manager-2 joins from node-2" in (place / "first.log").read_text()
    assert not left_behind(run)
    assert not left_behind(second)
    said = (place / "first.log").read_text() + (place / "second.log").read_text()
    assert "Traceback" not in said


def _bound_ports(run: Path) -> set[int]:
    """Every tcp port that this run's records name: the gate's, and those of actors on both hosts."""
    card = json.loads((run / "run.json").read_bytes())
    with redis.Redis.from_url(card["state_url"], protocol=2) as store:
        leases = f"rubato:{{{card['id']}}}:lease"
        names = store.zrangebyscore(f"{leases}:until", 0, "+inf")
        records = map(msgspec.msgpack.decode, store.hmget(f"{leases}:values", names))
        return {int(where.rpartition(":")[2]) for where in (card["gate"], *(r.get("public") for r in records)) if where}


def hosts_of(run: Path) -> dict[str, list[str]]:
    told = rubato("hosts", "--run", run, "--json", cwd=run)
    return {host["node"]: host["actors"] for host in json.loads(told.out)["hosts"] if host["node"]}


@pytest.mark.nightly
@pytest.mark.timeout(400)  # three hosts start some ten processes, on two cores
def test_a_head_without_an_engine_waits_for_one_and_hosts_come_and_go(place):
    run, second, third = place / "head", place / "engines", place / "managers"
    assert rubato("keys", "new", "--run", run, cwd=place).code == 0
    launch = ("launch", "small.yaml", f"model.path={place / 'model'}", "run.steps=100000", "bus.host=127.0.0.1")
    with started(place / "head.log", *launch, "actors.engine.count=0", "--run-dir", run, cwd=place) as launcher:
        advice = "no engine is up; bring one with: rubato add engine"
        until(lambda: advice in " ".join(rubato("monitor", run, "--why", cwd=place).out.split()), "the wait for an engine")
        token = rubato("keys", "join-token", "--run", run, cwd=place).out.strip()
        engines = ("add", "engine", "--join", token, "--run-dir", second)
        managers = ("add", "env_manager", "--join", token, "--run-dir", third)
        with (
            started(place / "engines.log", *engines, cwd=place) as engines_host,
            started(place / "managers.log", *managers, cwd=place) as managers_host,
        ):
            until(lambda: _steps(run) > 1, "steps with the engine that came")
            until(lambda: len(hosts_of(run)) == 3, "the third host")
            node = next(name for name, actors in hosts_of(run).items() if "engine-1" in actors)
            other = next(name for name, actors in hosts_of(run).items() if "env_manager-2" in actors)

            here = rubato("add", "env_manager", "--run", second, cwd=place)
            there = rubato("add", "env_manager", "--run", run, "--host", node, cwd=place)
            nowhere = rubato("add", "env_manager", "--run", run, "--host", "node-9", cwd=place)
            until(lambda: set(hosts_of(run)[node]) == {"engine-1", "env_manager-3", "env_manager-4"}, "both on that host")

            unknown = rubato("drain", "env_manager-3", "nosuch", "--run", run, cwd=place)
            last = rubato("drain", node, "--run", run, cwd=place)
            drained = rubato("drain", other, "--run", run, cwd=place)
            managers_code = managers_host.wait(LIMIT_S)
            stopped_there = rubato("stop", "--run", second, cwd=place)
            left_head = rubato("leave", "--run", run, cwd=place)
            assert "env_manager-3" in hosts_of(run)[node]
            assert launcher.poll() is None
            left = rubato("leave", "--run", second, cwd=place)
            engines_code = engines_host.wait(LIMIT_S)
            until(lambda: list(hosts_of(run)) == ["node-1"], "the head alone")
        rubato("stop", "--run", run, cwd=place)
        code = launcher.wait(LIMIT_S)

    assert (here.out, there.out) == ("added: env_manager-3\n", "added: env_manager-4\n")
    assert (nowhere.code, nowhere.err.split(". ")[0]) == (2, f"node-9 is no host of the run in {run}")
    assert (unknown.code, unknown.err.split(", so")[0]) == (2, "nosuch is not in this run")
    assert (last.code, last.err.split(". ")[0]) == (2, f"{node} can't be drained: a run needs at least 1 engine")
    assert (drained.code, drained.out) == (0, f"drained: {other}\n")
    assert (stopped_there.code, stopped_there.err.rpartition(": ")[2]) == (2, f"rubato leave --run {second}\n")
    assert (left_head.code, left_head.err.rpartition(": ")[2]) == (2, f"rubato stop --run {run}\n")
    assert (left.code, left.out) == (0, f"{node} drains its actors and leaves\n")
    assert (code, engines_code, managers_code) == (130, 130, 130)
    said = "".join((place / f"{name}.log").read_text() for name in ("head", "engines", "managers"))
    assert "Traceback" not in said
    assert f"{node} left the run" in said
    assert not any(left_behind(folder) for folder in (run, second, third))


def _steps(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def _drained(run: Path):
    if _steps(run) < 1:
        return None
    return rubato("drain", "env_manager-1", "--run", run, cwd=run)


def test_a_host_address_without_keys_is_refused_with_the_command_that_makes_them(place):
    ended = rubato("launch", "small.yaml", "--run-dir", place / "open", "bus.host=10.0.0.5", cwd=place)

    assert ended.code == 2
    assert ended.err == (
        f"bus.host=10.0.0.5 lets other hosts in, which needs keys. Make them with: rubato keys new --run {place / 'open'}\n"
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]"])
def test_an_address_that_stands_for_all_is_refused(place, host):
    ended = rubato("launch", "small.yaml", "--run-dir", place / "all", f"bus.host='{host}'", cwd=place)

    assert (ended.code, ended.err) == (2, f"bus.host={host} is no address that another host could use. Name one of this host's own.\n")


def test_an_address_of_another_host_is_refused(place):
    run = place / "foreign"
    assert rubato("keys", "new", "--run", run, cwd=place).code == 0
    ended = rubato("launch", "small.yaml", "--run-dir", run, "bus.host=192.0.2.1", "model.path=../model", cwd=place)

    assert ended.code == 2
    assert ended.err.startswith("the gate for other hosts: tcp://192.0.2.1:* cannot be bound")


def test_what_is_no_token_is_refused_in_one_sentence(place):
    ended = rubato("add", "engine", "--join", "rubato1.nonsense", "--run-dir", place / "none", cwd=place)

    assert ended.code == 2
    assert ended.err.startswith("this is no join token (")
    assert not (place / "none").exists()


SECRET = "s3cret-of-the-environment: #'"

KEYED_ENV = '''
import os
from rubato.actors.envs.frozen_lake import FrozenLakeText

class Keyed(FrozenLakeText):
    """Needs a key, and says too much where it is wrong."""

    def __init__(self, key, **kwargs):
        super().__init__(**kwargs)
        print(f"the key is {key}")
        if key != os.environ["THE_KEY"]:
            raise ValueError(f"{key} is wrong")
'''


@pytest.mark.nightly
@pytest.mark.timeout(400)  # two hosts start some ten processes, on two cores
def test_a_host_joins_over_ipv6_a_run_that_made_its_model_and_takes_a_secret_from_the_environment(place, monkeypatch):
    monkeypatch.setenv("THE_KEY", SECRET)
    run, second = place / "prepared", place / "prepared-second"
    (place / "keyed.py").write_text(KEYED_ENV)
    assert rubato("keys", "new", "--run", run, cwd=place).code == 0
    own = ("env.class=keyed.py:Keyed", "env.isolation=process", "env.kwargs={key: '${THE_KEY}'}", "run.steps=100000")
    launch = (
        "launch",
        "small.yaml",
        "model.path=model",
        "prepare=[rubato.actors.training.base_model]",
        "train.kind=scripted",
        "engine.scripted.vocab_size=615",
        "bus.host=[::1]",
    )
    with started(place / "prepared.log", *launch, *own, "--run-dir", run, cwd=place) as launcher:
        until(lambda: _steps(run) > 1, "steps")
        token = rubato("keys", "join-token", "--run", run, cwd=place).out.strip()
        monkeypatch.delenv("THE_KEY")
        unset = rubato("add", "env_manager", "--join", token, "--run-dir", place / "unset", cwd=place)
        monitor = rubato("monitor", run, "--json", cwd=place)
        monkeypatch.setenv("THE_KEY", SECRET)
        join = ("add", "env_manager", "--join", token, "--run-dir", second)
        with started(place / "prepared-second.log", *join, cwd=place) as joiner:
            until(lambda: "env_manager-2" in actors_of(run), "the second manager")
            until(lambda: _drained(run), "the drain of the only manager on the first host")
            before = _steps(run)
            until(lambda: _steps(run) > before + 2, "steps from the joined manager's rollouts alone")
            rubato("stop", "--run", run, cwd=place)
            codes = launcher.wait(LIMIT_S), joiner.wait(LIMIT_S)

    assert codes == (130, 130)
    assert unset.code == 2
    assert "env.kwargs.key names ${THE_KEY}, and the environment here has no THE_KEY." in unset.err
    said = [place / "prepared.log", place / "prepared-second.log"]
    files = [path for folder in (run, second) for path in folder.rglob("*") if path.is_file()] + said
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in monitor.out
    assert "key: ${THE_KEY}" in (second / "config.yaml").read_text()
    assert "the key is ${THE_KEY}" in "".join(path.read_text() for path in second.rglob("env_manager-2.jsonl"))
    assert "node-2 left the run" not in said[0].read_text(), "it ended with the run"
    assert "Traceback" not in "".join(path.read_text() for path in said)


@pytest.mark.timeout(400)  # the placed host starts twice beside the first, on two cores
def test_a_launch_places_a_host_asks_for_another_when_it_is_killed_and_leaves_none(place):
    run = place / "placing"
    hosts = "launch.hosts={far: {pools: {engine: 1, env_manager: 1}}}"
    alone = ("actors.engine.count=0", "actors.env_manager.count=0", hosts)
    launch = ("launch", "small.yaml", f"model.path={place / 'model'}", "run.steps=100000", "bus.host=127.0.0.1")
    with started(place / "placing.log", *launch, *alone, "--run-dir", run, cwd=place) as launcher:
        until(lambda: _steps(run) > 1, "steps of the placed host's engine and environments alone")
        first = next(name for name in hosts_of(run) if name != "node-1")
        brought = hosts_of(run)[first]
        placed = until(lambda: [line for line in _told(run, "placed") if line["host"] == "far-1"], "its record")
        before = _steps(run)
        listed = json.loads(rubato("hosts", run, "--json", cwd=place).out)["hosts"]
        os.kill(int(placed[0]["id"]), signal.SIGKILL)
        until(lambda: _steps(run) > before + 2, "steps with the host that came in its place")
        rubato("stop", "--run", run, cwd=place)
        code = launcher.wait(LIMIT_S)

    said = (place / "placing.log").read_text()
    assert code == 130
    assert sorted(brought) == ["engine-1", "env_manager-1"]
    assert [(host["name"], host["backend"], host["node"], host["state"]) for host in listed] == [
        ("node-1", "", "node-1", "ready"),
        ("far-1", "here", first, "ready"),
    ]
    assert listed[1]["id"] == placed[0]["id"]
    assert listed[1]["pools"] == {"engine": 1, "env_manager": 1}
    assert "the host far-1 is gone (signal 9)" in said
    assert "asking for another in 0.5 s (1 of 5)" in said
    assert "Traceback" not in said + "".join(log.read_text() for log in (run / "hosts").glob("*.log"))
    assert not left_behind(run)


@pytest.mark.timeout(400)
def test_a_host_whose_run_is_lost_ends_by_itself_and_leaves_nothing(place):
    run, second = place / "lost", place / "engines-of-lost"
    assert rubato("keys", "new", "--run", run, cwd=place).code == 0
    launch = ("launch", "small.yaml", f"model.path={place / 'model'}", "run.steps=100000", "run.lease_s=5", "bus.host=127.0.0.1")
    with started(place / "lost.log", *launch, "actors.engine.count=0", "--run-dir", run, cwd=place) as launcher:
        token = until(lambda: rubato("keys", "join-token", "--run", run, cwd=place).out.strip(), "the token")
        with started(place / "of-lost.log", "add", "engine", "--join", token, "--run-dir", second, cwd=place) as host:
            until(lambda: _steps(run) > 1, "steps with the engine that came")
            os.kill(launcher.pid, signal.SIGKILL)
            launcher.wait()
            code = host.wait(LIMIT_S)

    said = (place / "of-lost.log").read_text()
    assert code == 1
    assert said.splitlines()[-1] == "the run was out of reach for 5 s (run.lease_s): this host leaves it"
    assert "Traceback" not in said
    assert not left_behind(run)
    assert not left_behind(second)


def _told(run: Path, event: str) -> list[dict]:
    """What the first host logged as `event`."""
    log = run / "logs" / "node-1.jsonl"
    lines = map(json.loads, log.read_text().splitlines() if log.exists() else ())
    return [line for line in lines if line["event"] == event]
