"""The job's own engines in every dialect of the gateway: for a judge of rewards, or an agent that is not to be trained.

    POST /v1/chat/completions, and the other paths of answering.py
    GET  /v1/models

Answers come from the policy that is being trained, under the weights that its engine has by then; what is sampled here trains nothing. Where
RUBATO_CHAT_TOKEN is set, no request is answered without it (`Authorization: Bearer`, or `x-api-key`); beyond the loopback it has to be.
"""

import asyncio
import importlib.util
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

from pydantic import Field

from rubato.actors.config import ModelSection, RolloutSection
from rubato.actors.envs.chat import TOKEN_BYTES, Renderer
from rubato.actors.gateway.answering import DIALECTS, answer_in
from rubato.actors.gateway.dialect import Dialect, invalid
from rubato.actors.gateway.renderers import Renderers, opening_of
from rubato.actors.gateway.server import Answering, body_of, http_server, key_of, until_gone
from rubato.actors.gateway.session import Answer, Ask, AskTokens, Refused, said_to
from rubato.actors.messages.generation import Completion, Generate, Sampling, why_early
from rubato.bus.address import bare, bind_listener, spelt
from rubato.bus.errors import AskFailed, Failed, Unknown
from rubato.runtime.actor import Actor
from rubato.runtime.config import ActorConfig, Section
from rubato.runtime.errors import ConfigError, first_cause
from rubato.runtime.http_server import check_token, is_let_in, token_in
from rubato.runtime.kernel import Kernel

if TYPE_CHECKING:
    from starlette.requests import Request

TOKEN = "RUBATO_CHAT_TOKEN"

DEFAULT_TOKENS = 1024
"""Of an answer, where the request says nothing."""

LEAST_TOP_P = 1e-6
"""Of which 0 is taken for: the likeliest token alone."""


