"""What every process we start does first: tie its life to its parent's."""

import asyncio
import ctypes
import os
import resource
import signal
from collections.abc import Callable

MANY_FILES = 16 * 1024

PR_SET_PDEATHSIG = 1
"""Linux: deliver a signal to this process when the thread that started it ends."""


_PARENT = os.getpid()
"""Of the processes started from here."""

try:
    _prctl = ctypes.CDLL(None, use_errno=True).prctl  # not between fork and exec, where loading a library may deadlock
except (OSError, AttributeError):
    _prctl = None


def die_with_parent() -> None:
    """Run in the child between fork and exec. Elsewhere than on Linux it does nothing: such a child notices EOF on its pipe instead."""
    if _prctl is None:
        return
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != _PARENT:  # it died before the call above, and init or a subreaper took its place
        os.kill(os.getpid(), signal.SIGKILL)


def on_signals(act: Callable[[], object]) -> None:
    """Call `act` in the running loop at each SIGINT, SIGTERM or SIGHUP; one ignored by whoever started us (nohup) stays so."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, act)


def allow_many_files() -> None:
    """Raise this process's own limit of open files: each peer costs a few, and 1024 is what many systems start from."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(MANY_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
