"""Ways out of a sandbox: `score` tries the one that the column `escape` names, and gives 1 where it got out, 0 where it was refused."""

import ctypes
import mmap
import os
import resource
import signal
import socket
from pathlib import Path


def refused(attempt):
    """Whether the system said no."""
    try:
        attempt()
    except (OSError, MemoryError):
        return True
    return False


def reads(path, **columns):
    return not refused(Path(path).read_bytes)


def lists(path, **columns):
    return not refused(lambda: os.listdir(path))


def reads_through_proc(path, **columns):
    """By the root folder, and the open files, of every process that is to be seen."""
    ways = [*Path("/proc").glob("[0-9]*/root"), *Path("/proc").glob("[0-9]*/cwd")]
    return any(reads(f"{way}{path}") for way in ways)


def reads_environment(secret, **columns):
    """Of all processes that are to be seen."""
    shown = [file for file in Path("/proc").glob("[0-9]*/environ") if not refused(file.read_bytes)]
    return secret in os.environ or any(secret.encode() in file.read_bytes() for file in shown)


def writes(path, **columns):
    return not refused(lambda: Path(path).write_text("x"))


def writes_everywhere(**columns):
    """Into any folder but those that are its own."""
    own = ("/tmp", "/dev/shm", "/proc")
    tried = list[str]()
    for folder, below, _ in os.walk("/"):
        tried.append(folder)  # a package's folders are mounted with the ones around them, and there are ten thousands
        below[:] = [name for name in below if os.path.join(folder, name) not in own and folder != "/usr" and name != "site-packages"]
    return any(writes(f"{folder}/x") for folder in [*tried, "/usr/local"])


def changes_settings(**columns):
    return any(writes(f"/proc/{name}") for name in ("sys/kernel/core_pattern", "sysrq-trigger", "sys/vm/overcommit_memory"))


def connects(port, **columns):
    with socket.socket() as ours:
        ours.settimeout(5)
        return not refused(lambda: ours.connect(("127.0.0.1", port)))


def connects_to_abstract(name, **columns):
    with socket.socket(socket.AF_UNIX) as ours:
        return not refused(lambda: ours.connect(f"\0{name}"))


def sees_processes(pid, **columns):
    """Those of others."""
    return len([name for name in os.listdir("/proc") if name.isdigit()]) > 4 or Path(f"/proc/{pid}").exists()


def kills_parents(**columns):
    """Whichever are to be seen from here: where they are ours, they end, and with them nothing but this sandbox."""
    for pid in (os.getppid(), 1):
        refused(lambda pid=pid: os.kill(pid, signal.SIGKILL))
    return False


def mounts(**columns):
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0 or libc.chroot(b"/tmp") == 0


def becomes_root(**columns):
    return os.getuid() == 0 or not refused(lambda: os.setuid(0))


def new_namespace(**columns):
    """Of users, in which it would have every capability."""
    return ctypes.CDLL(None, use_errno=True).unshare(0x10000000) == 0


def fork_bomb(**columns):
    """Until no process more can be had."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    assert 0 < limit < 1000
    children = []
    try:
        while len(children) <= limit:
            child = os.fork()
            if child == 0:
                signal.pause()
            children.append(child)
    except BlockingIOError:
        return False
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return True


def fills_tmp(**columns):
    """Beyond its size, by several files."""
    return not all(refused(lambda place=place: _fill(place)) for place in ("/tmp", "/dev/shm"))


def _fill(place):
    for number in range(4):
        with open(f"{place}/{number}", "wb") as file:
            for _ in range(16):
                file.write(bytes(1 << 20))
                file.flush()


def maps_shared_memory(**columns):
    """More than it may have of its own."""
    return not refused(lambda: [mmap.mmap(-1, 64 << 20) for _ in range(40)])


def lifts_limits(**columns):
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
    limits = [resource.getrlimit(kind) for kind in kinds]
    unbounded = resource.RLIM_INFINITY in [bound for limit in limits for bound in limit]
    return unbounded or not all(_is_kept(kind, hard) for kind, (_, hard) in zip(kinds, limits, strict=True))


def _is_kept(kind, hard):
    try:
        resource.setrlimit(kind, (hard + 1, hard + 1))
    except (OSError, ValueError):
        return True
    return False


def score(completions, escape, **columns):
    first = {name: column[0] for name, column in columns.items()}
    return [float(globals()[escape[0]](**first))] * len(completions)
