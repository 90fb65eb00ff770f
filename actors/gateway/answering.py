"""A request for a turn, over HTTP: read, asked of its session, and answered in its dialect, whole or as a stream."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from secrets import token_hex
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from rubato.actors.gateway import chat_api, generate_api, messages_api, responses_api, token_api
from rubato.actors.gateway.dialect import Asked, Dialect, Error, Head, comment, openai_error, openai_failed
from rubato.actors.gateway.session import Answer, Ask, AskTokens, Refused, SessionOver
from rubato.runtime.observe.trace import wall_s

if TYPE_CHECKING:
    from starlette.responses import Response

BEAT_S = 10.0
"""Between two signs of life of a stream whose answer is not there yet."""

_messages = Dialect(
    messages_api.asked_in, messages_api.whole, messages_api.events, messages_api.error, messages_api.failed, messages_api.waiting
)

DIALECTS: Mapping[str, Dialect[Any]] = MappingProxyType(
    {
        "/v1/chat/completions": Dialect(chat_api.asked_in, chat_api.whole, chat_api.events, openai_error, openai_failed, comment),
        "/v1/responses": Dialect(
            responses_api.asked_in, responses_api.whole, responses_api.events, openai_error, responses_api.failed, responses_api.waiting
        ),
        "/v1/messages": _messages,
        "/v1/messages/count_tokens": replace(_messages, counted=messages_api.counted),
        token_api.PATH: Dialect(generate_api.asked_in, generate_api.whole, generate_api.events, openai_error, openai_failed, comment),
    }
)
"""By path; each stands below a session's own path too."""

Turns = Callable[[], Awaitable[tuple[Answer, ...]]]


class Speaker(Protocol):
    """What turns are asked of: a session, or engines outside any. Both raise SessionOver and Refused."""

    async def turns(self, ask: Ask | AskTokens) -> tuple[Answer, ...]: ...

    async def count(self, ask: Ask) -> int:
        """Tokens of its prompt."""
        ...


async def answer_in(dialect: Dialect[Any], session: Speaker, body: bytes, model: str) -> Any:
    """What the session answers to `body`: JSON's types, or a response that streams. `model` is its name where none was asked for.

    Raises SessionOver and Refused.
    """
    asked = dialect.asked_in(body)
    ask = asked.ask
    if dialect.counted is not None:
        return dialect.counted(await session.count(ask))
    head = Head(token_hex(16), int(wall_s()), asked.model or model)
    if asked.streams:
        return _streamed(dialect, asked, head, partial(session.turns, ask))
    return dialect.whole(asked, await session.turns(ask), head)


def refusal(why: Error, error: Callable[[Error], Any] = openai_error) -> "Response":
    """The response of a request that has no answer."""
    from starlette.responses import Response

    headers = {"Retry-After": "1"} if why.status in (429, 503) else {}
    return Response(msgspec.json.encode(error(why)), why.status, headers, "application/json")


def _streamed(dialect: Dialect[Any], asked: Asked, head: Head, turns: Turns) -> "Response":
    """It begins once there is an answer, or the first sign of life is due: what is wrong before that is told by a status. Where its client
    leaves, the turn ends.
    """
    from starlette.responses import Response  # for jobs alone that have sessions

    class Streamed(Response):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async with asyncio.TaskGroup() as tasks:
                turn, left = tasks.create_task(_told(turns)), tasks.create_task(_gone(receive))
                try:
                    await asyncio.wait((turn, left), timeout=BEAT_S, return_when=asyncio.FIRST_COMPLETED)
                    if turn.done() and isinstance(why := turn.result(), Error):
                        await refusal(why, dialect.error)(scope, receive, send)
                    elif not left.done():
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        await _stream(dialect, asked, head, turn, left, send)
                finally:
                    turn.cancel()
                    left.cancel()

    streamed = Streamed(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    del streamed.headers["Content-Length"]
    return streamed


async def _stream(
    dialect: Dialect[Any], asked: Asked, head: Head, turn: "asyncio.Task[tuple[Answer, ...] | Error]", left: "asyncio.Task[None]", send: Any
) -> None:
    async def tell(event: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": event, "more_body": more})

    while not turn.done():
        await tell(dialect.waiting(asked, head))
        head = head._replace(num_waited=head.num_waited + 1)
        await asyncio.wait((turn, left), timeout=BEAT_S, return_when=asyncio.FIRST_COMPLETED)
        if left.done():
            return
    found = turn.result()
    for event in dialect.failed(asked, found, head) if isinstance(found, Error) else dialect.events(asked, found, head):
        await tell(event)
    await tell(b"", more=False)


async def _told(turns: Turns) -> tuple[Answer, ...] | Error:
    try:
        return await turns()
    except (SessionOver, Refused) as error:
        return error


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    """Return once the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
