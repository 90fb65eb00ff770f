"""What keeps user code in its bounds: an own uid where we are root, and limits the kernel enforces. Linux; elsewhere less holds.

Root is exempt from the limit on processes, and that limit counts per uid. So each worker of a root pool gets a uid that
nobody else has. It keeps one capability of root: to read files, or a user's code under /root could not be imported.
"""

import ctypes
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

FIRST_UID, LAST_UID = 1_879_048_192, 2_147_352_575
"""Belong to nobody: above containers' ranges and below 2^31 (systemd's table of uids)."""

CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_SETGID, CAP_SETUID = 1, 2, 6, 7
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS = 1, 4, 8
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
CAPABILITY_VERSION_3 = 0x20080522


class WorkerLimits(NamedTuple):
    """What a worker process and all that it starts may use.

    `memory_mb` bounds each process's private writable memory (RLIMIT_DATA) in MiB, 0 leaves it alone; shared mappings
    (`mmap.mmap(-1, …)`, shared memory files) are not counted. `max_processes` counts
    processes and threads; `max_output_bytes` is what one call may print. `writes`: a worker with a uid of its own may still
    write wherever we may; else only where everybody may.
    """

    memory_mb: int = 0
    max_reply_bytes: int = 10 * 1024 * 1024
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
    """Whether this process is `uid`, one of ours, and can touch nobody else's."""
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
