"""The gateway: agents from outside play trajectories by their own requests over HTTP, and are trained, token for token.

    POST /sessions                   {"task"?, "metadata"?} → {"session_id", "api_key", "base_url", "task", "row", "seed", "purpose", "version", …}
    POST /sessions/{id}/complete     {"reward"?, "error"?} → {"session_id", "segments"}
    GET  /sessions/{id}              its transcripts: token ids, masks, versions
    POST /v1/chat/completions        with the session's key, or below /sessions/{id}; so are the other dialects, see dialects.py
    GET  /v1/models

A session is a ticket of the sample buffer: its group, its bound on age and its fate are as those of any rollout.
"""

import asyncio
import hmac
import importlib.util
import json
import os
import secrets
import socket
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

import msgspec
import uvicorn
from pydantic import Field, field_validator

from rubato.actors.envs.chat import Renderer, renderer_of
from rubato.actors.envs.manager import EnvManager
from rubato.actors.envs.recorder import GaveUp, Recorder, RecorderContext
from rubato.actors.envs.rollout import Rollout
from rubato.actors.envs.section import Task
from rubato.actors.gateway.answering import answer_in, refusal
from rubato.actors.gateway.dialect import Dialect, Error, openai_error
from rubato.actors.gateway.dialects import DIALECTS
from rubato.actors.gateway.http_server import HttpServer
from rubato.actors.gateway.session import OverCode, Refused, Session, SessionOver
from rubato.actors.messages.samples import Ticket
from rubato.bus.address import BadAddress, bind_listener, host_port, spelt
from rubato.bus.message import unpack_i32
from rubato.runtime.config import Config as Job
from rubato.runtime.config import Section
from rubato.runtime.errors import ConfigError, first_cause
from rubato.runtime.kernel import Kernel

BodyT = TypeVar("BodyT")

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

FILE = "gateway.json"
"""Of the run's folder, for its owner alone: address and admin key."""

MOST_BYTES = 16 * 2**20
"""Of a request."""

BODY_S = 30.0
"""Longest that a request's body may take to come."""

OVER_KEPT = 4096
"""Sessions that are over of which is still known why."""

RENDERERS = 16
"""Sets of tools whose renderer is kept."""


def run_over() -> Refused:
    """The job is complete, or drains."""
    return Refused(410, "run_over", "the run takes no more sessions")


class GatewaySection(Section):
    """Sessions for agents that come from outside, over HTTP."""

    listen: str = "127.0.0.1:0"
    """HOST:PORT; port 0 takes a free one. RUN/gateway.json has the address and the key."""
    wait_s: float = Field(default=600.0, gt=0)
    """Longest that POST /sessions waits for a place in a batch; after it 503, to be tried again."""
    idle_s: float = Field(default=600.0, gt=0)
    """A session without a request for so long is over, and another attempt takes its place."""
    max_waiting: int = Field(default=1024, ge=1)
    """Requests for sessions that may wait at once; more are answered 429."""

    @field_validator("listen")
    @classmethod
    def _is_address(cls, listen: str) -> str:
        try:
            host_port(listen)
        except BadAddress as error:
            raise ValueError(str(error)) from None
        return listen


class Address(msgspec.Struct):
    """What clients need, in FILE."""

    url: str = ""
    admin_key: str = ""

    @property
    def port(self) -> int:
        """0: none."""
        return urlsplit(self.url).port or 0


class Opening(msgspec.Struct):
    """Body of POST /sessions."""

    task: str | None = None
    metadata: Any = None


class Ending(msgspec.Struct):
    """Body of POST /sessions/{id}/complete."""

    reward: float | None = None
    error: str | None = None


class _Sessions(NamedTuple):
    """Stands in for a RolloutContext: rollouts of one task are sessions."""

    gateway: "Gateway"
    task: Task
    context: RecorderContext

    def rollout_of(self, ticket: Ticket) -> Rollout:
        return self.gateway.session_of(self.task, self.context, ticket)


