"""One worker process as its parent sees it: calls in order, a deadline on the one that runs, one verdict when it ends."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec

from rubato.runtime.pool import each as pool_each
from rubato.runtime.pool import worker as pool_worker
from rubato.runtime.pool.errors import (
    BadResult,
    NoWorker,
    PoolError,
    TargetMissing,
    UserCodeRaised,
    WorkerDied,
    WorkerKilled,
    WorkerTimeout,
)
from rubato.runtime.pool.sandbox import WorkerLimits, choose_uid

if TYPE_CHECKING:
    from rubato.runtime.bubblewrap import SandboxWall

LAST_WORDS_S = 0.5
"""How long a process whose socket or output ended may take to end by itself, and one that ended may keep its pipes open."""

KILL_S = 5.0
"""How long a process's init may take to end the whole tree before it is killed itself."""

FRAME_OVERHEAD_BYTES = 64
"""What a reply's frame adds to its payload, generously."""

_REPLIES = msgspec.msgpack.Decoder(tuple[int, int, bytes])
_PARTS = msgspec.msgpack.Decoder(tuple[int, int, bytes])
_ROOT = str(Path(sys.modules["rubato"].__file__ or "").resolve().parents[1])

OUTPUT_LINES_S = 100
"""Lines of user output passed on per worker and second; the rest is counted in one line."""

OUTPUT_LINE_LIMIT = 2_000
"""Characters kept of a line of user output."""


class _Call(NamedTuple):
    id: int
    reply: "asyncio.Future[bytes]"
    deadline_s: float
    took: Callable[[float], object] | None
    began: Callable[[], object] | None
    asked: float
    part: Callable[[int, "bytes | PoolError"], object] | None


