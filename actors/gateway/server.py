"""The HTTP room of sessions: requests of agents, each for the session that its path or its key names.

    POST /sessions/{id}/complete     {"reward"?, "rewards"?, "answer"?, "error"?} → {"session_id", "fate"?, "segments", "unused"}
    GET  /sessions/{id}              its contexts: token ids, masks, versions, and which carry its reward as it is now
    POST /v1/chat/completions        with the session's key, or below /sessions/{id}
    GET  /v1/models

Other dialects than chat completions have paths of their own, see answering.py.
"""

import asyncio
import socket
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import uvicorn

from rubato.actors.gateway.answering import DIALECTS, answer_in, refusal
from rubato.actors.gateway.deadlines import Deadlines
from rubato.actors.gateway.dialect import UNREADABLE, Dialect, Error, openai_error, whole_pairs
from rubato.actors.gateway.session import KEY_PREFIX, Ending, OverCode, Refused, Session, SessionOver, check_ending
from rubato.bus.message import unpack_i32
from rubato.runtime.errors import first_cause
from rubato.runtime.http_server import CLIENT, QUIET, Client, HttpServer, bearer_of, is_let_in, send_json

BodyT = TypeVar("BodyT")

if TYPE_CHECKING:
    from starlette.requests import Request

MOST_BYTES = 16 * 2**20
"""Of a request."""

BODY_S = 30.0
"""Longest that a request's body may take to come."""

KEEP_ALIVE_S = 75
"""An idle connection is closed after so long: later than clients close theirs, else a request may meet the end of its connection."""

OVER_KEPT = 4096
"""Sessions that are over of which is still known why."""


class Over(NamedTuple):
    """What is still known of a session that is over."""

    code: OverCode
    key: str
    ending: bytes | None
    """Its digest."""
    told: dict[str, Any]
    """What its agent was answered to that."""


class SessionServer:
    """Answers for the sessions that were added and are not over."""

    def __init__(self, model: str, admin_key: str = "") -> None:
        """`model` is what clients are given as its name. With `admin_key` one may ask for every session; without one, no key does."""
        self.admin_key = admin_key
        self._model = model
        self._http: HttpServer | None = None
        self._bodies = Deadlines(BODY_S)
        self._sessions: dict[str, Session] = {}
        """By id, and those that run by key too."""
        self._over: OrderedDict[str, Over] = OrderedDict()
        """By id and key."""

    async def serve(self, listening: socket.socket, *opening: Any) -> None:
        """Answer until cancelled; `opening` are further routes."""
        self._http = http_server(self._app(opening))
        await self._http.run_on(listening)

    async def answer_on(self, listening: socket.socket, most: int) -> None:
        """While it serves, answer on one more socket, at most `most` connections at once, until cancelled."""
        assert self._http is not None
        await self._http.answer_on(listening, most)

    def add(self, session: Session) -> None:
        """It is asked from now on."""
        self._sessions |= {session.id: session, session.key: session}

    def remove(self, session: Session) -> None:
        """It is over, and the sample buffer has its end."""
        for name in (session.id, session.key):
            self._sessions.pop(name, None)
            self._over[name] = Over(session.over or "cancelled", session.key, session.ending, session.told)
        while len(self._over) > 2 * OVER_KEPT:
            self._over.popitem(last=False)
        session.settle()

    def _app(self, opening: Sequence[Any]) -> Any:
        """The ASGI application."""
        from starlette.routing import Route, Router  # for jobs alone that have sessions

        turns = {path: Answering(partial(self._asked, dialect), dialect.error, method="POST") for path, dialect in DIALECTS.items()}
        routes = [  # tried in this order
            *(Route(below + path, turn) for path, turn in turns.items() for below in ("", "/sessions/{id}")),
            *opening,
            Route("/sessions/{id}", Answering(self._show, method="GET")),
            Route("/sessions/{id}/complete", Answering(self._complete, method="POST")),
            Route("/v1/models", Answering(self._models, method="GET")),
            Route("/sessions/{id}/v1/models", Answering(self._models, method="GET")),
        ]
        # What an application adds answers errors, which Answering does.
        router = Router(routes, redirect_slashes=False, default=Answering(_nothing_here))

        async def app(scope: Any, receive: Any, send: Any) -> None:
            """Most requests are for a turn of a session: these are not sought among the routes."""
            parts, turn = scope["path"].split("/", 3), None
            if len(parts) == 4 and parts[:2] == ["", "sessions"] and parts[2] and scope["method"] == "POST":
                turn = turns.get(f"/{parts[3]}")
                scope["path_params"] = {"id": parts[2]}
            await (turn or router)(scope, receive, send)

        return app

    async def _complete(self, request: "Request") -> Any:
        found = self._found(request)
        ending = decoded(await body_of(request), Ending)
        if isinstance(found, Session):
            found.complete(ending)
            return await found.settled()
        if found.ending is None:
            raise SessionOver(found.code)
        check_ending(ending, found.ending)
        return found.told

    async def _show(self, request: "Request") -> Any:
        session = self._session_of(request)
        carrying = session.carrying()
        shown = ((transcript.segment(), transcript in carrying) for transcript in session.recorder.transcripts)
        return {
            "session_id": session.id,
            "metadata": session.metadata,
            "turns": len(session.forest.turns),
            "segments": [
                {
                    "token_ids": unpack_i32(segment.tokens),
                    "mask": list(segment.mask),
                    "versions": [[span.version, span.start, span.end] for span in segment.spans],
                    "carries": carries,
                }
                for segment, carries in shown
            ],
        }

    async def _models(self, request: "Request") -> Any:
        self._session_of(request).heard()
        return {"object": "list", "data": [{"id": self._model, "object": "model", "owned_by": "rubato"}]}

    async def _asked(self, dialect: Dialect[Any], request: "Request") -> Any:
        session = self._session_of(request)
        session.heard()  # also by what can't be read; to look at it is not to ask
        body = await body_of(request, self._bodies.block())
        async with until_gone(request):
            return await answer_in(dialect, session, body, self._model)

    def check_admin(self, request: "Request") -> None:
        """Raises Refused."""
        if not self._is_admin(key_of(request)):
            raise Refused(401, "invalid_api_key", "the key is not the one in the run's gateway.json")

    def _is_admin(self, key: str) -> bool:
        return bool(self.admin_key) and is_let_in(key, self.admin_key)

    def _session_of(self, request: "Request") -> Session:
        """The one that is asked, and not over. Raises SessionOver and Refused."""
        found = self._found(request)
        if isinstance(found, Over):
            raise SessionOver(found.code)
        return found

    def _found(self, request: "Request") -> Session | Over:
        """By its path, whose id is as good as its key, or by its key. Raises Refused.

        Clients send a key of some kind in any case: below a session's path only one of another session is refused.
        """
        name, key = _name_of(request), key_of(request)
        found = self._sessions.get(name) or self._over.get(name)
        if found is None or (key.startswith(KEY_PREFIX) and key != found.key):
            raise Refused(401, "invalid_api_key", "no session has this key")
        return found

    def session_by(self, name: str) -> Session:
        """The one whose id or key `name` is. Raises SessionOver and Refused."""
        if session := self._sessions.get(name):
            return session
        if (over := self._over.get(name)) is not None:
            raise SessionOver(over.code)
        raise Refused(401, "invalid_api_key", "no session has this key")


