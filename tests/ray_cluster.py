"""Ray clusters of several nodes on this host, and what of a run is left there."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rubato.runtime.config import Config
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.launch.card import RunCard
from rubato.runtime.launch.folder import make_private
from rubato.runtime.launch.placer import HostSpec, PlacedHost
from rubato.runtime.launch.ray.placer import RayPlacer
from tests.contract.placers import COMMAND

RUN = "ray-contract"
NAMESPACE = f"rubato-{RUN}"
LEASE_S = 3.0
LIMIT_S = 60.0
STORE = 80 << 20
"""Bytes of each node's object store, the least that Ray takes."""

NODES = ({"num_cpus": 2, "labels": {"rack": "a"}}, {"num_cpus": 2, "num_gpus": 1, "labels": {"rack": "b", "h20": "true"}})
"""Beside the head, which has no CPU for others."""

TRIES = 3
"""Ray gives a node thirty seconds to come up, which on busy cores may be too few."""


class RayNodes:
    """A cluster with a head that has no CPU for others; its nodes all have this host's address."""

    def __init__(self, **head: object) -> None:
        from ray.cluster_utils import Cluster

        self._temporary = tempfile.TemporaryDirectory(prefix="ray-nodes-")
        self.folder = Path(self._temporary.name)
        """The nodes' TMPDIR."""
        self._cluster = Cluster()
        self._add({"num_cpus": 0, "_system_config": {"prestart_worker_first_driver": False}, **head})
        self.address: str = self._cluster.address

    def _add(self, kind: dict[str, Any]) -> Any:
        for tries in range(TRIES):
            try:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setenv("TMPDIR", self._temporary.name)
                    return self._cluster.add_node(**kind, object_store_memory=STORE)
            except Exception as error:
                if tries + 1 == TRIES:
                    raise
                print(f"another try: {error}")
        return None

    def shutdown(self) -> None:
        self._cluster.shutdown()
        self._temporary.cleanup()


class ThreeNodes(RayNodes):
    """Two nodes beside the head; this process is a driver of theirs."""

    def __init__(self) -> None:
        import ray

        self.ray = ray
        super().__init__(include_dashboard=False)
        self._nodes: dict[str, dict[str, Any]] = {}
        self.make_whole()
        ray.init(self.address, namespace="tests", log_to_driver=False, logging_level="ERROR")
        self.session = Path(self._cluster.head_node.get_session_dir_path())

    def left(self, namespace: str) -> set[str]:
        """Names of a run's actors and placement groups."""
        actors = self.ray.util.list_named_actors(all_namespaces=True)
        groups = self.ray.util.placement_group_table().values()
        named = {row["name"].removeprefix(f"{namespace}/") for row in groups if row["state"] != "REMOVED" and namespace in row["name"]}
        return named | {row["name"] for row in actors if row["namespace"] == namespace}

    def node_of(self, namespace: str, name: str) -> str:
        """Id of the node that a host's placement group has."""
        for row in self.ray.util.placement_group_table().values():
            if row["name"] == f"{namespace}/{name}" and row["state"] == "CREATED":
                return row["bundles_to_node_id"][0]
        raise LookupError(name)

    def lose(self, node_id: str) -> None:
        """Kill a node."""
        node = next(node for node in self._cluster.list_all_nodes() if node.node_id == node_id)
        self._cluster.remove_node(node, allow_graceful=False)
        del self._nodes[node_id]

    def make_whole(self) -> None:
        """Add a node for each that was lost."""
        for kind in NODES:
            if kind not in self._nodes.values():
                self._nodes[self._add(kind).node_id] = kind

    def shutdown(self) -> None:
        self.ray.shutdown()
        super().shutdown()


class JobNodes(RayNodes):
    """One node beside a head that has Ray's job server. Needs what `ray[default]` installs."""

    def __init__(self) -> None:
        super().__init__(include_dashboard=True, dashboard_port=0, dashboard_agent_listen_port=None)  # ports that no other cluster has
        self._add({"num_cpus": 2})
        self.job_server = f"http://{self._cluster.head_node.webui_url}"

    def left(self, namespace: str) -> set[str]:
        """Names of a run's actors and placement groups, as `ray list` has them."""
        from ray.util.state import list_actors, list_placement_groups

        actors = list_actors(self.job_server, filters=[("ray_namespace", "=", namespace), ("state", "!=", "DEAD")])
        groups = list_placement_groups(self.job_server, filters=[("state", "!=", "REMOVED")])
        return {actor.name for actor in actors} | {group.name for group in groups if group.name.startswith(f"{namespace}/")}

    def hosts_running(self) -> list[str]:
        """Command lines of the processes of hosts, which lie in folders of their nodes' TMPDIR."""
        found: list[str] = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if Path(os.readlink(process / "cwd")).is_relative_to(self.folder):
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found


