"""Makes the links of a test-bed as fast as the circuits, so that bytes feel them: Linux `tc`, classful token buckets (htb).

Every rack is a network namespace PREFIX-RACK with one device per other rack, `to-N` for the N-th, each a veth whose other end is there
(tools/fabric_namespaces.py). What one rack sends another passes one htb class, whose rate is set here: without a circuit the reserved
trickle, with n circuits n times the bandwidth of one.
"""

import asyncio
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import cast

from rubato.actors.fabric.section import FabricSection
from rubato.planning.circuits import Cross
from rubato.planning.demand import Pair
from rubato.runtime.errors import RubatoError

BURST_KB = 64
"""Of the token bucket: one segment as large as the kernel makes them, or the rate would not be reached."""


class LinksError(RubatoError):
    """The links of the test-bed can't be set: it was taken away, or this process lacks the right."""


def rates_mbps(lit: Iterable[Cross], section: FabricSection) -> dict[Pair, float]:
    """What each rack may send each other rack, in Mbit/s."""
    num, ports = len(section.racks), section.ports_per_endpoint
    circuits = Counter((cross.ingress // ports, cross.egress // ports) for cross in lit)
    pairs = [(a, b) for a in range(num) for b in range(num) if a != b]
    return {pair: circuits[pair] * section.link_gbps * 1e3 or section.trickle_mbps for pair in pairs}


def batches(changed: Mapping[Pair, float], section: FabricSection) -> dict[str, str]:
    """Namespace → the `tc -batch` lines that set these rates there."""
    racks, found = list(section.racks), dict[str, str]()
    for (a, b), mbps in sorted(changed.items()):
        rate = f"rate {mbps * 1e3:.0f}kbit burst {BURST_KB}kb cburst {BURST_KB}kb quantum 60000"
        namespace = f"{section.testbed}-{racks[a]}"
        found[namespace] = found.get(namespace, "") + f"class change dev to-{b} classid 1:1 htb {rate}\n"
    return found


class Links:
    """Remembers what it set, and changes only what differs; `pipes` lead to a `tc` in each namespace."""

    def __init__(self, section: FabricSection, pipes: Mapping[str, asyncio.StreamWriter]) -> None:
        self._section, self._pipes = section, pipes
        self._rates: dict[Pair, float] = {}

    async def follow(self, lit: Iterable[Cross]) -> None:
        """Give every link the rate that these circuits mean."""
        wanted = rates_mbps(lit, self._section)
        changed = {pair: mbps for pair, mbps in wanted.items() if self._rates.get(pair) != mbps}
        for namespace, lines in batches(changed, self._section).items():
            self._pipes[namespace].write(lines.encode())
            with suppress(ConnectionError):  # it ended, and `links` says why
                await self._pipes[namespace].drain()
        self._rates = wanted


@asynccontextmanager
async def links(section: FabricSection) -> AsyncIterator[Links]:
    """With the links of the test-bed in hand. Raises LinksError, in a group, where they can't be set.

    One `tc` per namespace waits for all changes to come: to start one takes longer than fast mirrors do, and on a busy machine than slow ones.
    """
    processes: dict[str, Process] = {}
    try:
        for rack in section.racks:
            processes[f"{section.testbed}-{rack}"] = await _tc(f"{section.testbed}-{rack}")
        async with asyncio.TaskGroup() as tasks:
            watches = [tasks.create_task(_watch(each, name), name=f"tc of {name}") for name, each in processes.items()]
            yield Links(section, {name: _pipe(process) for name, process in processes.items()})
            for watch in watches:
                watch.cancel()
    finally:
        for process in processes.values():
            _pipe(process).close()
            await process.wait()


async def _tc(namespace: str) -> Process:
    """Ends when its pipe does, also where this process is killed."""
    try:
        return await asyncio.create_subprocess_exec("tc", "-n", namespace, "-batch", "-", stdin=PIPE, stderr=PIPE)
    except OSError as error:
        raise LinksError(f"the links of {namespace} can't be set: tc does not start ({error.strerror})") from error


async def _watch(process: Process, namespace: str) -> None:
    """Raises LinksError when it ends on its own: it failed."""
    said = await cast("asyncio.StreamReader", process.stderr).read()
    raise LinksError(f"the links of {namespace} can't be set: {said.decode().strip() or 'tc ended'}")


def _pipe(process: Process) -> asyncio.StreamWriter:
    return cast("asyncio.StreamWriter", process.stdin)
