"""One worker process as its parent sees it: calls in order, a deadline on the one that runs, one verdict when it ends."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from runtime import pool_worker
from runtime.pool_errors import (
    BadResult,
    PoolError,
    TargetMissing,
    UserCodeRaised,
    WorkerDied,
    WorkerKilled,
    WorkerTimeout,
)
from runtime.pool_pipes import FrameChannel, OutputLines

LAST_WORDS_S = 0.5
"""How long an ended process's pipes may stay open (a grandchild may hold them) before they are closed."""

FRAME_OVERHEAD_BYTES = 64
"""What a reply's frame adds to its payload, generously."""


_REPLIES = msgspec.msgpack.Decoder(tuple[int, int, bytes])
_ROOT = str(Path(pool_worker.__file__).resolve().parent.parent)


class Limits(NamedTuple):
    """What a worker process may use. `memory_mb` bounds its address space in MiB; 0 leaves it alone."""

    memory_mb: int = 0
    max_reply_bytes: int = 10 * 1024 * 1024


class _Call(NamedTuple):
    id: int
    reply: "asyncio.Future[bytes]"
    deadline_s: float


class WorkerProcess:
    """Calls are sent as they come and run one after another; a call's deadline counts from when it starts to run."""

    def __init__(self, limits: Limits, on_output: Callable[[str], None]) -> None:
        self.instances: set[str] = set()
        self._limits = limits
        self._channel = FrameChannel(limits.max_reply_bytes + FRAME_OVERHEAD_BYTES, self._replied, self._channel_ended)
        self._output = OutputLines(on_output, self._settle, self._exited)
        self._transport: asyncio.SubprocessTransport | None = None
        self._calls: deque[_Call] = deque()
        self._num_calls = 0
        self._timer: asyncio.TimerHandle | None = None
        self._verdict: str | None = None
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
        """Process id; 0 before `start`."""
        return 0 if self._transport is None else self._transport.get_pid()

    async def start(self) -> None:
        """Spawn the process. Raises OSError when the system refuses."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            await loop.create_unix_connection(lambda: self._channel, sock=ours)
            try:
                await self._spawn(theirs.fileno())
            except OSError:
                self._channel.close()
                raise

    async def _spawn(self, fd: int) -> None:
        settings = {
            "fd": fd,
            "root": _ROOT,
            "parent": os.getpid(),
            "memory_mb": self._limits.memory_mb,
            "max_reply_bytes": self._limits.max_reply_bytes,
        }
        transport, _ = await asyncio.get_running_loop().subprocess_exec(
            lambda: self._output,
            *(sys.executable, "-u", "-X", "faulthandler", pool_worker.__file__, json.dumps(settings)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=(fd,),
            start_new_session=True,
            # One thread for numeric libraries: workers share the cores with engines and the trainer.
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONSAFEPATH": "1"},
        )
        self._transport = transport

    def request(
        self, verb: str, target: str, instance: str, payload: bytes, deadline_s: float
    ) -> asyncio.Future[bytes]:
        """Send one call. The future ends with its result or a PoolError; cancelling it leaves the call running."""
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._num_calls += 1
        self._calls.append(_Call(self._num_calls, reply, deadline_s))
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
        """Start the clock of the call that runs now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._calls:
            self._timer = asyncio.get_running_loop().call_later(self._calls[0].deadline_s, self._overdue)

    def _overdue(self) -> None:
        late = WorkerTimeout(f"no answer within {self._calls[0].deadline_s:g} s")
        self._condemn("its process was killed because another call on it hung", late)

    def _condemn(self, verdict: str, first: PoolError) -> None:
        """Kill the process: the running call ends with `first`, the others as bystanders."""
        if self._verdict is None:
            self._verdict = verdict
        self._fail(verdict, first)
        self._kill_group()

    def _fail(self, verdict: str, first: PoolError) -> None:
        calls, self._calls = self._calls, deque()
        self._watch()
        for call in calls:
            if not call.reply.done():
                call.reply.set_exception(first)
            first = WorkerKilled(verdict)

    def _kill_group(self) -> None:
        try:
            if self._transport is not None and not self._gone.is_set():
                os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # nobody of the group is left; macOS says so with a permission error

    def _replied(self, frame: bytes) -> None:
        if not self._calls:
            return
        call, outcome, payload = _REPLIES.decode(frame)
        head = self._calls[0]
        if call != head.id:
            self.kill("user code wrote to its worker's own socket")
            return
        self._calls.popleft()
        self._watch()
        if head.reply.done():
            return
        if outcome == pool_worker.DONE:
            head.reply.set_result(payload)
        else:
            head.reply.set_exception(_error_of(outcome, payload))

    def _channel_ended(self) -> None:
        if self._verdict is None:
            self._verdict = "its process ended during another call"
        # The process is about to end by itself, with the exit code that tells why; unless user code closed the socket.
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._kill_group)
        self._settle()

    def _exited(self) -> None:
        self._kill_group()
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._finish)
        self._settle()

    def _settle(self) -> None:
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
        self._fail(verdict, WorkerDied(_ending(self._transport.get_returncode() or 0)))
        self._channel.close()
        self._transport.close()


def _error_of(outcome: int, payload: bytes) -> PoolError:
    if outcome == pool_worker.RAISED:
        kind, text, where = msgspec.msgpack.decode(payload, type=tuple[str, str, str])
        return UserCodeRaised(kind, text, where)
    return (TargetMissing if outcome == pool_worker.MISSING else BadResult)(payload.decode())


def _ending(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        return f"its process died of {signal.Signals(-code).name}"
    except ValueError:
        return f"its process died of signal {-code}"
