"""The load that every system gets, and the figures it is judged by: one definition, so that each does comparable work."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

PAYLOAD = b"x" * 256
IN_FLIGHT = 256
BULK_BYTES = 64 * 1024 * 1024
READERS = 4

WARM_UP = 500
"""Round trips before the clock starts: connections, caches and allocators have settled by then."""

ADDRESS_OF_PAGES = 4096

Figures = dict[str, float]
"""`rtt_p50_us`, `rtt_p99_us`, `req_s`, `msg_s`, `bulk_1to1_gb_s`, `bulk_1to4_gb_s`."""

Call = Callable[[], Awaitable[object]]


def latency(samples_ns: list[int]) -> Figures:
    """p50 and p99 of round trips, in µs."""
    ordered = sorted(samples_ns)
    return {"rtt_p50_us": ordered[len(ordered) // 2] / 1e3, "rtt_p99_us": ordered[len(ordered) * 99 // 100] / 1e3}


class Cpu:
    """CPU time of processes, all threads: the cost of a message, whatever else runs on the machine."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._spent_ns = self._now()

    def per(self, count: int) -> float:
        """µs for each of `count` messages since the last call."""
        before, self._spent_ns = self._spent_ns, self._now()
        return (self._spent_ns - before) / count / 1e3

    def _now(self) -> int:
        """Linux alone tells it in ns; elsewhere it stands still, and the figures are 0."""
        threads = [thread for pid in self._pids for thread in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return sum(int(thread.read_text().split()[0]) for thread in threads)


def rate(count: int, began_ns: int) -> float:
    """Per second since `began_ns`."""
    return count / ((now_ns() - began_ns) / 1e9)


def gigabytes(rounds: int, readers: int, began_ns: int) -> float:
    """GB/s that `readers` received together in `rounds` of one bulk array each."""
    return rate(rounds * readers * BULK_BYTES, began_ns) / 1e9


async def round_trips(call: Call, count: int) -> Figures:
    """One request in flight."""
    for _ in range(WARM_UP):
        await call()
    samples: list[int] = []
    for _ in range(count):
        began = now_ns()
        await call()
        samples.append(now_ns() - began)
    return latency(samples)


async def requests(call: Call, count: int, in_flight: int = IN_FLIGHT) -> float:
    """Requests per second with `in_flight` askers, each of which waits for its reply before it asks again."""
    share = count // in_flight

    async def ask() -> None:
        for _ in range(share):
            await call()

    began = now_ns()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(in_flight):
            tasks.create_task(ask())
    return rate(share * in_flight, began)


def now_ns() -> int:
    """The benchmark's own clock: its loops may be anybody's."""
    return time.perf_counter_ns()


def report(path: str, figures: Figures) -> None:
    """Leave the figures where the one who started this process looks for them; stdout belongs to the systems."""
    Path(path).write_text(json.dumps(figures))
