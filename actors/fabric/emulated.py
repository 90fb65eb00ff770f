"""An optical switch as a process of its own: mirrors and database with the traps of SONiC's, which speak its RESTCONF dialect over HTTP and over the bus.

What the database acknowledges and what the mirrors do are two things. Adding a circuit whose port is taken: one alone becomes
`invalid` itself, of several at once the *old* holders become invalid. An existing id added again is passed over, even if invalid.
"""

import asyncio
import base64
import hmac
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import uvicorn

from rubato.actors.fabric.driver import Login, Status
from rubato.actors.fabric.links import links
from rubato.actors.fabric.restconf import BULK, CONFIG, DATA, TABLE, YANG_JSON, entry, parse_id
from rubato.actors.fabric.section import FabricSection
from rubato.actors.messages.fabric import FindSwitch, SwitchAddress, SwitchReply, SwitchRequest
from rubato.bus.address import bind_listener, host_port, spelt
from rubato.planning.circuits import Cross
from rubato.runtime.actor import Actor, handler
from rubato.runtime.config import ActorConfig
from rubato.runtime.http_server import HttpServer
from rubato.runtime.kernel import Kernel


class OcsDevice:
    """Circuits that change are dark for `delay_s`; one change is carried out after another. Holds nothing after a restart."""

    def __init__(self, num_ports: int, delay_s: float) -> None:
        self.num_ports = num_ports
        self.delay_s = delay_s
        self.dead_ports: set[int] = set()
        """Ports whose mirrors don't move any more: circuits over them fail."""
        self.num_changes = 0
        self._changed = asyncio.Event()
        """Set with every update; what follows the light clears it."""
        self._tuned_at: dict[Cross, float | None] = {}
        """Loop time from which each configured circuit carries light; None for an invalid one."""
        self._busy_until = 0.0

    def update(self, delete: Collection[Cross], add: Sequence[Cross]) -> tuple[int, int]:
        """Deletes first. The numbers acknowledge the database: of circuits that were there, and that are there now."""
        done_at = max(asyncio.get_running_loop().time(), self._busy_until) + self.delay_s
        gone = [cross for cross in dict.fromkeys(delete) if cross in self._tuned_at]
        for cross in gone:
            del self._tuned_at[cross]
        new = [cross for cross in dict.fromkeys(add) if cross not in self._tuned_at]
        for cross in new:
            holders = [held for held, at in self._tuned_at.items() if at is not None and _clash(held, cross)]
            loser = [cross] if len(add) == 1 and holders else holders
            self._tuned_at[cross] = done_at
            for each in loser:
                self._tuned_at[each] = None
        if new or gone:
            self._busy_until = done_at
            self.num_changes += 1
            self._changed.set()
        return len(gone), len(add)

    def status(self) -> dict[Cross, Status]:
        """Every configured circuit, sorted."""
        now = asyncio.get_running_loop().time()
        return {cross: self._status(cross, now) for cross in sorted(self._tuned_at)}

    def lit(self) -> tuple[Cross, ...]:
        """The circuits that carry light now, sorted."""
        return self._lit(asyncio.get_running_loop().time())

    async def light(self) -> AsyncIterator[tuple[Cross, ...]]:
        """The circuits that carry light, now and whenever they change; for one task.

        One reading of the clock says which are lit and when the next will be: one lit between two readings would be missed.
        """
        while True:
            self._changed.clear()
            now = asyncio.get_running_loop().time()
            yield self._lit(now)
            next_at = min((at for at in self._tuned_at.values() if at is not None and at > now), default=None)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(next_at):
                    await self._changed.wait()

    def _lit(self, now: float) -> tuple[Cross, ...]:
        return tuple(cross for cross in sorted(self._tuned_at) if self._status(cross, now) == "tuned")

    def _status(self, cross: Cross, now: float) -> Status:
        at = self._tuned_at[cross]
        if at is None:
            return "invalid"
        if self.dead_ports & set(cross):
            return "failed"
        return "tuned" if now >= at else "tuning"


def _clash(a: Cross, b: Cross) -> bool:
    return a.ingress == b.ingress or a.egress == b.egress


MOST_BYTES = 1 << 20
"""A bulk-update of 1,008 circuits is about 100 kB."""


class Answer(NamedTuple):
    """An HTTP status and its JSON body; None for none."""

    status: int
    body: Any = None


