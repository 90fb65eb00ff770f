"""An environment behind OpenEnv's WebSocket protocol: a session of its server is one instance here, and needs nothing of OpenEnv itself."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from rubato.runtime.importer import LoadError
from rubato.runtime.pool.values import MAX_REPLY_BYTES

try:
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import ConnectionClosed, InvalidURI, WebSocketException
except ModuleNotFoundError as missing:
    raise LoadError(f"rubato.actors.envs.openenv needs the package {missing.name}: pip install -e '.[openenv]'") from missing

SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}

REFUSED = "VALIDATION_ERROR"
"""Code of an action that the environment does not take."""

CLOSE_S = 1.0
"""For the server to end a session as it is asked to; then it is ended from here."""

FULL = "CAPACITY_REACHED"


class ServerError(Exception):
    """The server answered with an error, or with what is no answer."""

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text)
        self.code = code


class _Answer(msgspec.Struct):
    type: str
    data: dict[str, Any] = {}


class OpenEnv:
    """One session at `url`, where an OpenEnv server listens: http://host:8000, or wss://host/ws.

    What the model wrote is the action's field `action`; without one it is the action itself, as a JSON object. What the model is shown is the
    observation's field `observation`; without one its only field, or all of them as JSON. An action that the server refuses is an invalid
    turn, whose observation is why. `reset` goes to the environment's own reset beside the seed.
    """

    inline = True  # it only awaits

    def __init__(self, url: str, *, action: str = "", observation: str = "", reset: Mapping[str, Any] | None = None) -> None:
        scheme, _, rest = url.partition("://")
        if scheme not in SCHEMES or not rest:
            raise ValueError(f"url={url} is no address of a server, such as http://127.0.0.1:8000")
        rest = rest.rstrip("/")
        self._url = f"{SCHEMES[scheme]}://{rest if rest.endswith('/ws') else f'{rest}/ws'}"
        self._action, self._observation = action, observation
        self._told = dict(reset or {})
        self._session: ClientConnection | None = None

    async def reset(self, *, seed: int) -> tuple[str, Mapping[str, Any]]:
        """Start an episode, in the session that there is, or a new one where the server ended that."""
        told = {**self._told, "seed": seed & 0x7FFFFFFF}
        if self._session is not None:
            try:
                return self._shown(await self._ask("reset", told)), {}
            except ConnectionClosed:
                pass
        return self._shown(await self._ask("reset", told)), {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Take the action that the text is."""
        try:
            taken = {self._action: action} if self._action else msgspec.json.decode(action.strip(), type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as error:
            return f"This is no JSON object: {error}", 0.0, False, False, {"invalid": True}
        try:
            data = await self._ask("step", taken)
        except ServerError as error:
            if error.code != REFUSED:
                raise
            return str(error), 0.0, False, False, {"invalid": True}
        return self._shown(data), float(data.get("reward") or 0.0), bool(data.get("done")), False, {}

    async def close(self) -> None:
        """End the session."""
        session, self._session = self._session, None
        if session is None:
            return
        with suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await session.send('{"type": "close"}')
                await session.wait_closed()
        await session.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """What an observation says. A session in which something else came, or nothing whole, is let go of."""
        whole = False
        try:
            if self._session is None:
                self._session = await self._opened()
            with suppress(ConnectionClosed):  # what the server said before it ended the session is there to be read
                await self._session.send(json.dumps({"type": kind, "data": data}))
            answer = msgspec.json.decode(await self._session.recv(), type=_Answer)
            whole = answer.type == "observation" or answer.data.get("code") == REFUSED
        except msgspec.MsgspecError as error:
            raise ServerError(f"{self._url} answered {kind} with no message of OpenEnv: {error}") from error
        finally:
            if not whole:
                session, self._session = self._session, None
                if session is not None:
                    session.transport.abort()
        if answer.type != "observation":
            raise self._error(kind, answer)
        return answer.data

    async def _opened(self) -> ClientConnection:
        try:
            return await connect(self._url, max_size=MAX_REPLY_BYTES, open_timeout=None)
        except (OSError, InvalidURI, WebSocketException) as error:
            raise ServerError(f"no OpenEnv server answers at {self._url}: {error}") from error

    def _error(self, kind: str, answer: _Answer) -> ServerError:
        code, said = str(answer.data.get("code") or answer.type), str(answer.data.get("message") or "")
        if code == FULL:
            return ServerError(f"{self._url} has no room for a session more: raise its max_concurrent_envs to twice env.concurrency", code)
        if code == REFUSED:
            return ServerError(f"{said}: {json.dumps(answer.data.get('errors'))}", code)
        return ServerError(f"{self._url} answered {kind} with {code}: {said}", code)

    def _shown(self, data: Mapping[str, Any]) -> str:
        found = data.get("observation")
        if self._observation and isinstance(found, Mapping):
            if self._observation not in found:
                raise ServerError(f"the observation has no field {self._observation}; it has {', '.join(found) or 'none'}")
            found = found[self._observation]
        elif isinstance(found, Mapping) and len(found) == 1:
            (found,) = found.values()
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
