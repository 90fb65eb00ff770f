"""uvicorn inside a process of another program, and who may ask it."""

import asyncio
import hmac
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from math import inf
from typing import Any

import uvicorn

from rubato.bus.address import is_loopback
from rubato.runtime.errors import ConfigError

QUIET: dict[str, Any] = {"lifespan": "off", "ws": "none", "log_config": None, "access_log": False, "proxy_headers": False}
"""Options of uvicorn for a server that says nothing by itself."""

CLIENT = "rubato.client"


# -- who may ask -------------------------------------------------------------------------------------------------


def token_in(variable: str) -> str:
    """The token in a variable of the environment; empty where there is none. Raises ConfigError for one that a header can't hold."""
    token = os.environ.get(variable, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{variable} has a sign that a header of HTTP can't hold: write a token of ASCII letters and digits there")
    return token


def check_token(key: str, host: str, variable: str) -> None:
    """Raises ConfigError where `key` has a server listen at a `host` that is reached from outside, and `variable` holds no token."""
    if not is_loopback(host) and not token_in(variable):
        raise ConfigError(f"{key}={host} is reached from outside, and {variable} is not set: set it there, or leave {key} at 127.0.0.1")


def bearer_of(authorization: str) -> str:
    """The key in the header `Authorization`, with its scheme `Bearer` or without."""
    scheme, _, key = authorization.partition(" ")
    return key if scheme.lower() == "bearer" else authorization


def is_let_in(key: str, token: str) -> bool:
    """Whether `key` is the `token`, where there is one."""
    return not token or hmac.compare_digest(key.encode(), token.encode())


# -- the server --------------------------------------------------------------------------------------------------


class Client:
    """Who is at the other end of a connection, as its transport, and as long as it is there."""

    left = False
    """It is there no more."""
    asks: asyncio.Task[Any] | None = None
    """What is cancelled when it leaves: a connection has one request at a time."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._held: list[bytes] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._held is None:
            self._transport.write(data)
        else:
            self._held.append(data)

    def hold(self) -> None:
        """What is written from now on goes out by `release`, at once."""
        self._held = []

    def release(self) -> None:
        held, self._held = self._held, None
        if held:
            self._transport.writelines(held)

    def close(self) -> None:
        self.release()
        self._transport.close()

    def leave(self) -> None:
        """It has gone."""
        self.left = True
        if self.asks is not None:
            self.asks.cancel()


async def send_json(scope: Any, send: Any, body: bytes) -> None:
    """A whole response of a server here, head and body in one write: each is a call of the system, and wakes the client."""
    client = scope.get("state", {}).get(CLIENT)
    headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
    if client is not None:
        client.hold()
    try:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
    finally:
        if client is not None:
            client.release()


class HttpServer(uvicorn.Server):
    """Signals are the kernel's, or the command's: uvicorn would raise them again once it has ended.

    In the `state` of each request's scope CLIENT is who asks.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        if not config.loaded:
            config.load()
        config.http_protocol_class = _telling(config.http_protocol_class)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    def end(self) -> None:
        """Answer what is under way, and end; called twice, end now."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def run_on(self, listening: socket.socket) -> None:
        """Serve until cancelled, and end then: what is under way is not answered."""
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(self.serve(sockets=[listening]))
            try:
                await asyncio.shield(serving)
            except asyncio.CancelledError:
                self.end()
                self.end()
                await serving
                raise

    async def answer_on(self, listening: socket.socket, most: int, *, life_s: float = inf) -> None:
        """Answer on one more socket, or on this alone, until cancelled: at most `most` connections at once, each for at most `life_s`."""
        room: dict[str, Any] = {"config": self.config, "server_state": self.server_state, "app_state": {}}
        connected = set[Any]()
        counted = _counted(self.config.http_protocol_class, connected, most, life_s)
        server = await asyncio.get_running_loop().create_server(lambda: counted(**room), sock=listening)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            server.close()
            if life_s < inf:
                for each in tuple(connected):
                    each.transport.abort()


def _telling(protocol: Any) -> Any:
    """The class of a protocol that says in each request's scope who asks."""

    class Telling(protocol):
        def connection_made(self, transport: Any) -> None:
            self._client = Client(transport)
            self.app_state = {**self.app_state, CLIENT: self._client}  # pyright: ignore[reportUnknownMemberType]
            super().connection_made(self._client)  # pyright: ignore[reportUnknownMemberType]

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)  # pyright: ignore[reportUnknownMemberType]
            self._client.leave()

    return Telling


def _counted(protocol: Any, connected: set[Any], most: int, life_s: float) -> Any:
    """The class of a protocol of which at most `most` are `connected`, for `life_s` each: further connections end at once."""

    class Counted(protocol):
        _over: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)  # pyright: ignore[reportUnknownMemberType]
            connected.add(self)
            if len(connected) > most:
                transport.abort()
            elif life_s < inf:
                self._over = asyncio.get_running_loop().call_later(life_s, transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            connected.discard(self)
            if self._over is not None:
                self._over.cancel()
            super().connection_lost(exc)  # pyright: ignore[reportUnknownMemberType]

    return Counted
