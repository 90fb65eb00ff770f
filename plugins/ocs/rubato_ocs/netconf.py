"""Driver for switches with the optical-switch model of Polatis, over NETCONF (RFC 6241).

A session runs over the pipes of a program, by default OpenSSH's client, which brings keys and known hosts with it. Framing is that of
version 1.0 (RFC 6242, section 4.3), which every server speaks with a client that offers nothing newer.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar
from urllib.parse import urlsplit
from xml.etree import ElementTree as ET

from rubato.actors.fabric.driver import (
    BadAnswer,
    BadCredentials,
    FabricError,
    OcsDriver,
    PortConflict,
    SwitchCapabilities,
    SwitchRefused,
    SwitchState,
    SwitchTimedOut,
    SwitchUnreachable,
    check,
)
from rubato.actors.fabric.section import FabricSection
from rubato.planning.circuits import Cross

OCS = "http://www.polatis.com/yang/optical-switch"
BASE = "urn:ietf:params:xml:ns:netconf:base:1.0"
CANDIDATE = "urn:ietf:params:netconf:capability:candidate:1.0"
END = b"]]>]]>"
HELLO = f'<hello xmlns="{BASE}"><capabilities><capability>urn:ietf:params:netconf:base:1.0</capability></capabilities></hello>'
MOST_BYTES = 16 << 20
NUDGE_S = 0.25
"""netconfd looks at the second of two messages that arrive together, our hello and the first request, only when more comes. A newline
between messages means nothing, and wakes it."""

AnswerT = TypeVar("AnswerT")


def driver(section: FabricSection) -> OcsDriver:
    """The switch at `switch_url`, through ssh."""
    return NetconfDriver(NetconfSession(ssh(section.switch_url), timeout_s=section.switch_timeout_s), section.capabilities)


def ssh(url: str) -> tuple[str, ...]:
    """The command that opens a NETCONF session at ssh://user@host:port; it asks nothing and needs a key."""
    parts = urlsplit(url)
    user = f"{parts.username}@" if parts.username else ""
    port = str(parts.port or 830)
    return ("ssh", "-o", "BatchMode=yes", "-p", port, "-s", "--", f"{user}{parts.hostname}", "netconf")


DENIED = ("permission denied", "host key verification failed", "authentication")


