"""What a node agent serves at `host.listen`, for as long as its host is in the job:

    GET /metrics         figures for Prometheus
    GET /healthz/live    200 while the agent runs
    GET /healthz/ready   200 while the Store answers and every actor of this host is up; else 503, with the reason

The first host's figures are those of all actors of the job, a joined host's those of its own. They are what the agent has seen last: a
request asks no actor. Where RUBATO_HOST_TOKEN is set, none is answered without it (`Authorization: Bearer`); beyond the loopback it has to be.
"""

import asyncio
import math
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import uvicorn

from rubato.bus.address import bind_listener, host_port, spelt
from rubato.runtime.errors import LaunchError
from rubato.runtime.http_server import QUIET, HttpServer, bearer_of, check_token, is_let_in, token_in
from rubato.runtime.launch.agent import RESTARTS, NodeAgent
from rubato.runtime.monitor.snapshot import DEPTH, QUEUE, VERSION
from rubato.runtime.observe.prometheus import CONTENT_TYPE, Exposition, Sample, known_as
from rubato.runtime.registry import NODE, role_of

KEY, TOKEN = "host.listen", "RUBATO_HOST_TOKEN"

STORE_S = 5.0
"""A Store that has not answered for so long counts as down: the agent asks it each second."""

MOST, LIFE_S = 64, 10.0
"""Connections at once, and the longest that one may take: what asks slowly, or reads slowly, costs no more."""
HEAD_BYTES = 16 * 1024
"""Of a request without its body, which is not read."""


def open_endpoint(agent: NodeAgent) -> None:
    """Serve until the agent stops. Raises ConfigError without a token that is needed, LaunchError for an address that can't be had."""
    listen = agent.job.host.listen
    check_listen(listen)
    host, port = _address(listen)
    try:
        listening = bind_listener(host, port, backlog=MOST)
    except (OSError, UnicodeError) as error:
        why = str(getattr(error, "strerror", error)).partition(" (while")[0]  # of what socket.create_server says, the system's part
        raise LaunchError(f"can't listen at {KEY}={listen}: {why}. Give another address or port.") from error
    options: dict[str, Any] = {**QUIET, "log_level": "critical", "server_header": False, "date_header": False}
    server = HttpServer(uvicorn.Config(Endpoint(agent), http="h11", h11_max_incomplete_event_size=HEAD_BYTES, **options))
    agent.spawn(server.answer_on(listening, MOST, life_s=LIFE_S), name="node.endpoint")
    url = f"http://{spelt(host)}:{listening.getsockname()[1]}"
    agent.log.info("listening", url=url)
    agent.screen.notice(f"metrics of {agent.name} at {url}/metrics, its health at {url}/healthz/ready", good=True)


def check_listen(listen: str) -> None:
    """Raises ConfigError where that is reached from outside and there is no token."""
    check_token(KEY, _address(listen)[0], TOKEN)


def _address(listen: str) -> tuple[str, int]:
    host, port = host_port(listen)
    return host or "127.0.0.1", port


