"""Makes the links of a test-bed as fast as the circuits, so that bytes feel them: Linux `tc`, classful token buckets (htb).

Every rack is a network namespace PREFIX-RACK with one device per other rack, `to-N` for the N-th, each a veth whose other end is there
(tools/fabric_namespaces.py). What one rack sends another passes one htb class, whose rate is set here: without a circuit the reserved
trickle, with n circuits n times the bandwidth of one.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping

from actors.fabric.section import FabricSection
from planning.circuits import Cross
from planning.demand import Pair
from runtime.errors import RubatoError

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
    """Remembers what it set, and changes only what differs."""

    def __init__(self, section: FabricSection) -> None:
        self._section = section
        self._rates: dict[Pair, float] = {}

    async def follow(self, lit: Iterable[Cross]) -> None:
        """Give every link the rate that these circuits mean. Raises LinksError."""
        wanted = rates_mbps(lit, self._section)
        changed = {pair: mbps for pair, mbps in wanted.items() if self._rates.get(pair) != mbps}
        async with asyncio.TaskGroup() as tasks:
            for namespace, lines in batches(changed, self._section).items():
                tasks.create_task(_tc(namespace, lines))
        self._rates = wanted


async def _tc(namespace: str, lines: str) -> None:
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec("tc", "-n", namespace, "-batch", "-", stdin=pipe, stderr=pipe)
        _, said = await process.communicate(lines.encode())
    except OSError as error:
        raise LinksError(f"the links of {namespace} can't be set: tc does not start ({error.strerror})") from error
    if process.returncode:
        raise LinksError(f"the links of {namespace} can't be set: {said.decode().strip() or 'tc failed'}")
