"""verifiers' EnvServer as a process of ours in an interpreter of its own, and the wire to it: a DEALER of ZeroMQ's protocol.

It listens on a socket in a folder that is the user's alone, since it asks for no key. It is started when the first rollout wants it,
again when it ends, and ends with the actor that started it, however that ends.
"""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import msgspec

from rubato.actors.envs.verifiers import MAKE, Settings
from rubato.actors.gateway import verifiers_host
from rubato.actors.gateway.traces import Episode, Trace, wrong
from rubato.bus.errors import BadFrame
from rubato.bus.unix.zmtp import GREETING, Reader, header, ready
from rubato.runtime.launch.children import die_with, last_line, until_gone
from rubato.runtime.pool import guard

STARTS = 5
"""Starts in a row without an episode that got through, after which it is given up."""

PAUSE_S = 1.0
"""Before it is started again."""

END_S = 5.0
"""For it to end as it is asked to; then it is killed."""

MOST_TASK_BYTES = 256 * 2**20

LONGEST_LINE = 1 << 20

LONGEST_PATH = 100
"""Bytes of a socket's path."""

CODE_S = 1.0
"""For its exit code, once its connection ended."""

ENVIRONMENT: Mapping[str, str] = {"PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Of its process, beside ours."""


class ServerLost(Exception):
    """It ended, or its connection did, while an episode was played."""


class ServerFailed(Exception):
    """It can't be had at all; the text is a sentence for the user."""


class _Said(msgspec.Struct):
    """The line that it begins with."""

    error: str = ""
    verifiers: str = ""
    tasks: int = 0


class Dealer(asyncio.Protocol):
    """Our end of the connection: many requests at once, each with messages of its own until the reply."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._open: dict[bytes, tuple[Callable[[memoryview], None], asyncio.Future[memoryview]]] = {}
        self._transport: asyncio.Transport | None = None
        self._reader = Reader(self._heard, self._write)
        self._unsent: list[bytes] = []
        """Until its handshake is over: libzmq takes no message for one before."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it
        self._write(GREETING + ready(b"DEALER"))

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
        except BadFrame as error:
            self._end(f"it sent {error}")
        if self._reader.is_ready:
            while self._unsent:
                self._write(self._unsent.pop(0))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("its connection ended")

    def close(self) -> None:
        """What is asked is not answered any more."""
        self._end("it was closed")

    async def ask(self, method: str, payload: Mapping[str, Any], on_delta: Callable[[memoryview], None]) -> memoryview:
        """The reply. `on_delta` gets what comes before it; what it raises is raised here. Raises ServerLost."""
        name = uuid4().hex.encode()
        reply: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        self._open[name] = on_delta, reply
        found: memoryview | None = None
        try:
            self._send(name, method, payload)
            found = await reply
            return found
        finally:
            del self._open[name]
            if found is None:  # the reply is of no use any more, whatever ended the wait for it
                with suppress(ServerLost):
                    self._send(uuid4().hex.encode(), "cancel", {"request_id": name.decode()})

    def _send(self, name: bytes, method: str, payload: Mapping[str, Any]) -> None:
        if self.lost.done():
            raise ServerLost(self.lost.result())
        parts = (name, method.encode(), msgspec.msgpack.encode(payload))
        message = b"".join(header(len(part), more=at < 2) + part for at, part in enumerate(parts))
        if self._reader.is_ready:
            self._write(message)
        else:
            self._unsent.append(message)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _heard(self, first: memoryview, beside: Sequence[memoryview]) -> None:
        if (asked := self._open.get(bytes(first))) is None:
            return
        on_delta, reply = asked
        try:
            if len(beside) != 2:
                raise wrong(f"a message of {1 + len(beside)} parts: it speaks another protocol than that of verifiers 0.4")
            kind, data = beside
            if kind == b"delta":
                on_delta(data)
            elif not reply.done():
                reply.set_result(data)
        except Exception as error:  # noqa: BLE001 - that of one episode alone
            if not reply.done():
                reply.set_exception(error)

    def _end(self, why: str) -> None:
        if self.lost.done():
            return
        self.lost.set_result(why)
        for _, reply in self._open.values():
            if not reply.done():
                reply.set_exception(ServerLost(why))
        if self._transport is not None:
            self._transport.abort()


class EnvServer:
    """One of `settings`, for as long as `run` runs."""

    def __init__(self, settings: Settings, name: str, folder: Path, limits: Mapping[str, int], *, start_s: float) -> None:
        """`name` is for its files: a log in the run's `folder`, and a socket. `limits` are those of one episode."""
        self.settings = settings
        self.tasks: Sequence[bytes] = ()
        """JSON of each; there once it is `up`."""
        self.log = folder / "logs" / f"{name}.stderr"
        self._name, self._folder, self._limits, self._start_s = name, folder, limits, start_s
        self._dealer: Dealer | None = None
        self._up = asyncio.Event()
        self._starts = 0

    async def run(self, offload: Callable[..., Any], notice: Callable[[str], None]) -> None:
        """Keep it running until cancelled. Raises ServerFailed."""
        while True:
            self._starts += 1
            try:
                async with self._started(offload) as (process, dealer):
                    self._dealer = dealer
                    self._up.set()
                    try:
                        await asyncio.shield(dealer.lost)
                    finally:
                        self._up.clear()
                    why = await self._why(process, dealer)
            except ServerLost as lost:
                why = str(lost)
            if self._starts >= STARTS:
                raise ServerFailed(f"{self._which} ended {STARTS} times in a row before an episode got through: {why}. Log: {self.log}")
            notice(f"{self._which} ended ({why}), and is started again; its rollouts go to other attempts. Log: {self.log}")
            await asyncio.sleep(PAUSE_S)

    async def ready(self) -> Dealer:
        """Return once it is up."""
        await self._up.wait()
        assert self._dealer is not None
        return self._dealer

    async def play(self, dealer: Dealer, task: bytes, client: Mapping[str, Any], sampling: Mapping[str, Any], model: str) -> Trace:
        """The trace of one episode. Raises ServerLost, and GaveUp where the episode failed."""
        episode = Episode()
        request = {"task_data": msgspec.json.decode(task), "client": client, "sampling": sampling, "model": model}
        trace = episode.end(await dealer.ask("run", request, episode.grow))
        self._starts = 0
        return trace

    @property
    def _which(self) -> str:
        return f"verifiers' EnvServer of {self.settings.taskset['id']} ({self.settings.python})"

    @asynccontextmanager
    async def _started(self, offload: Callable[..., Any]) -> AsyncGenerator[tuple[asyncio.subprocess.Process, Dealer]]:
        place = _private(self._folder / "state" / self._name)
        told = {
            "taskset": self.settings.taskset, "harness": self.settings.harness, "limit": self.settings.limit,
            "most_bytes": MOST_TASK_BYTES, "guard": guard.__file__, **self._limits,
        }  # fmt: skip
        parent, beside = os.getpid(), os.path.dirname(self.settings.python)  # where uv is, which harnesses run their programs by
        try:
            with self.log.open("ab") as errors:
                process = await asyncio.create_subprocess_exec(
                    self.settings.python, verifiers_host.__file__, str(place),
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors, limit=LONGEST_LINE,
                    env={**os.environ, "PATH": os.pathsep.join((beside, os.environ.get("PATH", os.defpath))), **ENVIRONMENT},
                    start_new_session=True, preexec_fn=lambda: die_with(parent),
                )  # fmt: skip
            try:
                await self._heard(process, msgspec.json.encode(told))
                self.tasks = await offload(lambda: (place / "tasks.jsonl").read_bytes().splitlines())
                _, dealer = await asyncio.get_running_loop().create_unix_connection(Dealer, f"{place}/s")
                try:
                    yield process, dealer
                finally:
                    dealer.close()
            finally:
                await _ended(process)
        except OSError as error:
            raise ServerFailed(f"{self._which} can't be started: {error.strerror or error}. Make its environment with {MAKE}") from error
        finally:
            shutil.rmtree(place, ignore_errors=True)

    async def _heard(self, process: asyncio.subprocess.Process, told: bytes) -> None:
        """Return once it was `told` and listens. Raises ServerFailed, and ServerLost where it had listened before."""
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdin.write(told)
        process.stdin.close()
        try:
            async with asyncio.timeout(self._start_s):
                line = await process.stdout.readline()
                said = msgspec.json.decode(line or b"{}", type=_Said)
        except TimeoutError:
            why = f"it did not listen after env.build_timeout_s={self._start_s:g}"
        except (ValueError, msgspec.MsgspecError):
            why = "its first line is no word of ours"
        else:
            if said.tasks:
                return
            why = said.error or last_line(self.log) or "it gave no reason"
        if self.tasks:
            raise ServerLost(why)
        raise ServerFailed(f"{self._which} can't serve: {why}. Log: {self.log}")

    async def _why(self, process: asyncio.subprocess.Process, dealer: Dealer) -> str:
        """What is known of its end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CODE_S):
                return f"it ended with {await process.wait()}"
        return dealer.lost.result()


def _private(place: Path) -> Path:
    """A new folder that is the user's alone: at `place`, in place of what a killed actor left, unless a socket's path would be too long."""
    if len(os.fsencode(place / "s")) > LONGEST_PATH:
        return Path(tempfile.mkdtemp(prefix="rubato-env-"))
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(mode=0o700, exist_ok=True)
    place.mkdir(mode=0o700)
    return place


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Return once it is gone, and all of its session; what else it started its guard ends."""
    try:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await until_gone(process.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
