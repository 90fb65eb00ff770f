"""What a node agent answers over HTTP, of what it knows of its host and the job."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from rubato.runtime.config.compose import from_mapping, problems
from rubato.runtime.embed import embed
from rubato.runtime.errors import ConfigError, LaunchError
from rubato.runtime.launch.agent import Seen
from rubato.runtime.launch.endpoint import STORE_S, TOKEN, Endpoint
from rubato.runtime.registry import ActorRecord, SeenRecord
from tests.virtual import virtual


def record(name, node="node-1", mailbox=0, **metrics):
    return SeenRecord(ActorRecord(name, name.rsplit("-", 1)[0], "", 1, 1, "h", "ready", mailbox=mailbox, metrics=metrics, node=node), 0.5)


class Agent:
    """What an endpoint asks of its node agent: engine-1 here is down, engine-2 is on another host, which is out of reach."""

    def __init__(self, name="node-1"):
        loop = asyncio.get_running_loop()
        self.name, self.run = name, SimpleNamespace(id="my-run-0a1b2c3d")
        self.over, self.row = loop.create_future(), {"reward/mean": 0.5, "actor/up": 7.0, "odd": float("nan")}
        self.up = {"trainer-1"}
        self.here = ["trainer-1", "engine-1"]
        self.host = SimpleNamespace(names=lambda: self.here)
        self.directory = SimpleNamespace(find=lambda each: each if each in self.up else None)
        self.counts = Counter({"restarts/engine-1": 2, "deaths/engine": 2})
        self.metrics = SimpleNamespace(snapshot=lambda: self.counts)
        where = {"trainer-1": name, "engine-1": name, "engine-2": "node-2"}
        self.hosts = SimpleNamespace(
            expected=lambda: where,
            in_reach=lambda: {"node-1": True, "node-2": False},
            pool_of=lambda each: "far" if each == "engine-2" else "",
        )
        seen = [
            record("trainer-1", mailbox=3, **{"weights/version": 7.0}),
            record("engine-2", "node-2", **{"weights/version": 6.0, "queue/slots/depth": 4.0}),
            record("node-2", "node-2", **{"restarts/engine-2": 1.0}),
        ]
        self.seen = Seen(seen, loop.time())


def lines(endpoint):
    status, body = endpoint.answer("GET", "/metrics")
    assert status == 200
    return [line for line in body.decode().splitlines() if not line.startswith("#")]


@virtual
async def test_the_first_host_tells_of_every_actor_and_host_of_the_job():
    told = lines(Endpoint(Agent()))

    def of(actor, host="node-1", pool=""):
        return f'run="my-run",host="{host}",actor="{actor}",role="{actor[:-2]}",pool="{pool}"'

    for line in (
        'rubato_redis_up{run="my-run"} 1.0',
        'rubato_hosts{run="my-run"} 1.0',
        'rubato_host_up{run="my-run",host="node-2"} 0.0',
        f"rubato_actor_up{{{of('trainer-1')}}} 1.0",
        f"rubato_actor_up{{{of('engine-1')}}} 0.0",
        f"rubato_actor_restarts_total{{{of('engine-1')}}} 2.0",
        f"rubato_actor_restarts_total{{{of('engine-2', 'node-2', 'far')}}} 1.0",
        f"rubato_actor_mailbox_depth{{{of('trainer-1')}}} 3.0",
        f"rubato_actor_heartbeat_age_seconds{{{of('trainer-1')}}} 0.5",
        f"rubato_actor_weights_version{{{of('engine-2', 'node-2', 'far')}}} 6.0",
        f'rubato_queue_depth{{{of("engine-2", "node-2", "far")},queue="slots"}} 4.0',
        'rubato_reward_mean{run="my-run"} 0.5',
        'rubato_actor_up_{run="my-run"} 7.0',
    ):
        assert line in told
    assert not [line for line in told if "odd" in line]


@virtual
async def test_a_host_that_joined_tells_of_no_other_host():
    told = lines(Endpoint(Agent("node-2")))

    assert not [line for line in told if "rubato_host" in line]
    assert len([line for line in told if "restarts_total" in line]) == 1


@virtual
async def test_a_host_is_ready_while_its_store_answers_and_its_actors_are_up():
    agent = Agent()
    endpoint = Endpoint(agent)
    said = [endpoint.answer("GET", "/healthz/ready")]
    agent.up.add("engine-1")
    said.append(endpoint.answer("GET", "/healthz/ready"))
    await asyncio.sleep(STORE_S + 0.1)
    said.append(endpoint.answer("GET", "/healthz/ready"))
    told = lines(endpoint)
    agent.over.set_result(None)
    said.append(endpoint.answer("GET", "/healthz/ready"))

    assert said == [
        (503, b"not up: engine-1\n"),
        (200, b"ready\n"),
        (503, b"the run's Store does not answer\n"),
        (503, b"the run is over, or this host leaves it\n"),
    ]
    assert 'rubato_redis_up{run="my-run"} 0.0' in told
    assert endpoint.answer("GET", "/healthz/live") == (200, b"live\n")


@virtual
async def test_elsewhere_there_is_nothing_and_nothing_can_be_changed():
    endpoint = Endpoint(Agent())

    assert [endpoint.answer("GET", path)[0] for path in ("/", "/metrics/", "/healthz", "/run", "*")] == [404] * 5
    assert endpoint.answer("POST", "/metrics")[0] == 405
    assert endpoint.answer("HEAD", "/healthz/live")[0] == 200


def test_with_a_token_nothing_is_told_without_it(monkeypatch):
    monkeypatch.setenv(TOKEN, "secret\n")

    @virtual
    async def asked():
        endpoint = Endpoint(Agent())
        paths = ("/metrics", "/healthz/live", "/healthz/ready", "/elsewhere")
        return [[endpoint.answer("GET", path, key)[0] for path in paths] for key in ("", "Bearer secre", "Bearer secret")]

    assert asked() == [[401] * 4, [401] * 4, [200, 200, 503, 404]]


def test_a_launch_that_would_listen_beyond_the_loopback_without_a_token_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv(TOKEN, raising=False)
    tree = {"actors": {"one": {"class": "rubato.runtime.actor:Actor"}}, "report": {"console": "", "advice": ""}}

    def refusals(listen):
        return problems(from_mapping(tree | {"host": {"listen": listen}}), tmp_path)

    assert refusals("127.0.0.1:0") == refusals("[::1]:9109") == refusals("") == []
    assert refusals("0.0.0.0:9109") == [
        "host.listen=0.0.0.0 is reached from outside, and RUBATO_HOST_TOKEN is not set: set it there, or leave host.listen at 127.0.0.1"
    ]
    monkeypatch.setenv(TOKEN, "secret")
    assert refusals("0.0.0.0:9109") == []
    with pytest.raises(ConfigError, match=r"'9109' must be a host and a port, like 127\.0\.0\.1:7788"):
        refusals("9109")


async def test_an_embedded_job_listens_nowhere_and_says_so(tmp_path):
    tree = {"actors": {"one": {"class": "rubato.runtime.actor:Actor"}}, "host": {"listen": "127.0.0.1:0"}}

    with pytest.raises(LaunchError, match=r"^host\.listen is where a host's node agent serves"):
        async with embed(from_mapping(tree), folder=tmp_path / "run"):
            pass
