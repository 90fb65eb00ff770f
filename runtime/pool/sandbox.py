"""What user code in a worker can't get out of: limits that the kernel enforces, and a process above it that ends all that it started.

Root is exempt from the limit on processes, and that limit counts per uid. So each worker of a root pool gets a uid of
its own. It keeps one capability of root: to read files, or a user's code under /root could not be imported.
On systems other than Linux less holds.
"""

import ctypes
import faulthandler
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rubato.runtime.pool.values import MAX_REPLY_BYTES

FIRST_UID, LAST_UID = 1_879_048_192, 2_147_352_575
"""Uids that no user has: above containers' ranges and below 2^31 (systemd's table of uids)."""

CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_SETGID, CAP_SETUID = 1, 2, 6, 7
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS = 1, 4, 8
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
CAPABILITY_VERSION_3 = 0x20080522


class WorkerLimits(NamedTuple):
    """What a worker process and all that it starts may use.

    `memory_mb` bounds each process's private writable memory (RLIMIT_DATA) in MiB, 0 leaves it alone; shared mappings
    (`mmap.mmap(-1, …)`, shared memory files) are not counted. `max_processes` counts
    processes and threads; `max_output_bytes` is what one call may print. `writes`: a worker with a uid of its own may still
    write wherever we may; else only where all users may.
    """

    memory_mb: int = 0
    max_reply_bytes: int = MAX_REPLY_BYTES
    max_output_bytes: int = 8 * 1024 * 1024
    max_processes: int = 256
    writes: bool = True


def choose_uid() -> int:
    """A uid for one worker; 0 where it keeps ours."""
    if sys.platform != "linux" or os.geteuid() != 0 or shortcoming():
        return 0
    return FIRST_UID + int.from_bytes(os.urandom(4), "big") % (LAST_UID - FIRST_UID)


def shortcoming() -> str:
    """The sentence for the log where the number of a worker's processes can't be limited; else ""."""
    if sys.platform != "linux":
        return f"On {sys.platform} the processes that user code leaves behind are found by their group alone."
    if os.geteuid() != 0:
        return ""
    needed = 1 << CAP_SETUID | 1 << CAP_SETGID
    if _capabilities() & needed != needed:
        why = "the capabilities SETUID and SETGID are missing"
    elif not any(first <= FIRST_UID and first + num > LAST_UID for first, num in _mapped_uids()):
        why = f"the uids from {FIRST_UID} are not mapped into this container"
    else:
        return ""
    return f"The number of processes that user code starts is not limited: we are root and {why}. Run as another user."


def enter(limits: WorkerLimits, uid: int, init: int) -> None:
    """Put this process into its bounds, for good; it ends when `init` does."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limits.memory_mb:
        _lower(resource.RLIMIT_DATA, limits.memory_mb << 20)
    if sys.platform != "linux":
        return
    _lower(resource.RLIMIT_NPROC, limits.max_processes if uid else _threads_of(os.geteuid()) + limits.max_processes)
    with suppress(OSError):  # not in every sandbox
        # When memory runs out, the kernel ends user code before it ends an actor.
        Path("/proc/self/oom_score_adj").write_text("1000")
    if uid:
        become(uid, _file_capability(limits.writes))
    prctl(PR_SET_PDEATHSIG, 9)
    if os.getppid() != init:
        os._exit(0)


def become(uid: int, capabilities: int) -> None:
    """Take on `uid` for good, with these capabilities (a bit mask) for this process and what it starts, and no others."""
    prctl(PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    _set_capabilities(capabilities)
    for bit in range(capabilities.bit_length()):
        if capabilities >> bit & 1:
            prctl(PR_CAP_AMBIENT, 2, bit)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 1)  # else /proc/self would belong to root


def is_powerless(uid: int) -> bool:
    """Whether this process is `uid`, one of ours, and has no capability."""
    return os.getresuid() == (uid, uid, uid) and FIRST_UID <= uid < LAST_UID and _capabilities() == 0


def prctl(option: int, value: int, more: int = 0) -> None:
    """prctl(2), on Linux; what an old kernel does not know is left out."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, *(ctypes.c_ulong(number) for number in (value, more, 0, 0)))


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _file_capability(writes: bool) -> int:
    """Containers by default withhold the weaker one, that only reads: then it is the other."""
    held = _capabilities()
    wanted = (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH) if writes else (CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE)
    return next((1 << bit for bit in wanted if held >> bit & 1), 0)


def _capabilities() -> int:
    """Effective capabilities as a bit mask."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _set_capabilities(mask: int) -> None:
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0)
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if libc.capset(header, data):
        raise OSError(ctypes.get_errno(), "capset")


def _mapped_uids() -> list[tuple[int, int]]:
    """(first uid, number) of each range that this user namespace knows."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    return [(int(first), int(num)) for first, _, num in (line.split() for line in lines)]


def _threads_of(uid: int) -> int:
    """Threads that count towards this user's limit now."""
    total = 0
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                total += int((entry / "stat").read_text().rpartition(")")[2].split()[17])
        except OSError:
            continue  # it ended
    return total


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
        return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]
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
