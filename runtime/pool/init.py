"""The process above a worker: it runs no user code, inherits what escapes the worker, and leaves nothing of it alive."""

import faulthandler
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from runtime.pool.limits import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, become, is_powerless, prctl


def fork_worker(parent: int, uid: int, channel_fd: int) -> int:
    """Fork, and return in the child, a session of its own, with the pid of its init. SIGTERM to init ends the worker's whole tree.

    Init ends as the worker ended: with its exit code, or of its signal. Its own parent's death counts as SIGTERM.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    init = os.getpid()
    if os.getppid() != parent:
        os._exit(0)
    worker = os.fork()
    if worker:
        _watch(worker, uid, channel_fd)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    return init


def orphans(init: int) -> dict[int, str]:
    """Live children of `init` and their names, by pid: the worker itself, and what lost its parent. Empty where Linux doesn't tell."""
    found: dict[int, str] = {}
    try:
        pids = Path(f"/proc/{init}/task/{init}/children").read_text().split()  # it has one thread
    except OSError:
        return found
    for pid in map(int, pids):
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").partition("(")[2].rpartition(")")
        except OSError:
            continue  # it ended
        if rest.split()[0] not in "ZX":
            found[pid] = name
    return found


def _children(pid: int) -> list[int]:
    """Of all its threads: each has a list of its own."""
    try:
        return [
            int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()
        ]
    except OSError:
        return []


def _descendants() -> set[int]:
    found: set[int] = set()
    new = _children(os.getpid())
    while new:
        found.update(new)
        new = [child for pid in new for child in _children(pid) if child not in found]
    return found


def _watch(worker: int, uid: int, channel_fd: int) -> NoReturn:
    _let_go(channel_fd)
    status = _wait(worker)
    _end_all(worker, uid)
    _end_like(status)


def _let_go(channel_fd: int) -> None:
    """The end of socket and output must tell of the worker's end, not of init's."""
    os.close(channel_fd)
    faulthandler.disable()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):
        os.dup2(null, fd)
    os.close(null)


def _wait(worker: int) -> int:
    """Until the worker ended, or SIGTERM. Returns its exit code, or minus its signal."""
    while True:
        reason = signal.sigwait({signal.SIGCHLD, signal.SIGTERM})
        while (ended := _reap(os.WNOHANG))[0] > 0:
            if ended[0] == worker:
                return os.waitstatus_to_exitcode(ended[1])
        if reason == signal.SIGTERM:
            return -signal.SIGTERM


def _reap(options: int) -> tuple[int, int]:
    """(pid, status) of a child that ended; (0, 0) where none did, (-1, 0) where there is none."""
    try:
        return os.waitpid(-1, options)
    except ChildProcessError:
        return -1, 0


def _end_all(worker: int, uid: int) -> None:
    """Kill and reap until no child is left; who loses its parent on the way becomes our child and is next."""
    while True:
        _send(-worker, signal.SIGKILL)
        if uid:
            _kill_all_of(uid)
        else:
            _freeze()
        for pid in _descendants():
            _send(pid, signal.SIGKILL)
        if _reap(0)[0] < 0:
            return
        while _reap(os.WNOHANG)[0] > 0:
            pass


def _freeze() -> None:
    """Stop the whole tree before killing it: a killed process makes room for another, a stopped one counts to the limit."""
    stopped: set[int] = set()
    while new := _descendants() - stopped:
        for pid in new:
            _send(pid, signal.SIGSTOP)
        stopped |= new


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(OSError):  # it ended
        os.kill(pid, number)


def _kill_all_of(uid: int) -> None:
    """In one step, so that no fork outruns it: a process that is allowed to signal this uid alone signals all that it may."""
    helper = os.fork()
    if helper == 0:
        try:
            become(uid, capabilities=0)
            if is_powerless(uid):
                os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(helper, 0)


def _end_like(status: int) -> NoReturn:
    if status < 0:
        if -status != signal.SIGKILL:  # whose action can't be set
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        os.kill(os.getpid(), -status)
    os._exit(abs(status) & 0xFF)
