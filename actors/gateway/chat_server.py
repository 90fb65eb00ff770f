"""The job's own engines as an OpenAI-compatible server: for a judge of rewards, or an agent that speaks nothing else.

    POST /v1/chat/completions   {"messages": […], "max_tokens", "temperature", "top_p", "seed", "model"}: one choice, not streamed
    GET  /v1/models

Answers come from the policy that is being trained, under the weights that its engine has by then; what is sampled here trains nothing. Where
RUBATO_CHAT_TOKEN is set, no request is answered without it (`Authorization: Bearer`).
"""

import asyncio
import hmac
import importlib.util
import os
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from uuid import uuid4

import msgspec
import uvicorn
from pydantic import Field

from rubato.actors.config import ModelSection, RolloutSection
from rubato.actors.envs.chat import TOKEN_BYTES, renderer_of
from rubato.actors.envs.hosting import flaw_of, normal
from rubato.actors.gateway.http_server import HttpServer
from rubato.actors.messages.generation import Completion, Generate, Sampling, why_early
from rubato.bus.address import bare, bind_listener, spelt
from rubato.bus.errors import AskFailed, Failed, Unknown
from rubato.runtime.actor import Actor
from rubato.runtime.config import ActorConfig, Section
from rubato.runtime.errors import ConfigError
from rubato.runtime.kernel import Kernel
from rubato.runtime.observe.trace import wall_s

if TYPE_CHECKING:
    from starlette.requests import Request

TOKEN = "RUBATO_CHAT_TOKEN"

MOST_BYTES = 4 * 1024 * 1024
"""Of a request."""

BODY_S = 30.0
"""Longest that a request's body may take to come."""

DEFAULT_TOKENS = 1024
"""Of a completion, where the request says nothing."""

_Answer = tuple[int, dict[str, Any]]


class ChatSection(Section):
    """Where the engines are served over HTTP."""

    host: str = "127.0.0.1"
    port: int = Field(default=8001, ge=0, le=65_535)
    """0 takes a free one, which the log names."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Longest that a completion may take; after it the caller is answered 504."""
    max_concurrent: int = Field(default=256, ge=1)
    """Requests under way; more are answered 503."""


_NumTokens = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]

_PLAIN: Mapping[str, Any] = MappingProxyType(
    {"response_format": {"type": "text"}, "logprobs": False, "logit_bias": {}, "frequency_penalty": 0, "presence_penalty": 0}
)
"""What clients say where they want nothing of the kind."""


ROLES = ("system", "developer", "user", "assistant", "tool")