class Dialect:
    """Stateless but for the device behind it. Refuses what it does not understand; never raises."""

    def __init__(self, device: OcsDevice, login: Login) -> None:
        self._device = device
        self._allowed = b"Basic " + base64.b64encode(f"{login.user}:{login.password}".encode())

    def answer(self, method: str, path: str, authorization: bytes, body: bytes) -> Answer:
        if not hmac.compare_digest(authorization, self._allowed):
            return _refused(401, "access-denied", "user or password is wrong")
        try:
            return self._answer(method, path, body)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return _refused(400, "invalid-value", str(error))

    def _answer(self, method: str, path: str, body: bytes) -> Answer:
        prefix = f"{DATA}/{CONFIG}/{CONFIG}_LIST="
        match method, path:
            case "POST", _ if path == BULK:
                asked = json.loads(body)["sonic-ocs:input"]
                delete = [self._known(str(each)) for each in asked.get("delete", [])]
                add = [self._known(str(each["cross_connect_id"])) for each in asked.get("add", [])]
                counts = self._device.update(delete, add)
                return Answer(200, {"sonic-ocs:output": {"deleted_count": counts[0], "added_count": counts[1]}})
            case "PATCH", _ if path == f"{DATA}/{CONFIG}":
                asked = json.loads(body)[f"sonic-ocs:{CONFIG}"][f"{CONFIG}_LIST"]
                self._device.update((), [self._known(str(each["cross_connect_id"])) for each in asked])
                return Answer(204)
            case "DELETE", _ if path.startswith(prefix):
                deleted, _ = self._device.update([self._known(path.removeprefix(prefix))], ())
                return Answer(204) if deleted else _refused(404, "invalid-value", "no such circuit")
            case "GET", _ if path == f"{DATA}/{CONFIG}":
                return _listed(CONFIG, [entry(cross) for cross in self._device.status()])
            case "GET", _ if path == f"{DATA}/{TABLE}":
                return _listed(TABLE, [{**entry(c), "status": s} for c, s in self._device.status().items()])
        return _refused(404, "operation-not-supported", f"{method} {path[:100]}")

    def _known(self, text: str) -> Cross:
        cross = parse_id(text)
        if max(cross) >= self._device.num_ports:
            raise ValueError(f"{text} names a port beyond {self._device.num_ports}")
        return cross


def _listed(table: str, entries: list[dict[str, str]]) -> Answer:
    return Answer(200, {f"sonic-ocs:{table}": {f"{table}_LIST": entries}})


def _refused(status: int, tag: str, message: str) -> Answer:
    error = {"error-type": "application", "error-tag": tag, "error-message": message}
    return Answer(status, {"ietf-restconf:errors": {"error": [error]}})


Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class HttpFront:
    """Bound when made: `url` is valid at once. Raises OSError where it can't be bound."""

    def __init__(self, dialect: Dialect, listen: str) -> None:
        self._socket = bind_listener(*host_port(listen))
        bound = self._socket.getsockname()
        self.url = f"http://{spelt(bound[0])}:{bound[1]}"
        settings = uvicorn.Config(application(dialect), lifespan="off", log_config=None, access_log=False, ws="none", limit_concurrency=64)
        self._server = HttpServer(settings)

    async def serve(self) -> None:
        """Until `stop`."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """The socket is closed by the server, within a tenth of a second."""
        self._server.should_exit = True


def application(dialect: Dialect) -> Callable[[dict[str, Any], Receive, Send], Awaitable[None]]:
    """The ASGI application. Refuses bodies that are longer than any change of circuits."""

    async def answer(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        body = b""
        more = True
        while more and len(body) <= MOST_BYTES:
            part = await receive()
            body, more = body + part.get("body", b""), part.get("more_body", False)
        headers = dict(scope["headers"])
        found = Answer(413) if more else dialect.answer(
            scope["method"], scope["path"], headers.get(b"authorization", b""), body
        )  # fmt: skip
        kind = [(b"content-type", YANG_JSON.encode())]
        await send({"type": "http.response.start", "status": found.status, "headers": kind})
        await send({"type": "http.response.body", "body": encoded(found)})

    return answer


def encoded(answer: Answer) -> bytes:
    return b"" if answer.body is None else json.dumps(answer.body).encode()


class EmulatedSwitch(Actor):
    """Comes back empty after a restart, like mirrors. Only who knows the password of this incarnation may use it."""

    role = "optical_switch"
    drain_order = 95

    class Config(ActorConfig):
        fabric: FabricSection = FabricSection()

    config: Config

    def __init__(self, config: Config, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        section = config.fabric
        self._login = Login("rubato", secrets.token_urlsafe(24))
        self.device = OcsDevice(section.ports, section.reconfiguration_s)
        self._dialect = Dialect(self.device, self._login)
        self._front: HttpFront | None = None

    async def on_start(self) -> None:
        if self.config.fabric.listen:
            self._front = HttpFront(self._dialect, self.config.fabric.listen)
            self.spawn(self._front.serve(), name=f"{self.name}.http")

        if self.config.fabric.testbed:
            self.spawn(self._light_links(), name=f"{self.name}.links")

    async def on_stop(self) -> None:
        if self._front is not None:
            self._front.stop()

    @handler
    async def find_switch(self, request: FindSwitch) -> SwitchAddress:
        return SwitchAddress(self._front.url if self._front else "", *self._login)

    @handler
    async def switch_request(self, request: SwitchRequest) -> SwitchReply:
        """Answered at once, also while mirrors move."""
        answer = self._dialect.answer(request.method, request.path, request.authorization, request.body)
        status = self.device.status().values()
        self.metrics.gauge("switch/lit", sum(each == "tuned" for each in status))
        self.metrics.gauge("switch/changes", self.device.num_changes)
        return SwitchReply(answer.status, encoded(answer))

    async def _light_links(self) -> None:
        """Follow the light, until cancelled. Raises LinksError, in a group, where the test-bed is gone."""
        async with links(self.config.fabric) as rates:
            async for lit in self.device.light():
                await rates.follow(lit)