class WorkerProcess:
    """Calls are sent as they come and run one after another; a call's deadline counts from when it starts to run."""

    def __init__(self, limits: WorkerLimits, on_output: Callable[[str], None], wall: "SandboxWall | None" = None) -> None:
        self._wall = wall
        self.instances: set[str] = set()
        self._limits = limits
        self._channel = FrameChannel(self, limits.max_reply_bytes + FRAME_OVERHEAD_BYTES)
        self._output = OutputLines(self, limits.max_output_bytes, on_output)
        self._transport: asyncio.SubprocessTransport | None = None
        self._calls: deque[_Call] = deque()
        self._num_calls = 0
        self._began = 0.0
        """Loop time at which the call that runs now did."""
        self._timer: asyncio.TimerHandle | None = None
        self._verdict: str | None = None
        self._cut = False
        self._last_resort: asyncio.TimerHandle | None = None
        self._open = 2
        self._gone = asyncio.Event()

    @property
    def alive(self) -> bool:
        """Whether calls may be sent."""
        return self._transport is not None and self._verdict is None

    @property
    def over(self) -> bool:
        """Whether the process has ended and nothing of it is held."""
        return self._gone.is_set()

    @property
    def load(self) -> int:
        """Instances hosted plus calls waiting."""
        return len(self.instances) + len(self._calls)

    @property
    def pid(self) -> int:
        """Of the process's init; 0 where there is none."""
        return (self._transport.get_pid() or 0) if self._transport is not None else 0

    def waiting(self, since: float) -> int:
        """Calls that have waited for others here since then."""
        return sum(call.asked <= since for call in islice(self._calls, 1, None))

    async def start(self) -> None:
        """Spawn the process. Raises NoWorker when the system refuses."""
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                ours.setblocking(False)
                await asyncio.get_running_loop().create_unix_connection(lambda: self._channel, sock=ours)
                await self._spawn(theirs.fileno())
        except OSError as error:
            self._channel.close()
            raise NoWorker(f"no process could be started for it: {error}") from error

    async def _spawn(self, fd: int) -> None:
        parent = os.getpid() if self._wall is None else 1
        settings = {"fd": fd, "root": _ROOT, "parent": parent, "uid": choose_uid(), "limits": self._limits}
        argv: Sequence[str] = (sys.executable, "-u", "-X", "faulthandler", pool_worker.__file__, json.dumps(settings))
        # One thread for numeric libraries: workers share the cores with engines and the trainer.
        env: Mapping[str, str] = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONSAFEPATH": "1"}
        if self._wall is not None:
            argv, env = self._wall.around(argv, env)
        transport, _ = await asyncio.get_running_loop().subprocess_exec(
            lambda: self._output,
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=(fd,),
            start_new_session=True,
            env=env,
        )
        self._transport = transport

    def request(
        self,
        verb: str,
        target: str,
        instance: str,
        payload: bytes,
        deadline_s: float,
        took: Callable[[float], object] | None = None,
        began: Callable[[], object] | None = None,
        part: Callable[[int, bytes | PoolError], object] | None = None,
    ) -> asyncio.Future[bytes]:
        """Send one call. The future ends with its result or a PoolError; cancelling it leaves the call running.

        `began` is called once those before it are through; `took` is told the seconds that it ran, if it ended by itself; `part` the index and
        the end of each of the calls of `each`, as they end."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[bytes] = loop.create_future()
        self._num_calls += 1
        self._calls.append(_Call(self._num_calls, reply, deadline_s, took, began, loop.time(), part))
        self._channel.send(msgspec.msgpack.encode((self._num_calls, verb, target, instance, payload)))
        if len(self._calls) == 1:
            self._watch()
        return reply

    def drop(self, instance: str) -> None:
        """Forget an instance, after the calls sent before."""
        self.instances.discard(instance)
        if self.alive:
            self._channel.send(msgspec.msgpack.encode((0, "drop", "", instance, b"")))

    def kill(self, why: str) -> None:
        """End the process and its children now; calls that wait end as WorkerKilled with `why`."""
        self._condemn(why, WorkerKilled(why))

    async def gone(self) -> None:
        """Until the process has ended and nothing of it is held."""
        if self._transport is not None:
            await self._gone.wait()

    def _watch(self) -> None:
        """Start the clock of the call that runs now, and the count of what it prints."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._output.start_count()
        self._began = asyncio.get_running_loop().time()
        if self._calls:
            if (began := self._calls[0].began) is not None:
                began()
            self._timer = asyncio.get_running_loop().call_later(self._calls[0].deadline_s, self._overdue)

    def _overdue(self) -> None:
        late = WorkerTimeout(f"no answer within {self._calls[0].deadline_s:g} s")
        self._condemn("its process was killed because another call on it hung", late)

    def flooded(self) -> None:
        """It printed too much during this call."""
        flood = WorkerDied(f"printed more than {self._limits.max_output_bytes:,} bytes", "too_much_output")
        self._condemn("its process was killed because another call on it printed too much", flood)

    def garbled(self) -> None:
        """What came is no reply of a worker."""
        broken = WorkerDied("wrote to its worker's own socket", "broke_channel")
        self._condemn("its process was killed because another call broke its socket", broken)

    def _condemn(self, verdict: str, first: PoolError) -> None:
        """Kill the process: the running call ends with `first`, the others as bystanders."""
        if self._verdict is None:
            self._verdict = verdict
        self._fail(verdict, first)
        self._end_tree()

    def _fail(self, verdict: str, first: PoolError) -> None:
        calls, self._calls = self._calls, deque()
        self._watch()
        for call in calls:
            if not call.reply.done():
                call.reply.set_exception(first)
            first = WorkerKilled(verdict)

    def _end_tree(self) -> None:
        """Have the init end the worker and all that came of it; should it not manage, end the init."""
        if self._transport is not None and not self._gone.is_set():
            self._signal(signal.SIGTERM)
            if self._last_resort is None:
                self._last_resort = asyncio.get_running_loop().call_later(KILL_S, self._signal, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        try:
            if self._transport is not None and not self._gone.is_set():
                self._transport.send_signal(number)
        except ProcessLookupError:
            pass  # it ended

    def replied(self, frame: bytes) -> None:
        """A call ended."""
        if not self._calls:
            return
        try:
            call, outcome, payload = _REPLIES.decode(frame)
            head = self._calls[0]
            if outcome == pool_worker.PART and call == head.id and head.part is not None:
                index, outcome, payload = _PARTS.decode(payload)
                head.part(index, payload if outcome == pool_worker.DONE else error_of(outcome, payload))
                return
            error = None if outcome == pool_worker.DONE else error_of(outcome, payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError):
            self.garbled()
            return
        if call != head.id:
            self.garbled()
            return
        self._calls.popleft()
        if head.took is not None:
            head.took(asyncio.get_running_loop().time() - self._began)
        self._watch()
        if not head.reply.done():
            if error is None:
                head.reply.set_result(payload)
            else:
                head.reply.set_exception(error)
        if isinstance(error, WorkerDied) or (isinstance(error, UserCodeRaised) and error.at_limit):
            self.kill(f"its process was replaced because another call {error}")

    def channel_ended(self) -> None:
        """The socket ended."""
        if self._verdict is None:
            self._verdict = "its process ended during another call"
        # The process is about to end by itself, with the exit code that tells why; unless user code closed the socket.
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._cut_off)
        self.settle()

    def _cut_off(self) -> None:
        if self._transport is not None and self._transport.get_returncode() is None:
            self._cut = True
            self._end_tree()

    def exited(self) -> None:
        """The process ended."""
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._finish)
        self.settle()

    def settle(self) -> None:
        """One of pipe, socket and process ended; all three make the end."""
        self._open -= 1
        if self._open < 0:
            self._finish()

    def _finish(self) -> None:
        if self._gone.is_set() or self._transport is None:
            return
        self._gone.set()
        verdict = self._verdict or "its process ended during another call"
        self._verdict = verdict
        if self._last_resort is not None:
            self._last_resort.cancel()
        code = self._transport.get_returncode() or 0
        self._fail(verdict, ending(code if self._wall is None else self._wall.exit_code(code), cut=self._cut))
        self._channel.close()
        self._transport.close()


