"""Whether this host has memory for one more worker like those that there are. Blocking: reads a few files of /proc and /sys."""

from collections.abc import Sequence
from pathlib import Path

SHARE = 0.5
"""Of the memory that is left, what workers may take: engines, trainers and files need some too."""

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def has_room(pids: Sequence[int], proc: Path = PROC, cgroup: Path = CGROUP) -> bool:
    """Whether one more process tree as large as the largest below `pids` fits; True where the system does not tell."""
    left, most = left_bytes(proc, cgroup), max((own_bytes(pid, proc) for pid in pids), default=0)
    return left is None or most <= SHARE * left


def own_bytes(pid: int, proc: Path = PROC) -> int:
    """Memory of `pid` and all below it that would be free without them (PSS)."""
    try:
        lines = (proc / str(pid) / "smaps_rollup").read_text().splitlines()
        children = (proc / str(pid) / "task" / str(pid) / "children").read_text().split()
    except OSError:  # it ended, or the system does not tell
        return 0
    own = next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
    return own + sum(own_bytes(int(child), proc) for child in children)


def left_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """What can be had without swapping, and before a container meets its limit; None where neither is known."""
    found: list[int] = []
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        pass
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        found += [] if limit == "max" else [max(0, int(limit) - int(used))]
    except OSError:
        pass
    return min(found, default=None)
