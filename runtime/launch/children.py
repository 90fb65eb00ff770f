"""What every process we start does first: tie its life to its parent's."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
"""Linux: deliver a signal to this process when the thread that started it ends."""


def die_with_parent() -> None:
    """Run in the child between fork and exec. Elsewhere than on Linux it does nothing: such a child notices EOF on its pipe instead."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return
    if os.getppid() == 1:  # the parent died before the call above
        os.kill(os.getpid(), signal.SIGKILL)
