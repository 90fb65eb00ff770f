"""A Redis that fails over, of real processes on this host: a master, its replicas, and three sentinels that watch them."""

import asyncio
import secrets
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from rubato.runtime.launch.children import die_with_parent
from rubato.runtime.store.embedded import USER, rule

SERVICE = "state"
LOOK_S = 0.05
"""No server tells another process when it becomes what is waited for."""
PATIENCE_S = 60.0
FIRST_PORT, PORTS = 10000, 12000

SERVER = """\
port {port}
bind 127.0.0.1
dir "{folder}"
logfile "{folder}/log"
save ""
appendonly yes
appendfsync everysec
repl-diskless-sync-delay 0
min-replicas-to-write {needed}
min-replicas-max-lag 10
{password}
"""

SENTINEL = """\
port {port}
bind 127.0.0.1
dir "{folder}"
logfile "{folder}/log"
sentinel monitor {service} 127.0.0.1 {master} 2
sentinel down-after-milliseconds {service} {down_after_ms}
sentinel failover-timeout {service} 3000
sentinel parallel-syncs {service} 2
{password}
"""


class Node:
    """One server or sentinel; it keeps its port, its file and its folder over restarts."""

    def __init__(self, program: Path, folder: Path, port: int, configuration: str, *arguments: str, password: str = "") -> None:
        folder.mkdir(parents=True)
        self.port = port
        self._program, self._folder, self._arguments = program, folder, arguments
        self._file = folder / "server.conf"
        self._file.write_text(configuration)
        self.admin = Redis(port=port, protocol=2, decode_responses=True, password=password or None)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, *arguments: str) -> None:
        self._process = await asyncio.create_subprocess_exec(
            self._program, self._file, *self._arguments, *arguments, cwd=self._folder, preexec_fn=die_with_parent,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await eventually(self._answers)

    def send(self, number: int) -> None:
        assert self._process is not None, "start() it first"
        self._process.send_signal(number)

    async def kill(self) -> None:
        """As if its machine was gone."""
        if self._process is not None and self.is_up:
            self.send(signal.SIGKILL)
            await self._process.wait()

    async def end(self) -> None:
        await self.kill()
        await self.admin.aclose()

    async def info(self) -> dict[str, Any]:
        """Empty while it does not answer."""
        try:
            async with asyncio.timeout(1.0):
                return await self.admin.info("replication")
        except (RedisError, OSError):
            return {}

    async def _answers(self) -> bool:
        assert self._process is not None
        if self._process.returncode is not None:
            raise RuntimeError(f"{self._file} ended as it started: {(self._folder / 'log').read_text()[-500:]}")
        try:
            return bool(await self.admin.ping())
        except (RedisError, OSError):
            return False


class FailoverBed:
    """`servers` and `sentinels`; the first server is the master at first. With a `password` runs have the user of docs/security.md."""

    def __init__(
        self, folder: Path, program: Path, *, replicas: int = 2, down_after_ms: int = 1000, needed: int = 1, password: str = "",
        sentinel_password: str = "",
    ) -> None:  # fmt: skip
        self._replicas, self._password, self._sentinel_password = replicas, password, sentinel_password
        ports = free_ports(1 + replicas + 3)
        locked = f'requirepass "{password}"\nmasterauth "{password}"\nuser {rule(password)} +wait' if password else ""
        self.servers = [
            Node(program, folder / f"server-{port}", port, SERVER.format(port=port, folder=folder / f"server-{port}", needed=needed, password=locked), password=password)
            for port in ports[: 1 + replicas]
        ]  # fmt: skip
        master = ports[0]
        locked = f'sentinel auth-pass {SERVICE} "{password}"\n' if password else ""
        locked += f'requirepass "{sentinel_password}"' if sentinel_password else ""
        self.sentinels = [
            Node(
                program, folder / f"sentinel-{port}", port,
                SENTINEL.format(port=port, folder=folder / f"sentinel-{port}", service=SERVICE, master=master, down_after_ms=down_after_ms, password=locked),
                "--sentinel", password=sentinel_password,
            )
            for port in ports[1 + replicas :]
        ]  # fmt: skip

    @property
    def url(self) -> str:
        """For `state.url`."""
        user = f"{USER}:{self._password}@" if self._password else ""
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in self.sentinels)
        tail = f"?sentinel_password={self._sentinel_password}" if self._sentinel_password else ""
        return f"redis+sentinel://{user}{hosts}/{SERVICE}{tail}"

    async def start(self) -> None:
        """Return once all replicas follow, and all sentinels know of each other."""
        first, *others = self.servers
        await first.start()
        for each in others:
            await each.start("--replicaof", "127.0.0.1", str(first.port))
        for each in self.sentinels:
            await each.start()
        await self.settled()

    async def stop(self) -> None:
        for each in (*self.sentinels, *self.servers):
            await each.end()

    async def master(self) -> Node:
        """As most sentinels have it."""
        said = [await self._said(each) for each in self.sentinels if each.is_up]
        ports = [int(one["port"]) for one in said if one]
        port = max(set(ports), key=ports.count)
        return next(each for each in self.servers if each.port == port)

    async def settled(self) -> Node:
        """The master, once all servers that are up follow it and the sentinels agree."""
        await eventually(self._is_settled)
        return await self.master()

    async def switched(self, before: Node) -> Node:
        """The next master, once a majority of the sentinels names it."""

        async def has() -> bool:
            return await self.master() is not before

        await eventually(has)
        return await self.master()

    async def _is_settled(self) -> bool:
        said = [await self._said(each) for each in self.sentinels if each.is_up]
        if any(not one or int(one["num-other-sentinels"]) < len(said) - 1 or one["flags"] != "master" for one in said):
            return False
        if len({one["port"] for one in said}) > 1 or any(int(one["num-slaves"]) < self._replicas for one in said):
            return False
        master = await self.master()
        told = await master.info()
        up = sum(each.is_up for each in self.servers)
        return (
            told.get("role") == "master"
            and sum(told[f"slave{at}"]["state"] == "online" for at in range(told["connected_slaves"])) == up - 1
        )

    async def _said(self, sentinel: Node) -> dict[str, Any]:
        try:
            async with asyncio.timeout(1.0):
                return dict(cast("dict[str, Any]", await sentinel.admin.sentinel_masters())[SERVICE])
        except (RedisError, OSError, KeyError):
            return {}


@asynccontextmanager
async def failover_bed(folder: Path, program: Path, **options: Any) -> AsyncGenerator[FailoverBed]:
    """A bed that runs."""
    bed = FailoverBed(folder, program, **options)
    try:
        await bed.start()
        yield bed
    finally:
        await bed.stop()


def free_ports(count: int) -> Sequence[int]:
    """Below those that the system gives to connections, which could take one before its server does; so is a cluster node's second, 10000 on."""
    found = list[int]()
    while len(found) < count:
        with suppress(OSError), socket.create_server(("127.0.0.1", FIRST_PORT + secrets.randbelow(PORTS))) as probe:
            found.append(probe.getsockname()[1])
    return found if len(set(found)) == count else free_ports(count)


async def eventually(holds: Callable[[], Any], patience_s: float = PATIENCE_S) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(patience_s):
        while not await holds():  # noqa: ASYNC110 - see LOOK_S
            await asyncio.sleep(LOOK_S)