class Endpoint:
    """The ASGI application."""

    def __init__(self, agent: NodeAgent) -> None:
        self._agent, self._token = agent, token_in(TOKEN)
        self._paths = {"/metrics": self._metrics, "/healthz/live": lambda: (HTTPStatus.OK, b"live\n"), "/healthz/ready": self._ready}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        status, body = self.answer(scope["method"], scope["path"], dict(scope["headers"]).get(b"authorization", b"").decode("latin-1"))
        kind = CONTENT_TYPE if scope["path"] == "/metrics" and status == HTTPStatus.OK else "text/plain; charset=utf-8"
        headers = {"content-type": kind, "content-length": str(len(body)), "connection": "close"}
        if status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        told = [(key.encode(), value.encode()) for key, value in headers.items()]
        await send({"type": "http.response.start", "status": int(status), "headers": told})
        await send({"type": "http.response.body", "body": body})

    def answer(self, method: str, path: str, authorization: str = "") -> tuple[HTTPStatus, bytes]:
        """Status and body."""
        if not is_let_in(bearer_of(authorization), self._token):
            return HTTPStatus.UNAUTHORIZED, f"the token is not the one that {TOKEN} has here\n".encode()
        if path not in self._paths:
            return HTTPStatus.NOT_FOUND, f"there are {', '.join(self._paths)}\n".encode()
        if method not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, b"GET alone\n"
        return self._paths[path]()

    def _ready(self) -> tuple[HTTPStatus, bytes]:
        agent = self._agent
        down = [name for name in agent.host.names() if agent.directory.find(name) is None]
        if agent.over.done():
            why = "the run is over, or this host leaves it"
        elif self._store_age_s() > STORE_S:
            why = "the run's Store does not answer"
        elif down:
            why = f"not up: {', '.join(down)}"
        else:
            return HTTPStatus.OK, b"ready\n"
        return HTTPStatus.SERVICE_UNAVAILABLE, f"{why}\n".encode()

    def _store_age_s(self) -> float:
        return asyncio.get_running_loop().time() - self._agent.seen.at

    # -- figures ------------------------------------------------------------------------------------------------------

    def _metrics(self) -> tuple[HTTPStatus, bytes]:
        agent, age_s = self._agent, self._store_age_s()
        told = Exposition(run=agent.run.id.rpartition("-")[0] or agent.run.id)
        told.add("rubato_redis_up", "gauge", f"Whether the run's Redis answered within {STORE_S:g} s.", [({}, age_s <= STORE_S)])
        if math.isfinite(age_s):
            told.add(
                "rubato_redis_answer_age_seconds",
                "gauge",
                "Since it answered last; asked each second, in a run of many actors each third.",
                [({}, age_s)],
            )
        if agent.name == NODE:
            reached = agent.hosts.in_reach()
            told.add("rubato_hosts", "gauge", "Hosts in reach, this one included.", [({}, sum(reached.values()))])
            told.add("rubato_host_up", "gauge", "Whether the host is in reach.", [({"host": name}, up) for name, up in reached.items()])
        self._add_actors(told, age_s)
        for name, value in agent.row.items():
            if math.isfinite(value):
                told.add(known_as(name, told.names), "gauge", f"{name} of the newest step that has it.", [({}, value)])
        return HTTPStatus.OK, told.text()

    def _add_actors(self, told: Exposition, age_s: float) -> None:
        agent = self._agent
        expected = agent.hosts.expected()
        labels = {name: self._labels(name, host) for name, host in expected.items()}
        seen = {one.record.name: one for one in agent.seen.actors if one.record.name in expected}
        up = [(labels[name], agent.directory.find(name) is not None) for name in expected]
        told.add("rubato_actor_up", "gauge", "Whether the actor is up and ready.", up)
        told.add("rubato_actor_restarts_total", "counter", "Restarts of the actor after a death.", self._restarts())
        ages = [(labels[name], one.silent_s + age_s) for name, one in seen.items()]
        told.add("rubato_actor_heartbeat_age_seconds", "gauge", "Since its newest heartbeat.", ages)
        mailboxes = [(labels[name], one.record.mailbox) for name, one in seen.items()]
        told.add("rubato_actor_mailbox_depth", "gauge", "Messages that wait in its mailbox.", mailboxes)
        figures = [(labels[name], metric, value) for name, one in seen.items() for metric, value in one.record.metrics.items()]
        versions = [(of, value) for of, metric, value in figures if metric == VERSION]
        told.add("rubato_actor_weights_version", "gauge", "Version of the weights that it holds.", versions)
        queues = [
            ({**of, "queue": metric.removeprefix(QUEUE).removesuffix(DEPTH)}, value)
            for of, metric, value in figures
            if metric.startswith(QUEUE) and metric.endswith(DEPTH)
        ]
        told.add("rubato_queue_depth", "gauge", "What waits in the queue of that name.", queues)

    def _restarts(self) -> Iterator[Sample]:
        """As each node agent counts them; of other hosts as they were seen last."""
        agent = self._agent
        counts = {one.record.name: one.record.metrics for one in agent.seen.actors if role_of(one.record.name) == role_of(NODE)}
        here = {agent.name: agent.metrics.snapshot()}
        for host, figures in ({**counts, **here} if agent.name == NODE else here).items():
            for metric, value in figures.items():
                if metric.startswith(RESTARTS):
                    yield self._labels(metric.removeprefix(RESTARTS), host), value

    def _labels(self, name: str, host: str) -> dict[str, str]:
        return {"host": host, "actor": name, "role": role_of(name), "pool": self._agent.hosts.pool_of(name)}