class NetconfSession:
    """One session, opened at the first request and again after it broke. Requests are sent one at a time by the caller."""

    def __init__(self, command: tuple[str, ...], *, timeout_s: float) -> None:
        self._command = command
        self._timeout_s = timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._number = 0
        self.capabilities: frozenset[str] = frozenset()

    async def rpc(self, operation: str) -> ET.Element:
        """The whole reply to `operation`, an XML element. Raises the FabricError that its rpc-error stands for.

        An answer that is not the reply to it raises BadAnswer and ends the session: whatever comes next would be taken for another's.
        """
        if self._process is None:
            await self._guarded(self._open)
        self._number += 1
        request = f'<rpc message-id="{self._number}" xmlns="{BASE}">{operation}</rpc>'

        async def ask() -> ET.Element:
            self._write(request.encode() + END)
            while True:
                try:
                    async with asyncio.timeout(NUDGE_S):
                        return _reply(await self._message(), str(self._number))
                except TimeoutError:
                    self._write(b"\n")

        reply = await self._guarded(ask)
        error = reply.find(f"{{{BASE}}}rpc-error")
        if error is not None:
            raise _named(error)
        return reply

    async def close(self) -> None:
        """End the program and what it started, such as a ProxyCommand; what the server had not committed is gone."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def _open(self) -> None:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, stderr=pipe, limit=MOST_BYTES, start_new_session=True
        )
        self._write(HELLO.encode() + END)
        found = _parse(await self._message(), "hello").iter(f"{{{BASE}}}capability")
        self.capabilities = frozenset((each.text or "").strip() for each in found)

    async def _guarded(self, work: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        """Whatever breaks the session closes it, since the place in the stream is lost, and says what it was."""
        where = " ".join(self._command)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work()
        except TimeoutError as error:
            await self.close()
            raise SwitchTimedOut(f"{where} did not answer within {self._timeout_s:g} s") from error
        except FileNotFoundError as error:
            raise SwitchUnreachable(f"{self._command[0]} is not installed") from error
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            said = await self._last_words()
            await self.close()
            if any(word in said.lower() for word in DENIED):
                raise BadCredentials(f"{where}: {said}") from error
            raise SwitchUnreachable(f"{where} ended: {said or error}") from error
        except BadAnswer:
            await self.close()
            raise

    def _write(self, data: bytes) -> None:
        if self._process is None or self._process.stdin is None:
            raise ConnectionResetError("no session")
        self._process.stdin.write(data)

    async def _message(self) -> bytes:
        if self._process is None or self._process.stdout is None:
            raise ConnectionResetError("no session")
        return (await self._process.stdout.readuntil(END)).removesuffix(END)

    async def _last_words(self) -> str:
        if self._process is None or self._process.stderr is None:
            return ""
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                return (await self._process.stderr.read(4096)).decode(errors="replace").strip()[-300:]
        return ""


def _parse(message: bytes, expected: str) -> ET.Element:
    try:
        root = ET.fromstring(message)
    except (ET.ParseError, LookupError, ValueError) as error:  # the last two for an encoding that it names
        raise BadAnswer(f"NETCONF: {error}: {message[:200]!r}") from error
    if root.tag != f"{{{BASE}}}{expected}":
        raise BadAnswer(f"NETCONF: {root.tag} instead of {expected}")
    return root


def _reply(message: bytes, number: str) -> ET.Element:
    reply = _parse(message, "rpc-reply")
    found = reply.get("message-id")
    if found != number:
        raise BadAnswer(f"NETCONF: a reply to message {found} instead of {number}")
    return reply


def _named(error: ET.Element) -> Exception:
    def text(name: str) -> str:
        return (error.findtext(f"{{{BASE}}}{name}") or "").strip()

    tag, app, message = text("error-tag"), text("error-app-tag"), text("error-message")
    sentence = f"the switch refused: {tag} {app} {message}".strip()
    if tag == "access-denied":
        return BadCredentials(sentence)
    if app == "data-not-unique" or tag in ("data-exists", "in-use"):
        return PortConflict(sentence)
    return SwitchRefused(sentence)


class NetconfDriver:
    """A change is one edit, all or nothing. Inputs are the switch's ports 1 to N, outputs N+1 to 2N; a pair that it lists counts as tuned."""

    def __init__(self, session: NetconfSession, capabilities: SwitchCapabilities) -> None:
        self.capabilities = capabilities
        self._session = session

    async def read(self) -> SwitchState:
        reply = await self._session.rpc(
            f'<get-config><source><running/></source><filter type="subtree"><cross-connects xmlns="{OCS}"/></filter></get-config>'
        )
        return SwitchState(dict.fromkeys((self._cross(pair) for pair in reply.iter(f"{{{OCS}}}pair")), "tuned"))

    async def apply(self, delete: tuple[Cross, ...], add: tuple[Cross, ...]) -> None:
        held = (await self.read()).circuits
        check((set(held) - set(delete)) | set(add), self.capabilities.num_ports)
        pairs = [self._pair(cross, "delete") for cross in delete if cross.ingress not in {c.ingress for c in add}]
        pairs += [self._pair(cross, "replace") for cross in add]
        candidate = CANDIDATE in self._session.capabilities
        target = "candidate" if candidate else "running"
        edit = (
            f"<edit-config><target><{target}/></target><error-option>stop-on-error</error-option>"
            f'<config><cross-connects xmlns="{OCS}" xmlns:nc="{BASE}">{"".join(pairs)}</cross-connects></config></edit-config>'
        )
        try:
            await self._session.rpc(edit)
            if candidate:
                await self._session.rpc("<commit/>")
        except FabricError:
            # The candidate goes with the session: what was edited and not committed never happened.
            await self._session.close()
            raise

    async def close(self) -> None:
        await self._session.close()

    def _pair(self, cross: Cross, operation: str) -> str:
        ends = f"<ingress>{cross.ingress + 1}</ingress><egress>{cross.egress + 1 + self.capabilities.num_ports}</egress>"
        return f'<pair nc:operation="{operation}">{ends}</pair>'

    def _cross(self, pair: ET.Element) -> Cross:
        ends = tuple(pair.findtext(f"{{{OCS}}}{name}") or "" for name in ("ingress", "egress"))
        try:
            return Cross(int(ends[0]) - 1, int(ends[1]) - 1 - self.capabilities.num_ports)
        except ValueError as error:
            raise BadAnswer(f"a pair was answered as {ends[0][:40]!r} → {ends[1][:40]!r}") from error
