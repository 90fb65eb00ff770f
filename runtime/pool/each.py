"""Calls of one function all at once, each in a process that its worker forks for it: one that hangs or dies costs no other.

The worker has imported what they need, so a call costs a fork. What a call leaves in memory is gone with its process, and what it leaves
running in its process group is killed.
"""

import os
import select
import selectors
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic  # noqa: TID251 - a worker has no event loop
from typing import NamedTuple, NoReturn

AT_ONCE = 64
"""Calls under way; others wait for the end of one."""

LATE, GONE = 7, 8
"""Outcomes beside those of a worker: no answer in time, and its process ended without one; the payload is its exit code, or minus its signal."""

LAST_WORDS_S = 0.5

Answer = Callable[[bytes], tuple[int, bytes]]


class _Child(NamedTuple):
    place: int
    pid: int
    frame: bytearray


def answer_each(calls: Sequence[bytes], within_s: float, answer: Answer, tell: Callable[[int, int, bytes], None]) -> None:
    """`answer` every call in a process of its own, and `tell` its index, outcome and payload as it ends; what takes longer than `within_s`
    from now is killed, and LATE. Where no process can be forked a call is answered here."""
    end = monotonic() + within_s
    waiting = deque(enumerate(calls))
    with selectors.DefaultSelector() as running:
        while (waiting or running.get_map()) and (left_s := end - monotonic()) > 0:
            while waiting and len(running.get_map()) < AT_ONCE and not _is_on_gpu():
                try:
                    _start(running, *waiting[0], answer)
                except OSError:
                    break
                waiting.popleft()
            if not running.get_map():
                index, call = waiting.popleft()
                tell(index, *answer(call))
            for key, _ in running.select(left_s):
                if _read(key.fd, key.data):
                    _finish(running, key.fd, key.data, tell)
        for key in [*running.get_map().values()]:
            _finish(running, key.fd, key.data, tell, late=True)
    for index, _ in waiting:
        tell(index, LATE, b"")


def _is_on_gpu() -> bool:
    """A CUDA context does not outlive a fork."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _start(running: selectors.BaseSelector, index: int, call: bytes, answer: Answer) -> None:
    """Raises OSError where no process may be forked."""
    ours, theirs = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(ours)
        os.close(theirs)
        raise
    if pid == 0:
        _play(theirs, call, answer)
    os.close(theirs)
    with suppress(OSError):  # it did so itself, or ended
        os.setpgid(pid, pid)
    running.register(ours, selectors.EVENT_READ, _Child(index, pid, bytearray()))


def _play(theirs: int, call: bytes, answer: Answer) -> NoReturn:
    """The child: one answer, then the end, without what Python would run at its exit."""
    code = 1
    try:
        os.setpgid(0, 0)
        outcome, payload = answer(call)
        frame = memoryview(len(payload).to_bytes(4, "little") + bytes([outcome]) + payload)
        while frame:
            frame = frame[os.write(theirs, frame) :]
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    finally:
        os._exit(code & 0xFF)


def _read(fd: int, child: _Child) -> bool:
    """Whether that was all: an answer is whole, or nothing more can come."""
    data = os.read(fd, 1 << 20)
    child.frame.extend(data)
    return not data or _is_whole(child.frame)


def _is_whole(frame: bytearray) -> bool:
    return len(frame) >= 5 and len(frame) == int.from_bytes(frame[:4], "little") + 5


def _finish(
    running: selectors.BaseSelector, fd: int, child: _Child, tell: Callable[[int, int, bytes], None], *, late: bool = False
) -> None:
    running.unregister(fd)
    os.close(fd)
    whole = _is_whole(child.frame)
    if not whole and not late:
        _let_end(child.pid)
    with suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    ended = 1
    with suppress(ChildProcessError):  # user code reaps what it did not start
        ended = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
    if whole:
        tell(child.place, child.frame[4], bytes(child.frame[5:]))
    else:
        tell(child.place, LATE if late else GONE, b"" if late else str(ended).encode())


def _let_end(pid: int) -> None:
    """It closed its end of the pipe: it is about to end by itself, with the exit code that tells why; unless user code closed it."""
    with suppress(OSError, AttributeError):  # not on every system
        ended = os.pidfd_open(pid)
        select.select([ended], [], [], LAST_WORDS_S)
        os.close(ended)
