"""CPU seconds of the run's processes on this host, read from /proc: what each part of a job costs the cores that all of them share."""

import os
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

PROC = Path("/proc")


def cpu_seconds(pids: Mapping[str, int], proc: Path = PROC) -> dict[str, float]:
    """CPU seconds so far by name: each process with what it started, less what `pids` names itself. Blocking.

    The kernel counts in ticks of 10 ms; children that ended do not count. Left out is a process that is gone, names that share one
    process, and everything where the system has no /proc.
    """
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    named = Counter(pids.values())
    found: dict[str, float] = {}
    for name, pid in pids.items():
        ticks = _ticks(pid, proc) if named[pid] == 1 else None
        if ticks is not None:
            found[name] = tick_s * (ticks + sum(_ticks(child, proc) or 0 for child in _below(pid, named, proc)))
    return found


def busy_seconds(proc: Path = PROC) -> float | None:
    """CPU seconds that all cores of this host were busy so far, whoever used them; None where the system does not tell."""
    try:
        first = (proc / "stat").read_text().splitlines()[0].split()
        user, nice, system, _, _, irq, softirq = (int(cell) for cell in first[1:8])
    except (OSError, ValueError, IndexError):
        return None
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _ticks(pid: int, proc: Path) -> int | None:
    try:
        cells = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(cells[11]) + int(cells[12])  # utime and stime, fields 14 and 15 of proc(5)
    except (OSError, ValueError, IndexError):
        return None


def _below(pid: int, named: Container[int], proc: Path) -> Iterator[int]:
    """All descendants of `pid` that lead through none of `named`."""
    for file in (proc / str(pid) / "task").glob("*/children"):
        try:
            children = [int(child) for child in file.read_text().split()]
        except (OSError, ValueError):
            continue
        for child in children:
            if child not in named:
                yield child
                yield from _below(child, named, proc)
