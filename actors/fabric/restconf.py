"""Switches that speak RESTCONF (RFC 8040): a client of which every way to fail is a named error, and the driver of SONiC's dialect."""

import asyncio
import json
import logging
import re
import ssl
from typing import Any

import httpx

from rubato.actors.fabric.driver import (
    BadAnswer,
    BadCredentials,
    Login,
    PartlyApplied,
    PortConflict,
    Status,
    SwitchCapabilities,
    SwitchRefused,
    SwitchState,
    SwitchTimedOut,
    SwitchUnreachable,
)
from rubato.planning.circuits import Cross

YANG_JSON = "application/yang-data+json"
"""Media type of RESTCONF (RFC 8040)."""

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

    async def close(self) -> None:
        """Requests under way, and later ones, end as SwitchUnreachable."""
        await self._client.aclose()

    async def send(self, method: str, path: str, body: object = None) -> Any:
        """The decoded body; None where there is nothing (204, and 404 to a GET)."""
        content = None if body is None else json.dumps(body).encode()
        headers = {"accept": YANG_JSON} | ({"content-type": YANG_JSON} if content is not None else {})
        try:
            async with asyncio.timeout(self._timeout_s), self._client.stream(method, path, content=content, headers=headers) as answer:
                said = await self._read_bounded(answer)
        except (TimeoutError, httpx.TimeoutException) as error:
            late = f"did not answer {method} {path} within {self._timeout_s:g} s"
            raise SwitchTimedOut(f"{self._where} {late}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise SwitchUnreachable(f"{self._where}: {error or type(error).__name__}") from error
        except RuntimeError as error:  # httpx has no name of its own for it
            if not self._client.is_closed:
                raise
            raise SwitchUnreachable(f"{self._where}: the connection was closed before {method} {path} was done") from error
        if method == "GET" and answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return self._decode(method, path, answer, said)

    async def _read_bounded(self, answer: httpx.Response) -> bytes:
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


BULK = "/restconf/operations/sonic-ocs:bulk-update"
DATA = "/restconf/data/sonic-ocs:sonic-ocs"
CONFIG, TABLE = "OCS_CROSS_CONNECT", "OCS_CROSS_CONNECT_TABLE"

ID = re.compile(r"([1-9]\d{0,4})A-([1-9]\d{0,4})B")


def cross_id(cross: Cross) -> str:
    return f"{cross.ingress + 1}A-{cross.egress + 1}B"


def parse_id(text: str) -> Cross:
    """Raises ValueError for what is no id of a circuit."""
    match = ID.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is no circuit: 1A-2B is one")
    return Cross(int(match[1]) - 1, int(match[2]) - 1)


def entry(cross: Cross) -> dict[str, str]:
    return {"cross_connect_id": cross_id(cross), "a_side": f"{cross.ingress + 1}A", "b_side": f"{cross.egress + 1}B"}


STATUS: dict[str, Status] = {"tuned": "tuned", "tuning": "tuning", "failed": "failed", "blocked": "failed", "invalid": "invalid"}

WORST: tuple[Status, ...] = ("tuned", "tuning", "failed", "invalid")


class SonicDriver:
    """Our ports count from 0, SONiC's from 1; inputs are its A side, outputs its B side."""

    def __init__(self, client: Restconf, capabilities: SwitchCapabilities) -> None:
        self.capabilities, self._client = capabilities, client

    async def close(self) -> None:
        await self._client.close()

    async def read(self) -> SwitchState:
        """What the table of states holds; a circuit that is configured and not listed there is still being tuned."""
        config = _entries(await self._client.send("GET", f"{DATA}/{CONFIG}"), CONFIG)
        states = {_cross(entry): entry for entry in _entries(await self._client.send("GET", f"{DATA}/{TABLE}"), TABLE)}
        return SwitchState({cross: _status(states.get(cross, {})) for cross in map(_cross, config)})

    async def apply(self, delete: tuple[Cross, ...], add: tuple[Cross, ...]) -> None:
        body = {"delete": [cross_id(c) for c in delete], "add": [entry(c) for c in add]}
        answer = await self._client.send("POST", BULK, {"sonic-ocs:input": body})
        try:
            output = answer["sonic-ocs:output"]
            counts = int(output["deleted_count"]), int(output["added_count"])
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise BadAnswer(f"bulk-update was answered with {str(answer)[:200]}") from error
        if counts != (len(delete), len(add)):
            asked = f"{len(delete)} to delete and {len(add)} to add"
            raise PartlyApplied(f"the switch was given {asked}; it deleted {counts[0]} and added {counts[1]}")


def _entries(body: Any, table: str) -> list[dict[str, Any]]:
    """The list inside {"sonic-ocs:TABLE": {"TABLE_LIST": [...]}}; empty for an empty table."""
    if not body:
        return []
    try:
        found = body[f"sonic-ocs:{table}"].get(f"{table}_LIST", [])
        return [dict(each) for each in found]
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise BadAnswer(f"{table} was answered with {str(body)[:200]}") from error


def _cross(found: dict[str, Any]) -> Cross:
    try:
        return parse_id(str(found["cross_connect_id"]))
    except (KeyError, ValueError) as error:
        raise BadAnswer(f"a circuit was answered as {str(found)[:200]}") from error


def _status(found: dict[str, Any]) -> Status:
    """Revisions of the model call the field `status`, `config_status` or `state`; the worst of those that are there counts."""
    named = [str(found[key]).lower() for key in ("config_status", "status", "state") if key in found]
    known: list[Status] = [STATUS[name] for name in named if name in STATUS]
    if not known:
        return "tuning"
    return max(known, key=WORST.index)