class Gateway(EnvManager):
    """An environment manager whose rollouts are played by whoever opens a session: it asks for as many tickets as openings wait."""

    role: ClassVar[str] = "gateway"
    provides: ClassVar[frozenset[str]] = frozenset({"env_manager"})
    least: ClassVar[int] = 0

    class Config(EnvManager.Config):
        gateway: GatewaySection = GatewaySection()

    @classmethod
    def check(cls, job: Job) -> None:
        super().check(job)
        if "env_manager" in job.actors:
            raise ValueError("actors has gateway and env_manager, and both would play the same tasks: leave one of them out")

    @classmethod
    def check_host(cls, config: Any) -> None:
        if importlib.util.find_spec("starlette") is None:
            raise ConfigError("rubato.actors.gateway.gateway needs the package starlette: pip install -e '.[serve]'")

    def __init__(self, config: Any, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self._section: GatewaySection = config.gateway
        self._admin_key = secrets.token_urlsafe(32)
        self._openings: deque[asyncio.Future[Session]] = deque()
        self._sessions: dict[str, Session] = {}
        """By id, and those that run by key too."""
        self._ended_sessions: OrderedDict[str, str] = OrderedDict()
        """Id and key of those that are over → why."""
        self._renderers: OrderedDict[str, Renderer] = OrderedDict()
        self._building = asyncio.Lock()
        self._server: HttpServer | None = None
        self._served: asyncio.Task[None] | None = None
        self._url = ""
        self._takes_more = True

    async def on_start(self) -> None:
        """Listen; an address that can't be had ends the job with a sentence."""
        host, port = host_port(self._section.listen)
        before = await self.offload(self._read_address)
        self._admin_key = before.admin_key or self._admin_key
        try:
            listening = await self._bound(host, port, before)
        except OSError as error:
            self.finish(
                f"the gateway can't listen at {self._section.listen}: {error.strerror}. Set gateway.listen=127.0.0.1:0 for a free port",
                failed=True,
            )
            return
        self._url = f"http://{spelt(host or '127.0.0.1')}:{listening.getsockname()[1]}"
        await super().on_start()
        self._server = HttpServer(uvicorn.Config(self._app(), lifespan="off", ws="none", log_config=None))
        self._served = self.spawn(self._server.serve(sockets=[listening]), name=f"{self.name}.http")
        await self.offload(self._write_address)
        self.log.info("gateway_listening", url=self._url)

    async def on_stop(self) -> None:
        """Who still waits is not answered."""
        await super().on_stop()
        if self._server is not None and self._served is not None:
            self._server.end()
            self._server.end()
            await self._served

    async def _bound(self, host: str, port: int, before: Address) -> socket.socket:
        """Where the config leaves the port open, the one of before, at which clients ask again. Raises OSError."""
        if port == 0 and before.port:
            with suppress(OSError):
                return bind_listener(host, before.port)
        return bind_listener(host, port)

    def _read_address(self) -> Address:
        """What a gateway of this run wrote before it ended; an empty one where there was none. Blocks."""
        try:
            return msgspec.json.decode((self.run.folder / FILE).read_bytes(), type=Address)
        except (OSError, msgspec.MsgspecError):
            return Address()

    def _write_address(self) -> None:
        path = self.run.folder / FILE
        draft = path.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(Address(self._url, self._admin_key)))
        draft.replace(path)

    # -- tickets ------------------------------------------------------------------------------------------------------

    def _hosts_of(self) -> dict[str, Any]:
        """None: agents bring their environments."""
        return {}

    async def _prepare(self) -> str:
        for name, task in self._tasks.items():
            try:
                renderer = await self._renderer(task, ())
            except ValueError as error:
                return str(error)
            context = RecorderContext(
                rollout=task.rollout,
                eval=self.config.eval,
                renderer=renderer,
                proxy=self.ref("llm_proxy"),
                policy=lambda: self._policy,
                waits=self.waits,
                reward=self.ref("reward_service") if task.reward.targets else None,
                score_names=task.reward.names,
            )
            self._rollouts[name] = cast("Any", _Sessions(self, task, context))
        return ""

    async def _admit(self) -> None:
        try:
            await super()._admit()
        finally:
            self._takes_more = False
            while self._openings:
                opening = self._openings.popleft()
                if not opening.done():
                    opening.set_exception(run_over())

    def _room(self) -> int:
        return min(len(self._openings), self.config.env.concurrency - len(self._running))

    def session_of(self, task: Task, context: RecorderContext, ticket: Ticket) -> Rollout:
        """A rollout by `ticket`, for the agent that waits longest; without one it ends at once, and another attempt begins."""
        session = Session(partial(self._renderer, task), offload=self.offload, idle_s=self._section.idle_s, max_len=task.rollout.max_len)
        while self._openings:
            opening = self._openings.popleft()
            if not opening.done():
                opening.set_result(session)
                break
        else:
            session.fail(GaveUp("agent_left", "it went away before its session began", retry=True))
        recorder = Recorder(context, ticket)
        session.begin(recorder)
        self._sessions |= {session.id: session, session.key: session}
        return Rollout(recorder, session)

    async def _run(self, running: Any) -> None:
        try:
            await super()._run(running)
        finally:
            session = running.rollout.driver
            for name in (session.id, session.key):
                self._sessions.pop(name, None)
                self._ended_sessions[name] = session.over or "cancelled"
            while len(self._ended_sessions) > 2 * OVER_KEPT:
                self._ended_sessions.popitem(last=False)
            session.settle()

    async def _renderer(self, task: Task, tools: Sequence[Mapping[str, Any]]) -> Renderer:
        key = json.dumps([task.rollout.model_dump(mode="json"), [*tools]], sort_keys=True)
        async with self._building:
            if key not in self._renderers:
                build = partial(renderer_of, task.rollout, self.run.folder / self.config.model.path, tools=tools)
                self._renderers[key] = await self.offload(build)
            self._renderers.move_to_end(key)
            while len(self._renderers) > RENDERERS:
                self._renderers.popitem(last=False)
            return self._renderers[key]

    # -- HTTP ---------------------------------------------------------------------------------------------------------

    def _app(self) -> Any:
        """The ASGI application."""
        from starlette.applications import Starlette  # for jobs alone that have this actor
        from starlette.routing import Route

        routes = [
            Route("/sessions", self._answering(self._open), methods=["POST"]),
            Route("/sessions/{id}", self._answering(self._show), methods=["GET"]),
            Route("/sessions/{id}/complete", self._answering(self._complete), methods=["POST"]),
            Route("/v1/models", self._answering(self._models), methods=["GET"]),
            Route("/sessions/{id}/v1/models", self._answering(self._models), methods=["GET"]),
        ]
        for path, dialect in DIALECTS.items():
            endpoint = self._answering(partial(self._asked, dialect), dialect.error)
            routes += [Route(prefix + path, endpoint, methods=["POST"]) for prefix in ("", "/sessions/{id}")]
        return Starlette(routes=routes)

    def _answering(
        self, answer: Callable[["Request"], Awaitable[Any]], error: Callable[[Error], Any] = openai_error
    ) -> Callable[["Request"], Awaitable["Response"]]:
        from starlette.responses import Response

        async def respond(request: "Request") -> Response:
            try:
                told = await answer(request)
            except (SessionOver, Refused) as why:
                return refusal(why, error)
            return told if isinstance(told, Response) else Response(msgspec.json.encode(told), media_type="application/json")

        return respond

    async def _open(self, request: "Request") -> Any:
        self._check_admin(request)
        opening = _decoded(await _body_of(request), Opening)
        if opening.task is not None and opening.task not in self._tasks:
            raise Refused(
                404, "no_such_task", f"the run has no task {opening.task[:80]!r}; it has {', '.join(self._tasks) or 'one without a name'}"
            )
        if not self._takes_more:
            raise run_over()
        if len(self._openings) >= self._section.max_waiting:
            raise Refused(429, "too_many_waiting", f"gateway.max_waiting={self._section.max_waiting} openings wait already")
        waiting: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        self._openings.append(waiting)
        self._changed.set()
        try:
            async with asyncio.timeout(self._section.wait_s), _until_gone(request):
                session = await waiting
        except TimeoutError:
            raise Refused(503, "no_room", f"no place in a batch came free within gateway.wait_s={self._section.wait_s:g}") from None
        finally:
            waiting.cancel()
            if waiting in self._openings:
                self._openings.remove(waiting)
        session.metadata = opening.metadata
        ticket = session.recorder.ticket
        return {
            "session_id": session.id,
            "api_key": session.key,
            "base_url": f"{self._url}/sessions/{session.id}/v1",
            "task": ticket.task,
            "row": ticket.row,
            "seed": ticket.seed,
            "purpose": ticket.purpose,
            "version": ticket.version,
            "expires_s": self._section.idle_s,
        }

    async def _complete(self, request: "Request") -> Any:
        session = self._session_of(request)
        ending = _decoded(await _body_of(request), Ending)
        if ending.error is not None:
            session.fail(GaveUp("agent_failed", ending.error[:2000]))
        else:
            session.complete(ending.reward or 0.0)
        await session.settled()
        return {"session_id": session.id, "segments": len(session.recorder.transcripts)}

    async def _show(self, request: "Request") -> Any:
        session = self._session_of(request)
        return {
            "session_id": session.id,
            "metadata": session.metadata,
            "turns": len(session.forest.turns),
            "segments": [
                {
                    "token_ids": unpack_i32(segment.tokens),
                    "mask": list(segment.mask),
                    "versions": [[span.version, span.start, span.end] for span in segment.spans],
                }
                for segment in (transcript.segment() for transcript in session.recorder.transcripts)
            ],
        }

    async def _models(self, request: "Request") -> Any:
        self._session_of(request)
        return {"object": "list", "data": [{"id": self.run.folder.name, "object": "model", "owned_by": "rubato"}]}

    async def _asked(self, dialect: Dialect[Any], request: "Request") -> Any:
        session, body = self._session_of(request), await _body_of(request)
        async with _until_gone(request):
            return await answer_in(dialect, session, body, self.run.folder.name)

    def _check_admin(self, request: "Request") -> None:
        if not hmac.compare_digest(_key_of(request).encode(), self._admin_key.encode()):
            raise Refused(401, "invalid_api_key", f"the key is not the one in RUN/{FILE}")

    def _session_of(self, request: "Request") -> Session:
        """By its path or its key; a path alone names nobody's. Raises SessionOver and Refused."""
        key, name = _key_of(request), request.path_params.get("id")
        is_admin = hmac.compare_digest(key.encode(), self._admin_key.encode())
        found = name if name and is_admin else key
        session = self._sessions.get(found)
        if session is None and (over := self._ended_sessions.get(found)) is not None:
            raise SessionOver(cast("OverCode", over))
        if session is None or (name and session.id != name):
            raise Refused(401, "invalid_api_key", "no session has this key")
        return session


def _key_of(request: "Request") -> str:
    return request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")


def _decoded(body: bytes, kind: type[BodyT]) -> BodyT:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.MsgspecError as error:
        raise Refused(400, "invalid_request_error", f"the body is not what is asked for here: {error}") from None


async def _body_of(request: "Request") -> bytes:
    """Raises Refused for one that does not come whole."""
    from starlette.requests import ClientDisconnect

    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MOST_BYTES:
                    raise Refused(413, "too_large", f"a request may have {MOST_BYTES:,} bytes")
    except TimeoutError:
        raise Refused(408, "timeout", f"the request did not come whole within {BODY_S:g} s") from None
    except ClientDisconnect:
        raise Refused(400, "invalid_request_error", "the request did not come whole") from None
    return bytes(body)


@asynccontextmanager
async def _until_gone(request: "Request") -> AsyncGenerator[None]:
    """A block that ends when who asked has left, with a refusal that is not heard."""
    left = Refused(400, "client_left", "its client went away")

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        raise left

    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            yield
            watching.cancel()
    except BaseExceptionGroup as group:
        raise first_cause(group) from None