def error_of(outcome: int, payload: bytes) -> PoolError:
    """Of a reply that is not DONE. Raises msgspec.MsgspecError or UnicodeDecodeError for garbage."""
    if outcome == pool_worker.RAISED:
        kind, text, where = msgspec.msgpack.decode(payload, type=tuple[str, str, str])
        return UserCodeRaised(kind, text, where)
    text = payload.decode()
    if outcome == pool_worker.MISSING:
        return TargetMissing(text)
    if outcome == pool_worker.LEFT:
        return WorkerDied(text, "left_processes")
    if outcome == pool_each.LATE:
        return WorkerTimeout("no answer in time")
    if outcome == pool_each.GONE:
        return ending(int(text), cut=False)
    return BadResult(text, "too_large" if outcome == pool_worker.TOO_LARGE else "wrong_type")


def ending(code: int, *, cut: bool) -> WorkerDied:
    """Why a process ended by itself; `cut`: it lost its socket first, and may have been ended for that."""
    if cut and code in (-signal.SIGTERM, -signal.SIGKILL):
        return WorkerDied("closed its worker's own socket", "broke_channel")
    if code >= 0:
        return WorkerDied(f"its process ended with exit code {code}", "exited")
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return WorkerDied(f"its process died of {name}", "crashed")


class FrameChannel(asyncio.Protocol):
    """Frames are a little-endian uint32 length and that many bytes. A length above `max_bytes` is told to `owner` as garbage."""

    def __init__(self, owner: WorkerProcess, max_bytes: int) -> None:
        self._owner = owner
        self._max_bytes = max_bytes
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast("asyncio.Transport", transport)

    def send(self, frame: bytes) -> None:
        """Queue one frame; ignored once the channel ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(len(frame).to_bytes(4, "little") + frame)

    def close(self) -> None:
        """Drop the channel and what is queued."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self._data += data
        while len(self._data) >= 4:
            size = int.from_bytes(self._data[:4], "little")
            if size > self._max_bytes:
                self._owner.garbled()
                self.close()
                return
            if len(self._data) < size + 4:
                return
            frame = bytes(self._data[4 : size + 4])
            del self._data[: size + 4]
            self._owner.replied(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._owner.channel_ended()


class OutputLines(asyncio.SubprocessProtocol):
    """Passes printed lines on, at most OUTPUT_LINES_S a second, and tells when the pipe and the process end.

    `owner` is told once of more than `max_bytes` since the last `start_count`; nothing is passed on after it.
    """

    def __init__(self, owner: WorkerProcess, max_bytes: int, on_line: Callable[[str], None]) -> None:
        self._owner = owner
        self._max_bytes = max_bytes
        self._on_line = on_line
        self._rest = b""
        self._window_start = 0.0
        self._num_lines = 0
        self._num_bytes = 0
        self._flooded = False

    def start_count(self) -> None:
        """Another call begins: what it prints counts from here. Some of the last one's output may still be in the pipe."""
        self._num_bytes = 0

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Called by the loop."""
        if self._flooded:
            return
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            self._flooded = True
            self._owner.flooded()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > OUTPUT_LINE_LIMIT:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._pass_on(line)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Called by the loop."""
        if self._rest:
            self._pass_on(self._rest)
            self._rest = b""
        self._owner.settle()

    def process_exited(self) -> None:
        """Called by the loop."""
        self._owner.exited()

    def _pass_on(self, line: bytes) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._window_start >= 1.0:
            if self._num_lines > OUTPUT_LINES_S:
                self._on_line(f"… {self._num_lines - OUTPUT_LINES_S} lines of output were left out")
            self._window_start, self._num_lines = now, 0
        self._num_lines += 1
        if self._num_lines <= OUTPUT_LINES_S:
            self._on_line(line[:OUTPUT_LINE_LIMIT].decode(errors="replace"))
