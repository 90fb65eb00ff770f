"""A RESTCONF client (RFC 8040) of one switch: JSON in and out, every way to fail a named error."""

import asyncio
import json
import logging
import ssl
from typing import Any

import httpx

from actors.fabric.driver import YANG_JSON, Login
from actors.fabric.errors import (
    BadAnswer,
    BadCredentials,
    PortConflict,
    SwitchRefused,
    SwitchTimedOut,
    SwitchUnreachable,
)

MOST_BYTES = 16 << 20
"""A switch of 1,008 ports lists itself in about 200 kB; an answer beyond this is no list of circuits."""


class Restconf:
    """One connection pool. Proxies of the environment are not used: a switch is on the management network."""

    def __init__(
        self,
        url: str,
        login: Login,
        *,
        timeout_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
        trusted: ssl.SSLContext | None = None,
    ) -> None:
        """`timeout_s` is for a request and its whole answer; without `trusted` the common authorities are."""
        self._where = url
        self._timeout_s = timeout_s
        # It logs every request at INFO: some lines for each phase of the job.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        auth = httpx.BasicAuth(*login) if login.user else None
        # httpx counts its timeout anew with every read: a switch that trickles would never be given up.
        self._client = httpx.AsyncClient(
            base_url=url, auth=auth, timeout=None, transport=transport, trust_env=False, verify=trusted or True
        )

    async def get(self, path: str) -> Any:
        """The decoded body; None where there is nothing (204, 404)."""
        return await self._send("GET", path, missing_ok=True)

    async def send(self, method: str, path: str, body: object) -> Any:
        """The decoded body, None for an empty one."""
        return await self._send(method, path, json.dumps(body).encode())

    async def delete(self, path: str) -> None:
        """Also when it is gone already."""
        await self._send("DELETE", path, missing_ok=True)

    async def close(self) -> None:
        await self._client.aclose()

    async def _send(self, method: str, path: str, content: bytes | None = None, *, missing_ok: bool = False) -> Any:
        headers = {"accept": YANG_JSON} | ({"content-type": YANG_JSON} if content is not None else {})
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream(method, path, content=content, headers=headers) as answer,
            ):
                said = await self._whole(answer)
        except (TimeoutError, httpx.TimeoutException) as error:
            late = f"did not answer {method} {path} within {self._timeout_s:g} s"
            raise SwitchTimedOut(f"{self._where} {late}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise SwitchUnreachable(f"{self._where}: {error or type(error).__name__}") from error
        if missing_ok and answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return self._decode(method, path, answer, said)

    async def _whole(self, answer: httpx.Response) -> bytes:
        """The body. Raises BadAnswer at the first byte too many, wherever the rest ends."""
        said = bytearray()
        async for part in answer.aiter_bytes():
            said += part
            if len(said) > MOST_BYTES:
                raise BadAnswer(f"{self._where} answered with more than {MOST_BYTES >> 20} MiB")
        return bytes(said)

    def _decode(self, method: str, path: str, answer: httpx.Response, said: bytes) -> Any:
        """The body of a success. A success that holds errors is none: some switches answer 200 and say no inside."""
        what = f"{self._where} answered {method} {path} with {answer.status_code}"
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise BadCredentials(f"{what}: give fabric.switch_user and fabric.switch_password_file")
        try:
            body = json.loads(said) if said else None
            str(body)  # what nests too deeply to be shown in an error later is refused here
            failure = _failure(body)
        except (ValueError, RecursionError) as error:
            if not answer.is_success:
                raise SwitchRefused(what) from error
            raise BadAnswer(f"{what} and a body that is not JSON, or nests too deeply") from error
        if answer.status_code == httpx.codes.CONFLICT:
            raise PortConflict(f"{what}: {failure}")
        if failure or not answer.is_success:
            raise SwitchRefused(f"{what}: {failure}")
        return body


def _failure(body: Any) -> str:
    """What the body says went wrong; empty where nothing did."""
    if isinstance(body, dict):
        for key, value in body.items():
            if key.rpartition(":")[2] in ("errors", "error"):
                return json.dumps(value)[:400]
    return ""