def http_server(app: Any) -> HttpServer:
    """Of an ASGI application."""
    return HttpServer(uvicorn.Config(app, timeout_keep_alive=KEEP_ALIVE_S, **QUIET))


class Answering:
    """An endpoint of what `answer` gives, and of how it refuses."""

    def __init__(
        self, answer: Callable[["Request"], Awaitable[Any]], error: Callable[[Error], Any] = openai_error, *, method: str = ""
    ) -> None:
        """Of requests with this method; empty: any."""
        self._answer, self._error, self._method = answer, error, method

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request
        from starlette.responses import Response

        try:
            if scope["method"] != (self._method or scope["method"]):
                raise Refused(405, "method_not_allowed", f"{scope['path'][:200]} takes {self._method} alone")
            told = await self._answer(Request(scope, receive))
        except (SessionOver, Refused) as why:
            told = refusal(why, self._error)
        if isinstance(told, Response):
            await told(scope, receive, send)
            return
        await send_json(scope, send, msgspec.json.encode(told))


async def _nothing_here(request: "Request") -> Any:
    raise Refused(404, "not_found", f"there is no {request.scope['path'][:200]}")


def key_of(request: "Request") -> str:
    told = dict(reversed(request.scope["headers"]))  # the first of a name counts
    return told.get(b"x-api-key", b"").decode("latin-1") or bearer_of(told.get(b"authorization", b"").decode("latin-1"))


def _name_of(request: "Request") -> str:
    """Id or key of the session that is meant."""
    return request.path_params.get("id") or key_of(request)


def decoded(body: bytes, kind: type[BodyT]) -> BodyT:
    """Raises Refused."""
    try:
        return msgspec.json.decode(whole_pairs(body) or b"{}", type=kind)
    except UNREADABLE as error:
        raise Refused(400, "invalid_request_error", f"the body is not what is asked for here: {error}") from None


async def body_of(request: "Request", limit: AbstractAsyncContextManager[Any] | None = None) -> bytes:
    """Raises Refused for one that does not come whole within `limit`, which is BODY_S."""
    body, more = bytearray(), True
    try:
        async with limit or asyncio.timeout(BODY_S):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "invalid_request_error", "the request did not come whole")
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > MOST_BYTES:
                    raise Refused(413, "too_large", f"a request may have {MOST_BYTES:,} bytes")
    except TimeoutError:
        raise Refused(408, "timeout", f"the request did not come whole within {BODY_S:g} s") from None
    return bytes(body)


def until_gone(request: "Request") -> AbstractAsyncContextManager[None]:
    """A block that ends when who asked has left, with a refusal that is not heard."""
    client = request.scope.get("state", {}).get(CLIENT)
    return _until_disconnected(request) if client is None else _UntilLeft(client)


def _left() -> Refused:
    return Refused(400, "client_left", "its client went away")


class _UntilLeft(AbstractAsyncContextManager[None]):
    """By its connection: no task waits for that."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._client.left:
            raise _left()
        self._task, self._cancelling = task, task.cancelling()
        self._client.asks = task

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._client.asks = None
        if self._client.left and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise _left()


@asynccontextmanager
async def _until_disconnected(request: "Request") -> AsyncGenerator[None]:
    """By what any server tells of it."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        raise _left()

    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            yield
            watching.cancel()
    except ExceptionGroup as group:
        raise first_cause(group) from None
