"""Racks and a switch whose circuits the bytes feel, for test_fabric_testbed: `PLAY` prints what was measured, as JSON.

Ends with 77 and a sentence where this machine, or this user, can't have it.
"""

import asyncio
import json
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from rubato.actors.fabric.emulated import EmulatedSwitch
from rubato.actors.fabric.section import FabricSection
from rubato.bus.keys import new_keys
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.planning.circuits import Cross
from rubato.runtime.actor import RunInfo
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.observe.log import logger
from tests.jobs import clean_environment
from tools.fabric_namespaces import NoNamespaces, Racks, enter

SIZE = 4 << 20
CIRCUIT_MBPS, TRICKLE_MBPS = 200.0, 10.0
RIGHT = (Cross(0, 4), Cross(4, 0))
"""Joins the racks that have bytes for each other."""
WRONG = (Cross(0, 8), Cross(8, 0))
RACKS = {"a": "10.203.8.1", "b": "10.203.8.2", "c": "10.203.8.3"}


class Bed:
    """The switch, and an agent in each of two racks."""

    def __init__(self, racks, switch, source, puller):
        self.racks, self.switch, self._source, self._puller = racks, switch, source, puller

    async def set(self, circuits):
        """Returns once the kernel has the rates that these circuits mean, and no others."""
        device = self.switch.device
        device.update(tuple(device.status()), circuits)
        lit = {(c.ingress // 4, c.egress // 4) for c in circuits}
        async with asyncio.timeout(30):
            while any((rate(self.racks, *pair) > TRICKLE_MBPS) != (pair in lit) for pair in ((0, 1), (0, 2))):  # noqa: ASYNC110 - the kernel's tables send no event
                await asyncio.sleep(0.02)

    async def begin(self):
        self._puller.stdin.write(b"pull\n")
        await self._puller.stdin.drain()

    async def ended(self) -> float:
        """Seconds that the pull took."""
        return float(await self._puller.stdout.readline())

    async def pull(self) -> tuple[float, int]:
        """And the bytes that went from the first rack to the second meanwhile."""
        before = self.racks.sent_bytes()["a", "b"]
        await self.begin()
        return await self.ended(), self.racks.sent_bytes()["a", "b"] - before


@asynccontextmanager
async def bed(folder):
    racks = Racks("test", RACKS)
    racks.make(TRICKLE_MBPS)
    section = FabricSection(
        racks={rack: (address,) for rack, address in RACKS.items()},
        testbed=racks.prefix,
        link_gbps=CIRCUIT_MBPS / 1e3,
        trickle_mbps=TRICKLE_MBPS,
        reconfiguration_s=0.05,
        ports=12,
    )
    async with AsyncExitStack() as stack:
        keys = folder / "keys.json"
        keys.write_bytes(msgspec.json.encode(new_keys()))
        source = await started(stack, racks, "a", "serve", keys, RACKS["a"], str(SIZE))
        told = (await source.stdout.readline()).decode().strip()
        puller = await started(stack, racks, "b", "pull", keys, RACKS["b"], told)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        kernel = Kernel(
            EmulatedSwitch,
            EmulatedSwitch.Config(fabric=section),
            name="optical_switch-1",
            incarnation=1,
            run=RunInfo("racks", Path("run"), 1, 1),
            transport=MemoryTransport(Identity("racks", "optical_switch-1", 1), MemoryNetwork()),
            store=MemoryStore(),
            blobs=MemoryBlobStore(),
            log=logger("rubato.test"),
        )
        switch = kernel.build()
        serving = tasks.create_task(kernel.serve())
        stack.callback(serving.cancel)
        await kernel.ready.wait()
        yield Bed(racks, switch, source, puller)


async def started(stack, racks, rack, *words):
    script = str(Path(__file__).with_name("rack_agent.py"))
    process = await asyncio.create_subprocess_exec(
        *racks.command(rack, [sys.executable, script, *map(str, words)]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**clean_environment(), "PYTHONPATH": str(Path(__file__).parents[2])},
    )

    async def end():
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    stack.push_async_callback(end)
    return process


def rate(racks, a, b) -> float:
    """Mbit/s of the link, by the kernel's account."""
    name = racks.namespace(list(RACKS)[a])
    said = subprocess.run(["tc", "-n", name, "class", "show", "dev", f"to-{b}"], capture_output=True, text=True, check=True).stdout  # fmt: skip
    value = said.split(" rate ")[1].split()[0]
    for unit, scale in (("Gbit", 1e3), ("Mbit", 1.0), ("Kbit", 1e-3)):
        if value.endswith(unit):
            return float(value.removesuffix(unit)) * scale
    raise AssertionError(said)


async def pulls(folder: Path) -> dict[str, float]:
    """One at the circuit's rate, and one where the plan gave the circuit to another pair."""
    async with bed(folder) as test:
        await test.set(RIGHT)
        lit_s, lit_bytes = await test.pull()
        await test.set(WRONG)
        dark_s, dark_bytes = await test.pull()
        return {"lit_s": lit_s, "lit_bytes": lit_bytes, "dark_s": dark_s, "dark_bytes": dark_bytes}


async def darkens(folder: Path) -> dict[str, float]:
    """A pull whose circuit goes dark before it, and comes back for its last three quarters."""
    async with bed(folder) as test:
        await test.set(RIGHT)
        await test.set(WRONG)
        await test.begin()
        before, began = test.racks.sent_bytes()["a", "b"], asyncio.get_running_loop().time()
        while (passed := test.racks.sent_bytes()["a", "b"] - before) < SIZE // 4:  # noqa: ASYNC110 - nor do its counters
            await asyncio.sleep(0.02)
        dark_s = asyncio.get_running_loop().time() - began
        await test.set(RIGHT)
        await test.ended()
        sent = test.racks.sent_bytes()
        return {"dark_s": dark_s, "passed": passed, "all": sent["a", "b"] - before, "stray": sent["c", "b"]}


def main(play: str, *inside: str) -> int:
    try:
        if not inside:
            enter([sys.executable, __file__, play, "inside"])
        with TemporaryDirectory() as folder:
            print(json.dumps(asyncio.run({"pulls": pulls, "darkens": darkens}[play](Path(folder)))))
    except NoNamespaces as error:
        print(error)
        return 77
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