class Asked(msgspec.Struct):
    """The body of a request. What would change the answer and can't be had is refused; what else clients send is passed over."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    max_tokens: _NumTokens | None = None
    max_completion_tokens: _NumTokens | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    seed: int | None = None
    model: str | None = None
    n: Literal[1] | None = None
    stream: bool | None = None
    stop: None = None
    tools: None = None
    functions: None = None
    response_format: Any = None
    logprobs: Any = None
    logit_bias: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None

    def __post_init__(self) -> None:
        if self.stream:
            raise ValueError("stream=true is not supported: the answer comes in one piece. Set stream=false")
        if flaw := flaw_of(self.messages):
            raise ValueError(flaw)
        if strange := [role for message in self.messages if (role := message["role"]) not in ROLES]:
            raise ValueError(f"a message's role is one of {', '.join(ROLES)}, not {strange[0][:80]}")
        for name, plain in _PLAIN.items():
            if getattr(self, name) not in (None, plain):
                raise ValueError(f"{name} can't be had here: leave it out")


class ChatServer(Actor):
    """Renders chats as rollouts are, without their system prompt, and asks the proxies. It keeps no state."""

    role: ClassVar[str] = "chat_server"
    needs: ClassVar[tuple[str, ...]] = ("llm_proxy", "engine")

    class Config(ActorConfig):
        model: ModelSection = ModelSection()
        rollout: RolloutSection = RolloutSection()
        chat: ChatSection = ChatSection()

    config: Config

    @classmethod
    def check_host(cls, config: Any) -> None:
        """The packages that serve."""
        if importlib.util.find_spec("starlette") is None:
            raise ConfigError("rubato.actors.gateway.chat_server needs the package starlette: pip install -e '.[serve]'")

    def __init__(self, config: Config, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self._section = config.chat
        self._token = os.environ.get(TOKEN, "")
        self._server: HttpServer | None = None
        self._served: asyncio.Task[None] | None = None
        self._under_way = 0
        self._model = self.run.folder.name

    async def on_start(self) -> None:
        """Listen; an address that can't be had ends the job with a sentence."""
        host, port = self._section.host, self._section.port
        self._chat = await self.offload(partial(renderer_of, self.config.rollout, self.run.folder / self.config.model.path, cached=0))
        try:
            listening = bind_listener(host, port, backlog=self._section.max_concurrent)
        except OSError as error:
            self.finish(f"chat_server can't listen at {host}:{port}: {error}. Set chat.port=0 for a free one", failed=True)
            return
        self._server = HttpServer(uvicorn.Config(self._app(), lifespan="off", ws="none", log_config=None))
        self._served = self.spawn(self._server.serve(sockets=[listening]), name=f"{self.name}.http")
        self.log.info("chat_listening", url=f"http://{spelt(bare(host))}:{listening.getsockname()[1]}/v1")

    async def on_stop(self) -> None:
        """Who is still waiting is not answered."""
        if self._server is not None and self._served is not None:
            self._server.end()
            self._server.end()
            await self._served

    def _app(self) -> Any:
        """The ASGI application."""
        from starlette.applications import Starlette  # for jobs alone that have this actor
        from starlette.requests import Request
        from starlette.responses import Response
        from starlette.routing import Route

        def told(status: int, body: Any) -> Response:
            headers = {"Retry-After": "1"} if status == 503 else {}
            return Response(msgspec.json.encode(body), status, headers, "application/json")

        async def completions(request: Request) -> Response:
            if (refused := self._stranger(request.headers.get("Authorization", ""))) is not None:
                return told(*refused)
            if not isinstance(body := await _body_of(request), bytes):
                return told(*body)
            async with asyncio.TaskGroup() as tasks:
                answer, left = tasks.create_task(self._completions(body)), tasks.create_task(_gone(request))
                await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
                answer.cancel()  # its caller left: the engine's slot is free
                left.cancel()
            return Response() if answer.cancelled() else told(*answer.result())

        async def models(request: Request) -> Response:
            if (refused := self._stranger(request.headers.get("Authorization", ""))) is not None:
                return told(*refused)
            return told(200, {"object": "list", "data": [{"id": self._model, "object": "model", "owned_by": "rubato"}]})

        return Starlette(routes=[Route("/v1/chat/completions", completions, methods=["POST"]), Route("/v1/models", models)])

    def _stranger(self, authorization: str) -> _Answer | None:
        """The refusal of a request without the token."""
        if self._token and not hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode()):
            return _refusal(401, f"the token is not the one that {TOKEN} has where the job was started")
        return None

    async def _completions(self, body: bytes) -> _Answer:
        """Status and body of the answer."""
        if self._under_way >= self._section.max_concurrent:
            return _refusal(503, f"chat.max_concurrent={self._section.max_concurrent} requests are under way already")
        self._under_way += 1
        try:
            asked = msgspec.json.decode(body, type=Asked)
            prompt = await self.offload(self._chat.chat, normal(asked.messages))
            return await self._answer(asked, prompt)
        except ValueError as error:  # a model's own template may refuse an order of roles
            return _refusal(400, f"this is no chat that can be answered here: {error}")
        finally:
            self._under_way -= 1

    async def _answer(self, asked: Asked, prompt: bytes) -> _Answer:
        name = f"chat-{uuid4().hex}"
        request = Generate(name, name, prompt, self._sampling(asked))
        try:
            with self.waits.on(name, stage="generate", holder="llm_proxy"):
                reply = await self.ref("llm_proxy").ask(request, timeout=self._section.timeout_s)
        except Failed as error:
            return _refusal(400, str(error))
        except AskFailed as error:
            return _refusal(504 if isinstance(error, Unknown) else 503, str(error))
        if not isinstance(reply, Completion):
            return _refusal(503, f"the completion was ended early: {why_early(reply)}")
        return 200, self._completion(asked, reply, len(prompt) // TOKEN_BYTES)

    def _sampling(self, asked: Asked) -> Sampling:
        given = asked.max_completion_tokens or asked.max_tokens or DEFAULT_TOKENS
        seed = uuid4().int % 2**31 if asked.seed is None else asked.seed % 2**31
        temperature = 1.0 if asked.temperature is None else asked.temperature
        return Sampling(given, temperature, asked.top_p or 1.0, self._chat.stop_token_ids, seed, self._chat.stop_strings)

    def _completion(self, asked: Asked, reply: Completion, num_prompt: int) -> dict[str, Any]:
        num = len(reply.tokens.ids) // TOKEN_BYTES
        message = {"role": "assistant", "content": self._chat.decode(reply.tokens.ids)}
        return {
            "id": reply.request_id,
            "object": "chat.completion",
            "created": int(wall_s()),
            "model": asked.model or self._model,
            "choices": [{"index": 0, "message": message, "finish_reason": reply.finish_reason}],
            "usage": {"prompt_tokens": num_prompt, "completion_tokens": num, "total_tokens": num_prompt + num},
        }


async def _body_of(request: "Request") -> bytes | _Answer:
    """Or what is answered to one that does not come whole."""
    from starlette.requests import ClientDisconnect

    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MOST_BYTES:
                    return _refusal(413, f"a request may have {MOST_BYTES:,} bytes")
    except TimeoutError:
        return _refusal(408, f"the request did not come whole within {BODY_S:g} s")
    except ClientDisconnect:
        return _refusal(400, "the request did not come whole")
    return bytes(body)


async def _gone(request: "Request") -> None:
    """Until who asked has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refusal(status: int, message: str) -> _Answer:
    return status, {"error": {"message": message, "type": "server_error" if status >= 500 else "invalid_request_error"}}
