"""A `vllm serve` over HTTP: its routes as methods, its errors as sentences."""

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from rubato.actors.engines.engine import EngineDead, EngineError
from rubato.actors.gateway import token_api
from rubato.actors.gateway.token_api import GeneratedTokens, GenerateTokens, TokensRefused
from rubato.bus.address import is_loopback

CONNECT_S = 10.0
ANSWER_S = 60.0
"""Longest that a command may take which moves no weights."""

LOAD_S = 1800.0
"""Longest that new weights may take."""

MOST_BYTES = 1 << 20
"""Of the answer of a command."""


def flaw_of_url(url: str) -> str:
    """Why `url` is no place of a server, in half a sentence; empty for a good one."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"is no URL: {error}"
    if parts.scheme not in ("http", "https") or not host:
        return "is no URL such as http://127.0.0.1:8000"
    if parts.username or parts.password:
        return "has a password in it: put the key into an environment variable, and its name into engine.api_key_env"
    if parts.query or parts.fragment:
        return "ends in a query: leave that out"
    if parts.scheme == "http" and not is_loopback(host):
        return (
            f"goes to {host} in the clear, and a reader on the way could steer the server: give it https, or a tunnel that ends on "
            "loopback, such as ssh -L 8000:127.0.0.1:8000"
        )
    return ""


def key_in(variable: str) -> str:
    """The server's key. Raises EngineError where the environment has none."""
    if not variable:
        return ""
    if not (key := os.environ.get(variable, "")):
        raise EngineError(f"engine.api_key_env names {variable}, which is not set where the engine runs: export it before the launch")
    return key


class Missing(EngineError):
    """The server has no such route."""


class VllmClient:
    """One server, and one key."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        loopback = is_loopback(urlsplit(url).hostname or "")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=not loopback,
            verify=url.startswith("https"),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> Any:
        return await self._ask("GET", path, None, ANSWER_S)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, limit_s: float = ANSWER_S) -> Any:
        return await self._ask("POST", path, body, limit_s)

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """What each of the server's workers answers to a method of our worker extension."""
        found = await self.post("/collective_rpc", {"method": method, "args": list(args)})
        results = found.get("results") if isinstance(found, dict) else None
        return results if isinstance(results, list) else []

    async def generate(self, asked: GenerateTokens) -> AsyncGenerator[GeneratedTokens, None]:
        """What is sampled, as it is; closing the generator ends the request at the server.

        Raises EngineDead where the server is not reached, or is lost meanwhile; TokensRefused for what it says against the request.
        """
        headers = {"Content-Type": "application/json"}
        try:
            async with self._http.stream("POST", token_api.PATH, content=token_api.body_of(asked), headers=headers) as response:
                if response.status_code != 200:
                    raise TokensRefused(self._why(response.status_code, await self._all(response)))
                async with aclosing(token_api.events(response.aiter_bytes())) as events:
                    async for event in events:
                        yield event
        except httpx.HTTPError as error:
            raise self._lost(error) from error

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, limit_s: float) -> Any:
        try:
            timeout = httpx.Timeout(limit_s, connect=CONNECT_S)
            async with self._http.stream(method, path, json=body, timeout=timeout) as response:
                content = await self._all(response)
        except httpx.HTTPError as error:
            raise self._lost(error) from error
        if response.status_code == 404:
            raise Missing(f"the server at {self.url} has no {path}")
        if response.status_code != 200:
            raise EngineError(f"the server at {self.url} refused {path}: {self._why(response.status_code, content)}")
        try:
            return msgspec.json.decode(content) if content else None
        except msgspec.MsgspecError:
            raise EngineError(f"what the server at {self.url} answered to {path} is no JSON: is it a vllm serve?") from None

    async def _all(self, response: httpx.Response) -> bytes:
        content = b""
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > MOST_BYTES:
                raise EngineError(f"the server at {self.url} answered with more than {MOST_BYTES} bytes: is it a vllm serve?")
        return content

    def _why(self, status: int, content: bytes) -> str:
        if status == 401:
            return f"status {status}, so it wants a key, or another one: name the environment variable that has it in engine.api_key_env"
        try:
            return token_api.said(msgspec.json.decode(content))
        except msgspec.MsgspecError:
            return f"status {status}"

    def _lost(self, error: Exception) -> EngineDead:
        return EngineDead(f"the server at {self.url} is not reached ({type(error).__name__}: {str(error)[:200] or 'no more is known'})")