@contextmanager
def three_nodes() -> Iterator[ThreeNodes]:
    nodes = ThreeNodes()
    try:
        yield nodes
    finally:
        nodes.shutdown()


@contextmanager
def job_nodes() -> Iterator[JobNodes]:
    nodes = JobNodes()
    try:
        yield nodes
    finally:
        nodes.shutdown()


def config_for(address: str, **more: Any) -> Config:
    tree = {"actors": {"idle": {"class": "rubato.runtime.actor:Actor"}}, "bus": {"host": "127.0.0.1"}, "run": {"lease_s": LEASE_S}}
    return from_mapping({**tree, "launch": {"backend": "ray", "address": address, **more}})


def placer_for(address: str, folder: Path) -> RayPlacer:
    """That of the run RUN in `folder`."""
    import msgspec

    card = RunCard(RUN, "", "", 0, 0.0)
    make_private(folder)
    (folder / "run.json").write_bytes(msgspec.json.encode(card))
    return RayPlacer(config_for(address), folder)


def commands_running() -> list[Path]:
    """The `/proc/PID` of each host's command that runs here."""
    found: list[Path] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"\0-m\0{COMMAND}\0" in (process / "cmdline").read_text():
                found.append(process)
    return found


def _minds_sigterm(process: Path) -> bool:
    with suppress(OSError):
        masks = [
            int(line.split()[1], 16) for line in (process / "status").read_text().splitlines() if line.startswith(("SigCgt", "SigIgn"))
        ]
        return any(mask >> (signal.SIGTERM - 1) & 1 for mask in masks)
    return True


LAUNCHER = """
import asyncio, sys
from pathlib import Path
from tests.contract.placers import ANY, does
from tests.ray_cluster import placer_for
async def main():
    placer = placer_for(sys.argv[1], Path(sys.argv[2]))
    for what in sys.argv[3:]:
        await placer.place(ANY, does(what))
    print(placer._helper._transport.get_pid(), flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


class RayBed:
    """RayPlacer over the cluster."""

    def __init__(self, nodes: ThreeNodes, folder: Path) -> None:
        self._nodes, self._folder = nodes, folder
        self.placer = placer_for(nodes.address, folder / "run")
        self.impossible = HostSpec("far", 1, gpus=999)
        self.later = HostSpec("later", 1, cpus=2, labels=("rack=b",))
        self._launchers: list[tuple[asyncio.subprocess.Process, int]] = []

    async def up(self, host: PlacedHost) -> None:
        """What it prints is shown at its end alone; so its process is looked at, on whichever node."""
        while not all(map(_minds_sigterm, commands_running())) or not commands_running():  # noqa: ASYNC110 - a process far away
            await asyncio.sleep(0.05)

    def left(self) -> int:
        return len(self._nodes.left(NAMESPACE))

    def lose(self, host: PlacedHost) -> None:
        self._nodes.lose(self._nodes.node_of(NAMESPACE, host.id))

    async def lose_launcher(self) -> int:
        launcher, _ = await self._launch("stay", "deaf")
        launcher.kill()
        return await self._none_left()

    async def freeze_launcher(self) -> int:
        """As lose_launcher, but Ray sees nothing of it: its processes stand still."""
        await self.leave()
        return await self._none_left()

    async def leave(self) -> None:
        launcher, helper = await self._launch("deaf")
        for pid in (launcher.pid, helper):
            os.kill(pid, signal.SIGSTOP)

    async def _none_left(self) -> int:
        with suppress(TimeoutError):
            async with asyncio.timeout(LEASE_S + 10.0):
                while self.left():  # noqa: ASYNC110 - Ray tells it by no event
                    await asyncio.sleep(0.2)
        return self.left()

    async def _launch(self, *commands: str) -> tuple[asyncio.subprocess.Process, int]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", LAUNCHER, self._nodes.address, str(self._folder / "run"), *commands,
            stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert process.stdout is not None
        self._launchers.append((process, helper := int(await process.stdout.readline())))
        return process, helper

    async def close(self) -> None:
        await self.placer.close()
        for process, helper in self._launchers:
            for pid in (helper, process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await process.wait()


@asynccontextmanager
async def ray_bed(nodes: ThreeNodes, folder: Path) -> AsyncGenerator[RayBed]:
    bed = RayBed(nodes, folder)
    try:
        yield bed
    finally:
        await bed.close()
