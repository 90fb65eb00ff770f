"""A bed of the placer contract: an allocation of three nodes of a cluster of Slurm that is this test's own."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import pytest

from rubato.runtime.config.compose import from_mapping
from rubato.runtime.launch.card import RunCard
from rubato.runtime.launch.placer import HostSpec, PlacedHost
from rubato.runtime.launch.slurm.placer import SlurmPlacer
from tests.slurm_cluster import SlurmCluster, missing, slurm_cluster

LEASE_S = 5.0

LAUNCHER = """
import asyncio, sys
from pathlib import Path
from tests.contract.placers import ANY, does
from tests.contract.slurm_bed import placer_of
async def main():
    folder, job, *what = sys.argv[1:]
    placer = placer_of(Path(folder), job)
    for each in what:
        host = await placer.place(ANY, does(each))
        print(host._process.pid, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


def placer_of(folder: Path, job: str) -> SlurmPlacer:
    config = {
        "actors": {"idle": {"class": "rubato.runtime.actor:Actor"}},
        "run": {"lease_s": LEASE_S},
        "launch": {"backend": "slurm", "address": job},
    }
    return SlurmPlacer(from_mapping(config), folder)


class SlurmBed:
    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        cluster.run("salloc", "--no-shell", "--nodes=3", "--exclusive", "--no-kill")
        self.job = cluster.run("squeue", "-h", "-o", "%i")
        folder.joinpath("run.json").write_bytes(msgspec.json.encode(RunCard(folder.name, "", "", 0, 0.0)))
        self.placer = placer_of(folder, self.job)
        self.impossible, self.later = HostSpec("far", 1, labels=("h20",)), HostSpec("later", 1)

    async def up(self, host: PlacedHost) -> None:
        while not any("up\n" in log.read_text() for log in self._folder.rglob("*.log")):  # noqa: ASYNC110 - another process's file
            await asyncio.sleep(0.05)

    def left(self) -> int:
        return len(self._cluster.steps())

    def lose(self, host: PlacedHost) -> None:
        self._cluster.kill_node(self._cluster.steps()[host.id], noticed=True)

    async def lose_launcher(self) -> int:
        await self._launcher("stay", "deaf")
        within_s = LEASE_S + 10.0
        await asyncio.to_thread(self._cluster.wait_until, lambda: not self._cluster.processes(), "the commands end", within_s)
        await asyncio.to_thread(self._cluster.wait_until, lambda: not self._cluster.steps(), "the steps end")
        return self.left()

    async def leave(self) -> None:
        await self._launcher("deaf")

    async def _launcher(self, *what: str) -> None:
        """One that placed these, and whose machine was lost: its srun processes tell Slurm no more than it does."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", LAUNCHER, str(self._folder), self.job, *what,
            stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert process.stdout is not None
        pids = [int(await process.stdout.readline()) for _ in what]
        process.send_signal(signal.SIGSTOP)
        for pid in pids:
            os.killpg(pid, signal.SIGKILL)
        process.send_signal(signal.SIGKILL)
        await process.wait()


@contextmanager
def nodes() -> Iterator[SlurmCluster]:
    """A cluster of three, for any number of beds."""
    if lacking := missing():
        pytest.skip(f"Slurm is not here: {lacking}")
    with slurm_cluster(dict.fromkeys(("n1", "n2", "n3"), "")) as cluster:
        yield cluster


@asynccontextmanager
async def slurm(folder: Path, cluster: SlurmCluster) -> AsyncGenerator[SlurmBed]:
    cluster.until_idle()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SLURM_CONF", "PATH"):
            patch.setenv(name, cluster.environment[name])
        bed = SlurmBed(cluster, folder)
        try:
            yield bed
        finally:
            await bed.placer.close()
            cluster.run("scancel", bed.job)
