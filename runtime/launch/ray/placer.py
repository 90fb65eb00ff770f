"""The placer of a Ray cluster: each placed host is a process below an actor of its own, on a node that has what it needs.

Only the helper, a process beside the launcher's, loads Ray and speaks to the cluster.
"""

import asyncio
import itertools
import os
import signal
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import msgspec

from rubato.runtime.config import Config
from rubato.runtime.host import Ending
from rubato.runtime.launch.card import read_card
from rubato.runtime.launch.children import die_with_parent, last_line
from rubato.runtime.launch.folder import make_private
from rubato.runtime.launch.placer import HostSpec, JoinCommand, NotPlaced
from rubato.runtime.launch.ray.lines import (
    LONGEST_LINE,
    Connect,
    Connected,
    Ended,
    Order,
    Place,
    Placed,
    Refused,
    Release,
    Released,
    Report,
    Signal,
    Unreachable,
    line_of,
)

CONNECT_S = 90.0
"""For the helper to load Ray and to reach a cluster that takes connections."""

CLOSE_S = 8.0
"""For the helper to give back what is left; past it Ray does, once the helper was killed."""

LAPSE_S = 5.0
"""A host that the launcher's loss has not ended leaves the run after run.lease_s, and so long later its actor ends what is left."""


class RayPlacer:
    """A HostPlacer. Ray ends what it placed with its helper, and that ends with the launcher. Logs are in RUN/hosts."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._numbers = itertools.count(1)
        self._connecting = asyncio.Lock()
        self._helper: Helper | None = None

    @staticmethod
    def problems(config: Config) -> list[str]:
        """What a launch is refused for."""
        found = find_spec("ray")
        if found is not None and found.origin is not None:  # a folder of that name among the user's own is no package
            return []
        return [f"launch.backend is {config.launch.backend}, but ray is not installed. Install it with: pip install -e '.[ray]'"]

    async def place(self, spec: HostSpec, join: JoinCommand) -> "RayHost":
        helper = await self._connected()
        order = Place(next(self._numbers), spec, join.module, join.arguments, join.token)
        host = helper.hosts[order.number] = RayHost(order, helper)
        helper.send(order)
        try:
            await asyncio.shield(host.placed)
        except asyncio.CancelledError:
            await host.release()
            raise
        return host

    async def close(self) -> None:
        if self._helper is not None:
            await self._helper.close()

    async def _connected(self) -> "Helper":
        """The helper, which reached the cluster: another one after one that ended. Raises NotPlaced."""
        async with self._connecting:
            if self._helper is None or self._helper.over.done():
                make_private(self._folder / "hosts")
                self._helper = await Helper.start(self._folder / "hosts", self._connect())
            helper, address = self._helper, self._config.launch.address
            try:
                async with asyncio.timeout(CONNECT_S):
                    await asyncio.shield(helper.connected)
            except TimeoutError:
                helper.kill()
                raise NotPlaced(f"the Ray cluster at launch.address={address} did not answer within {CONNECT_S:g} s.") from None
            return helper

    def _connect(self) -> Connect:
        config = self._config
        namespace = f"rubato-{read_card(self._folder).id}"
        return Connect(config.launch.address, namespace, config.run.lease_s + LAPSE_S, config.bus.host)


class Helper(asyncio.SubprocessProtocol):
    """The process that speaks to Ray, as the launcher sees it."""

    def __init__(self, folder: Path) -> None:
        loop = asyncio.get_running_loop()
        self.folder, self.log = folder, folder / "ray.log"
        self.hosts: dict[int, RayHost] = {}
        """Those that are not released yet, placed or not."""
        self.connected: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self._transport: asyncio.SubprocessTransport | None = None
        self._line = bytearray()
        self._decoder = msgspec.json.Decoder(Report)

    @classmethod
    async def start(cls, folder: Path, connect: Connect) -> "Helper":
        helper = cls(folder)
        with helper.log.open("wb") as log:
            transport, _ = await asyncio.get_running_loop().subprocess_exec(
                lambda: helper, sys.executable, "-m", "rubato.runtime.launch.ray.helper",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True,
                env={"RAY_USAGE_STATS_ENABLED": "0", **os.environ, "PYTHONSAFEPATH": "1"}, preexec_fn=die_with_parent,
            )  # fmt: skip
        helper._transport = transport
        helper.send(connect)
        return helper

    def send(self, order: Order) -> None:
        """Nothing happens once it has ended."""
        if not self.over.done() and (pipe := self._pipe()):
            pipe.write(line_of(order))

    def kill(self) -> None:
        if self._transport is not None and not self.over.done():
            self._transport.kill()

    async def close(self) -> None:
        """Release every host, and end."""
        for number in tuple(self.hosts):
            self.send(Release(number))
        if pipe := self._pipe():
            pipe.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.shield(self.over)
        except TimeoutError:
            self.kill()
            await self.over

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._line += data
        *lines, rest = self._line.split(b"\n")
        self._line = rest
        for line in lines:
            self._heard(self._decoder.decode(line))
        if len(rest) > LONGEST_LINE:
            self.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended, and all that it said was read."""
        why = f"the process that speaks to Ray ended: {last_line(self.log) or 'it said nothing'}. Log: {self.log}"
        _refuse(self.connected, why)
        for host in tuple(self.hosts.values()):
            host.heard(Refused(host.number, why))
        self.hosts.clear()
        self.over.set_result(None)
        if self._transport is not None:
            self._transport.close()

    def _heard(self, report: Report) -> None:
        if isinstance(report, Connected):
            self.connected.set_result(None)
        elif isinstance(report, Unreachable):
            _refuse(self.connected, report.why)
        elif host := self.hosts.get(report.number):
            host.heard(report)
            if isinstance(report, Released | Refused):
                self.hosts.pop(report.number)

    def _pipe(self) -> asyncio.WriteTransport | None:
        return cast("asyncio.WriteTransport | None", self._transport and self._transport.get_pipe_transport(0))


