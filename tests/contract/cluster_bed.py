"""A bed of the placer contract: two hosts that joined a cluster, which is this test's own, on this machine."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec

from rubato.actors.cluster.placer import ClusterPlacer
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.launch.card import RunCard
from rubato.runtime.launch.placer import HostSpec, PlacedHost
from tests.contract.placers import COMMAND
from tests.jobs import clean_environment, rubato
from tests.shared_jobs import until

LEASE_S = 1.0
CONFIG = Path(__file__).parents[2] / "configs" / "cluster_hosts.yaml"

LAUNCHER = """
import asyncio, sys
from pathlib import Path
from tests.contract.cluster_bed import placer_of
from tests.contract.placers import ANY, does
async def main():
    folder, cluster, *what = sys.argv[1:]
    placer = placer_of(Path(folder), Path(cluster))
    for each in what:
        host = await placer.place(ANY, does(each))
        print(host.id, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


def placer_of(folder: Path, cluster: Path) -> ClusterPlacer:
    given = {"actors": {"engine": {"class": "rubato.actors.engines.worker:EngineWorker"}}}
    return ClusterPlacer(from_mapping(given | {"run": {"lease_s": LEASE_S}, "cluster": {"dir": str(cluster), "job": "a"}}), folder)


@contextmanager
def joined_hosts(place: Path) -> Iterator[Path]:
    """The cluster's folder, with two hosts called far."""
    place.mkdir(exist_ok=True)
    cluster, hosts = place / "C", []
    assert rubato("cluster", "start", CONFIG, "--dir", cluster, cwd=place).code == 0
    try:
        token = rubato("keys", "join-token", "--run", cluster, cwd=place).out.strip()
        for name in ("h1", "h2"):
            words = ["add", "cluster_host", "--join", token, "host.labels=[far]", "--run-dir", name]
            with (place / f"{name}.log").open("wb") as log:
                hosts.append(
                    subprocess.Popen([sys.executable, "-m", "rubato.runtime.cli", *words], cwd=place, env=clean_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                )  # fmt: skip
        until(lambda: all((place / name / "cluster.json").exists() for name in ("h1", "h2")), "the hosts")
        yield cluster
    finally:
        rubato("cluster", "stop", cluster, cwd=place)
        for host in hosts:
            host.wait(30)


def processes(words: bytes, cluster: Path) -> list[int]:
    """Of the hosts of this cluster."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line, where = (entry / "cmdline").read_bytes(), str((entry / "cwd").readlink())
        except OSError:
            continue
        if words in line and (where + line.decode(errors="replace")).count(str(cluster.parent)):
            found.append(int(entry.name))
    return found


class ClusterBed:
    def __init__(self, cluster: Path, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        folder.joinpath("run.json").write_bytes(msgspec.json.encode(RunCard(folder.name, "", "", 0, 0.0)))
        self.placer = placer_of(folder, cluster)
        self.impossible, self.later = HostSpec("far", 1, labels=("far", "h20")), HostSpec("later", 1, labels=("later",))

    async def up(self, host: PlacedHost) -> None:
        logs = f"h?/hosts/{self._folder.name}.*.log"
        while not any(log.read_text() == "up\n" for log in self._cluster.parent.glob(logs)):  # noqa: ASYNC110 - another process's file
            await asyncio.sleep(0.05)

    def left(self) -> int:
        return len(processes(COMMAND.encode(), self._cluster))

    def lose(self, host: PlacedHost) -> None:
        """The actor on that host, with all that it started."""
        (pid,) = processes(host.id.rpartition(".")[0].encode(), self._cluster)
        os.kill(pid, signal.SIGKILL)

    async def lose_launcher(self) -> int:
        await self._launcher("stay", "deaf")
        await asyncio.to_thread(until, lambda: not self.left(), "the commands end")
        return self.left()

    async def leave(self) -> None:
        await self._launcher("deaf")

    async def _launcher(self, *what: str) -> None:
        """One that placed these and was lost."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", LAUNCHER, str(self._folder), str(self._cluster), *what,
            stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert process.stdout is not None
        for _ in what:
            await process.stdout.readline()
        process.kill()
        await process.wait()


@asynccontextmanager
async def cluster(folder: Path, *, hosts: Path) -> AsyncGenerator[ClusterBed]:
    bed = ClusterBed(hosts, folder)
    try:
        yield bed
    finally:
        await bed.placer.close()
