"""What reward functions do to their worker, the worst included. `score` does what the column `abuse` names."""

import asyncio
import ctypes
import itertools
import os
import resource
import signal
import sys

GOOD = [1.0]


def good():
    return GOOD


def loop():
    while True:
        pass


def loop_in_c():
    """Never gives the interpreter lock up, never looks at signals."""
    return sum(itertools.repeat(0))


def ignore_signals():
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    loop()


def stop_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


def _check_bounded():
    """A bomb must never go off where nothing bounds it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    assert os.getuid() != 0
    assert 0 < limit < 1000


def fork_bomb():
    _check_bounded()
    while True:
        os.fork()


def escaping_bomb():
    """Every process is a session of its own and tries for ever."""
    _check_bounded()
    while True:
        try:
            if os.fork() == 0:
                os.setsid()
        except OSError:
            pass


def threads():
    import threading

    _check_bounded()
    while True:
        threading.Thread(target=signal.pause, daemon=True).start()


def segfault():
    ctypes.string_at(0)


def abort():
    os.abort()


def memory_hog():
    held = []
    while True:
        held.append(bytearray(8 << 20))


def sys_exit():
    sys.exit(0)


def os_exit():
    os._exit(0)


def interrupt():
    raise KeyboardInterrupt


def kill_group():
    os.killpg(0, signal.SIGKILL)


def exception():
    raise ValueError("no such answer")


def huge_exception():
    raise ValueError("x" * (50 << 20))


def cancelled():
    raise asyncio.CancelledError


async def cancelled_later():
    raise asyncio.CancelledError


def generator_exit():
    raise GeneratorExit("no more")


class Surrogate(Exception):
    def __repr__(self):
        return "Surrogate('\ud800')"


def surrogate_repr():
    raise Surrogate


def broken_repr():
    class Broken(BaseException):
        def __repr__(self):
            raise GeneratorExit

    raise Broken


def huge_name():
    raise type("Long\ud800" * (4 << 20), (Exception,), {})


def nan():
    return [float("nan")]


def infinite():
    return [float("-inf")]


def huge():
    return [1e200]


def huge_integer():
    return [1 << 70]


def word():
    return ["one"]


def none():
    return None


def scalar():
    return 1.0


def wrong_length():
    return [1.0, 2.0]


def large_result():
    return "x" * (11 << 20)


def flood_stdout():
    print("x" * (10 << 20))
    return GOOD


def flood_stderr():
    for _ in range(10 << 10):
        sys.stderr.write("x" * 1023 + "\n")
    return GOOD


def endless_output():
    while True:
        print("again")


def close_pipes():
    os.closerange(0, 4096)
    return GOOD


def close_pipes_and_loop():
    os.closerange(0, 4096)
    loop()


def write_to_pipes():
    _write_everywhere()
    return GOOD


def fork_and_write():
    """Through the C library, so that no hook of Python closes anything in the child."""
    child = ctypes.PyDLL(None).fork()
    if child == 0:
        _write_everywhere()
        os._exit(0)
    os.waitpid(child, 0)
    return GOOD


def fork_and_return_twice():
    """The child comes back from the call as well, with a result of its own."""
    child = os.fork()
    if child == 0:
        _write_everywhere()
        return [99.0]
    os.waitpid(child, 0)
    return GOOD


def leave_grandchild():
    """It escapes group and session, ignores signals and holds every descriptor."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            ignore_signals()
        os._exit(0)
    os.waitpid(child, 0)
    return GOOD


def grandchild_and_loop():
    leave_grandchild()
    loop()


def exit_and_leave_children():
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            ignore_signals()
    sys.exit(5)


def own_uid():
    return [float(os.getuid())]


def _write_everywhere():
    for fd in [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]:
        try:
            os.write(fd, b"\xff" * 64)
        except OSError:
            continue


def score(completions, abuse, **columns):
    return globals()[abuse[0]]()


def write_beside(completions, **columns):
    with open(f"{__file__}.notes", "w") as file:
        file.write("x")
    return [1.0] * len(completions)
