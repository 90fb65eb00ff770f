"""What a Redis that fails over keeps: acknowledged writes, numbers given once, and fences, also while the old master takes writes again.

    python tools/bench/failovers.py [--failovers 20] [--durability everysec|replicated] [--replicas 2] [--down-after 1000] [--needed 1]
        [--program PATH] [--json FILE]

A server, its replicas and three sentinels are started here. Eight writers write, and draw numbers, all the time. In turn the master is killed
and started again, or stopped for as long as the failover takes. Either way it comes back as a master that was replaced: a writer that was
fenced meanwhile writes straight to it, until it follows its successor. `--needed` is the servers' min-replicas-to-write.

Exits 1 where `replicated` lost an acknowledged write or acknowledged the fenced writer's, and where any number was given twice.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from rubato.runtime.store.embedded import find_server
from rubato.runtime.store.redis import RedisStore
from rubato.runtime.store.store import Append, Fence, StoreError, WriteNumber
from tools.failover_bed import FailoverBed, Node, eventually, failover_bed

RUN = "failovers"
WRITERS = 8
PACE_S = 0.02
"""Between two writes of a writer: all of them are kept."""
SOME = 200
"""Writes between one failover and the next."""
FETCHED = 2000


class Trial:
    """Writers beside failovers, and what they were told."""

    def __init__(self, bed: FailoverBed, durability: str) -> None:
        self._bed, self._replicated = bed, durability == "replicated"
        self.store = RedisStore(bed.url, RUN, patience_s=60.0, replicated=self._replicated)
        self.acknowledged: list[str] = []
        self.numbers: list[int] = []
        self.pauses: list[float] = []
        self.lost: list[int] = []
        self.fenced_tried = self.fenced_acknowledged = self.fenced_kept = 0
        self.came = asyncio.Event()

    async def write(self, writer: int) -> None:
        """Without end: samples, one log per writer."""
        loop = asyncio.get_running_loop()
        last = loop.time()
        for at in range(1, 1_000_000_000):
            name = f"{writer}.{at}"
            await self.store.write(
                {f"sample/{name}": b"s" * 500}, append=Append(f"log-{writer}", at, [name.encode()], forget=max(0, at - 1000))
            )
            self.acknowledged.append(name)
            self.pauses.append(loop.time() - last)
            last = loop.time()
            self.came.set()
            if at % 10 == 0:
                self.numbers.append(await self.store.increment("term"))
            await asyncio.sleep(PACE_S)

    async def some(self) -> None:
        enough = len(self.acknowledged) + SOME
        while len(self.acknowledged) < enough:
            self.came.clear()
            await self.came.wait()

    async def fail_over(self, at: int) -> float:
        """Once; how long the writers waited at most, in seconds."""
        await self.store.write({}, fence=Fence("buffer", 2 * at + 1))
        await self.some()
        self.pauses.clear()
        before = await self._bed.master()
        if at % 2:
            before.send(signal.SIGSTOP)
        else:
            await before.kill()
        await self._bed.switched(before)
        await self.store.write({}, fence=Fence("buffer", 2 * at + 2), turn=WriteNumber(1, after=await self.store.fenced("buffer")))
        await self.some()
        if at % 2:
            before.send(signal.SIGCONT)
        else:
            await before.start()
        await self._as_fenced(before, 2 * at + 1)
        await self._bed.settled()
        await self.some()
        self.lost.append(await self._missing())
        self.fenced_kept += await self.store.get("fenced") is not None
        return max(self.pauses)

    async def _as_fenced(self, old: Node, token: int) -> None:
        """Write straight to the old master, as long as it says that it is one."""
        store = RedisStore(f"redis://127.0.0.1:{old.port}", RUN, patience_s=0.0, replicated=self._replicated)

        async def follows() -> bool:
            self.fenced_tried += 1
            with contextlib.suppress(StoreError):
                await store.write({"fenced": b"%d" % token}, fence=Fence("buffer", token))
                self.fenced_acknowledged += 1
            return (await old.info()).get("role") == "slave"

        await eventually(follows)
        await store.close()

    async def _missing(self) -> int:
        names = list(self.acknowledged)
        missing = 0
        for begin in range(0, len(names), FETCHED):
            values = await self.store.fetch([f"sample/{name}" for name in names[begin : begin + FETCHED]])
            missing += values.count(None)
        return missing


async def played(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    program = options.program or find_server()
    bed = failover_bed(folder, program, replicas=options.replicas, down_after_ms=options.down_after, needed=options.needed)
    waited = list[float]()
    async with bed as bed, asyncio.TaskGroup() as tasks:
        trial = Trial(bed, options.durability)
        writing = [tasks.create_task(trial.write(writer)) for writer in range(WRITERS)]
        for at in range(options.failovers):
            waited.append(await trial.fail_over(at))
            how = "stopped" if at % 2 else "killed"
            print(f"{at + 1}: {how}, {waited[-1]:.2f} s, {len(trial.acknowledged)} acknowledged, {trial.lost[-1]} lost", file=sys.stderr)
        version = await trial.store.version()
        for each in writing:
            each.cancel()
    await trial.store.close()
    before = [0, *trial.lost]
    return {
        "server": version,
        "durability": options.durability,
        "failovers": options.failovers,
        "without_loss": sum(now <= was for was, now in pairwise(before)),
        "acknowledged": len(trial.acknowledged),
        "lost": trial.lost[-1],
        "numbers": len(trial.numbers),
        "numbers_twice": len(trial.numbers) - len(set(trial.numbers)),
        "fenced": {"tried": trial.fenced_tried, "acknowledged": trial.fenced_acknowledged, "kept": trial.fenced_kept},
        "waited_s": {"median": round(statistics.median(waited), 2), "most": round(max(waited), 2)},
    }


def main() -> int:
    parser = argparse.ArgumentParser("failovers.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--failovers", type=int, default=20)
    parser.add_argument("--durability", choices=["everysec", "replicated"], default="replicated")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--down-after", type=int, default=1000, metavar="MS")
    parser.add_argument("--needed", type=int, default=1)
    parser.add_argument("--program", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="failovers-") as folder:
        found = asyncio.run(played(options, Path(folder)))
    text = json.dumps(found, indent=2)
    if options.json:
        options.json.write_text(text + "\n")
    print(text)
    held = options.durability != "replicated" or not (found["lost"] or found["fenced"]["acknowledged"])
    return 0 if held and not found["numbers_twice"] and not found["fenced"]["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