class RayHost:
    """A PlacedHost: the command below one actor."""

    def __init__(self, order: Place, helper: Helper) -> None:
        loop = asyncio.get_running_loop()
        self.id, self.number, self._helper = order.name, order.number, helper
        self.placed: asyncio.Future[None] = loop.create_future()
        self._ending: asyncio.Future[Ending] = loop.create_future()
        self._released: asyncio.Future[None] = loop.create_future()

    async def ended(self) -> Ending:
        return await asyncio.shield(self._ending)

    def signal(self, number: signal.Signals) -> None:
        self._helper.send(Signal(self.number, number))

    async def release(self) -> None:
        if not self._released.done():
            self._helper.send(Release(self.number))
            await asyncio.shield(self._released)

    def heard(self, report: Placed | Refused | Ended | Released) -> None:
        """What the helper reports of it."""
        if isinstance(report, Placed):
            self.placed.set_result(None)
        elif isinstance(report, Ended):
            self._ends(report)
        else:
            _refuse(self.placed, report.why if isinstance(report, Refused) else "it was given back")
            lost = isinstance(report, Refused)
            self._ends(Ended(self.number, None if lost else -int(signal.SIGKILL), report.why if lost else ""))
            if not self._released.done():
                self._released.set_result(None)

    def _ends(self, report: Ended) -> None:
        if self._ending.done():
            return
        log = self._helper.folder / f"{self.id}.log"
        with suppress(OSError):  # of a full disk the run itself tells
            log.write_text(report.output)
        if report.code is None:
            self._ending.set_result(Ending("lost", report.sentence, lost=True))
        else:
            self._ending.set_result(Ending.of(report.code, report.sentence, str(log)))


def _refuse(future: "asyncio.Future[None]", why: str) -> None:
    if not future.done():
        future.set_exception(NotPlaced(why))
        future.exception()  # where nothing waits for it, that is no fault