class ChatSection(Section):
    """Where the engines are served over HTTP."""

    host: str = "127.0.0.1"
    port: int = Field(default=8001, ge=0, le=65_535)
    """0 takes a free one, which the log names."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Longest that an answer may take; after it the caller is answered 504."""
    max_concurrent: int = Field(default=256, ge=1)
    """Answers under way; more are refused with 503."""


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
        """The packages that serve, and a token where the address is reached from outside."""
        check_token("chat.host", config.chat.host, TOKEN)
        if importlib.util.find_spec("starlette") is None:
            raise ConfigError("rubato.actors.gateway.chat_server needs the package starlette: pip install -e '.[serve]'")

    def __init__(self, config: Config, kernel: Kernel) -> None:
        super().__init__(config, kernel)
        self._token = token_in(TOKEN)
        self._renderers = Renderers(self.run.folder / config.model.path, self.offload)
        self._served: asyncio.Task[None] | None = None
        self._under_way = 0
        self._model = self.run.folder.name

    async def on_start(self) -> None:
        """Listen; an address that can't be had ends the job with a sentence."""
        host, port = self.config.chat.host, self.config.chat.port
        await self._renderer(())  # a model without a template that fits ends the job here
        try:
            listening = bind_listener(host, port, backlog=self.config.chat.max_concurrent)
        except OSError as error:
            self.finish(f"chat_server can't listen at {host}:{port}: {error}. Set chat.port=0 for a free one", failed=True)
            return
        self._served = self.spawn(http_server(self._app()).run_on(listening), name=f"{self.name}.http")
        self.log.info("chat_listening", url=f"http://{spelt(bare(host))}:{listening.getsockname()[1]}/v1")

    async def on_stop(self) -> None:
        """Who still waits is not answered."""
        if self._served is not None:
            self._served.cancel()
            await asyncio.wait((self._served,))

    def _app(self) -> Any:
        """The ASGI application."""
        from starlette.routing import Route, Router  # for jobs alone that have this actor

        turns = (Route(path, Answering(partial(self._asked, each), each.error), methods=["POST"]) for path, each in DIALECTS.items())
        return Router([*turns, Route("/v1/models", Answering(self._models), methods=["GET"])])

    async def _asked(self, dialect: Dialect[Any], request: "Request") -> Any:
        self._check_token(request)
        body = await body_of(request)
        async with until_gone(request):
            return await answer_in(dialect, self, body, self._model)

    async def _models(self, request: "Request") -> Any:
        self._check_token(request)
        return {"object": "list", "data": [{"id": self._model, "object": "model", "owned_by": "rubato"}]}

    def _check_token(self, request: "Request") -> None:
        if not is_let_in(key_of(request), self._token):
            raise Refused(401, "invalid_api_key", f"the key is not the token that {TOKEN} has where the job was started")

    # -- as a session is asked -----------------------------------------------------------------------------------------

    async def turns(self, ask: Ask | AskTokens) -> tuple[Answer, ...]:
        """`ask.n` answers to a conversation. Raises Refused."""
        most = self.config.chat.max_concurrent
        if ask.n > most:
            raise invalid("n", f"chat.max_concurrent={most} answers can be under way at once")
        if self._under_way + ask.n > most:
            raise Refused(503, "too_many_requests", f"chat.max_concurrent={most} answers are under way already")
        if ask.wanted.penalties:
            raise invalid("frequency_penalty, presence_penalty", "they can't be had here: leave them out")
        self._under_way += ask.n
        try:
            renderer, prompt, opening = await self._prompt(ask)
            async with asyncio.TaskGroup() as tasks:
                turns = [tasks.create_task(self._turn(ask, renderer, prompt, opening, number)) for number in range(ask.n)]
        except ExceptionGroup as group:
            raise first_cause(group) from None
        finally:
            self._under_way -= ask.n
        return tuple(turn.result() for turn in turns)

    async def count(self, ask: Ask) -> int:
        """Tokens that the prompt of such a request has. Raises Refused."""
        _, prompt, _ = await self._prompt(ask)
        return len(prompt) // TOKEN_BYTES

    async def _renderer(self, tools: Any) -> Renderer:
        return await self._renderers.by(self.config.rollout, tools)

    async def _prompt(self, ask: Ask | AskTokens) -> tuple[Renderer, bytes, bytes]:
        """The token ids of a prompt, and those at its end that begin the answer itself."""
        if isinstance(ask, AskTokens):
            return await self._renderer(()), ask.prompt, b""
        try:
            renderer = await self._renderer(ask.tools)
            opening = await self.offload(partial(opening_of, renderer, ask.forced)) if ask.forced else b""
            return renderer, await self.offload(renderer.chat, [*map(dict, ask.messages)]) + opening, opening
        except ValueError as error:  # a model's own template may refuse an order of roles
            raise Refused(400, "invalid_request_error", f"this is no chat that can be answered here: {error}") from error

    async def _turn(self, ask: Ask | AskTokens, renderer: Renderer, prompt: bytes, opening: bytes, number: int) -> Answer:
        name = f"chat-{uuid4().hex}"
        request = Generate(name, name, prompt, _sampling(ask, renderer, number))
        try:
            with self.waits.on(name, stage="generate", holder="llm_proxy"):
                reply = await self.ref("llm_proxy").ask(request, timeout=self.config.chat.timeout_s)
        except Failed as error:
            raise Refused(400, "generation_failed", str(error)) from error
        except AskFailed as error:
            raise Refused(504 if isinstance(error, Unknown) else 503, "generation_failed", str(error)) from error
        if not isinstance(reply, Completion):
            raise Refused(503, "generation_failed", f"the answer was ended early: {why_early(reply)}")
        said, stop, _ = said_to(ask, renderer, prompt, opening, reply, renderer.decode(reply.tokens.ids), number)
        return Answer(said, reply, len(prompt) // TOKEN_BYTES, prompt, stop)


def _sampling(ask: Ask | AskTokens, renderer: Renderer, number: int) -> Sampling:
    """As its client wants it; answers to one request differ by their seeds."""
    temperature, top_p, seed, _ = ask.wanted
    ends, stop = ask.ends(tuple(renderer.stop_token_ids), tuple(renderer.stop_strings))
    return Sampling(
        max_new_tokens=ask.max_tokens or DEFAULT_TOKENS,
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else max(top_p, LEAST_TOP_P),
        stop_token_ids=ends,
        seed=((uuid4().int if seed is None else seed) + number) % 2**31,
        stop=stop,
    )
