"""The placer of a cluster whose nodes lie on several hosts: a job's host is one that joined the cluster, and the job too then.

The scheduler names it in `launch.backend` of a job, and in `launch.hosts` what the job has there.
"""

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from rubato.actors.cluster.pools import labels_of
from rubato.actors.messages.cluster_hosts import AwaitHost, HostEnded, HostNotStarted, SignalHost, StartHost
from rubato.bus.errors import AskFailed
from rubato.runtime.config import Config
from rubato.runtime.errors import LaunchError, RubatoError
from rubato.runtime.guest import Guest, join
from rubato.runtime.host import Ending
from rubato.runtime.launch.card import read_card
from rubato.runtime.launch.placer import HostSpec, JoinCommand, NotPlaced
from rubato.runtime.store.store import StoreUnavailable

ASK_S = 20.0
"""Longer than a command that stays is waited for."""

AGAIN_S = 1.0
"""Before a cluster is asked again that did not answer."""

RELEASE_S = 8.0
"""For a host to end what is left there; past it that ends once it lapses."""

LAPSE_S = 5.0
"""A host that lost its run leaves it after run.lease_s, and so long later its process is ended."""


class ClusterPlacer:
    """A HostPlacer. Logs are on the hosts, in their folder of the cluster, `hosts/RUN.N.log`."""

    def __init__(self, config: Config, folder: Path) -> None:
        section: Any = config.section("cluster")
        self._cluster, self._folder = Path(section.dir), folder
        self._lapse_s, self._life = config.run.lease_s + LAPSE_S, secrets.token_hex(8)
        self._hosts: list[JoinedHost] = []

    async def place(self, spec: HostSpec, join: JoinCommand) -> "JoinedHost":
        number = secrets.token_hex(8)
        run = read_card(self._folder).id
        order = StartHost(number, run, self._life, join.module, join.arguments, join.token, self._lapse_s)
        while True:
            with suppress(AskFailed, LaunchError, StoreUnavailable):  # it left meanwhile, or the cluster is being started again
                return await self._start(order, spec.labels)
            await asyncio.sleep(AGAIN_S)

    async def _start(self, order: StartHost, labels: tuple[str, ...]) -> "JoinedHost":
        async with guest(self._cluster) as me:
            name = await _with_labels(me, labels)
            host = JoinedHost(self._cluster, name, order)
            try:
                reply = await me.ref(name).ask(order, timeout=ASK_S)
            except (AskFailed, asyncio.CancelledError):
                await host.release()
                raise
        if isinstance(reply, HostNotStarted):
            raise NotPlaced(f"{reply.why}.")
        host.id = f"{name}.{reply.process}"
        self._hosts.append(host)
        return host

    async def close(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for host in self._hosts:
                tasks.create_task(host.release())


class JoinedHost:
    """A PlacedHost: a command that an actor of the cluster runs on its host."""

    def __init__(self, cluster: Path, name: str, order: StartHost) -> None:
        self._cluster, self._name, self._order = cluster, name, order
        self.id = name
        self._asking = asyncio.Lock()
        self._ending: Ending | None = None
        self._scope: asyncio.Timeout | None = None
        self._until: float | None = None
        """Loop time at which it is given up."""
        self._signals: list[signal.Signals] = []
        """That are not handed on yet."""
        self._signalled = asyncio.Event()

    async def ended(self) -> Ending:
        async with self._asking:  # of those who wait one asks
            if self._ending is None:
                try:
                    async with asyncio.timeout_at(self._until) as self._scope:
                        self._ending = await self._asked()
                except TimeoutError:
                    self._ending = Ending("lost", f"{self._name} of the cluster does not answer", lost=True)
                finally:
                    self._scope = None
        return self._ending

    def signal(self, number: signal.Signals) -> None:
        self._signals.append(number)
        self._signalled.set()

    async def release(self) -> None:
        if self._ending is None:
            self.signal(signal.SIGKILL)
            self._until = asyncio.get_running_loop().time() + RELEASE_S
            if self._scope is not None:
                self._scope.reschedule(self._until)
            await self.ended()

    async def _asked(self) -> Ending:
        """Its end; lost where it was not heard of for longer than a command lives on without its launcher."""
        loop = asyncio.get_running_loop()
        heard = loop.time()
        while loop.time() - heard < self._order.lapse_s:
            try:
                async with guest(self._cluster) as me, asyncio.TaskGroup() as tasks:
                    telling = tasks.create_task(self._tell(me))
                    while not isinstance(reply := await me.ref(self._name).ask(AwaitHost(self._order.id), timeout=ASK_S), HostEnded):
                        heard = loop.time()
                    telling.cancel()
                if reply.code is None:
                    return Ending("lost", reply.sentence, lost=True)
                return Ending.of(reply.code, reply.sentence)
            except* (AskFailed, RubatoError):
                await asyncio.sleep(AGAIN_S)
        return Ending("lost", f"{self._name} of the cluster was not heard of for {self._order.lapse_s:g} s", lost=True)

    async def _tell(self, me: Guest) -> None:
        while True:
            self._signalled.clear()
            while self._signals:
                await me.ref(self._name).ask(SignalHost(self._order.id, self._signals[0]), timeout=ASK_S)
                self._signals.pop(0)
            await self._signalled.wait()


@asynccontextmanager
async def guest(cluster: Path) -> AsyncGenerator[Guest]:
    """In the cluster's run, for as long as something is asked there."""
    async with join(cluster, name=f"placer-{os.getpid()}-{secrets.token_hex(4)}", types=False) as me:
        yield me


async def _with_labels(me: Guest, labels: Sequence[str]) -> str:
    """The host of the cluster that has them all, once one has joined; the first is its node's. Raises NotPlaced where that lacks others."""
    while True:
        has = labels_of(me)
        if fit := [name for name, its in has.items() if its.issuperset(labels)]:
            return fit[0]
        if any(labels[0] in its for its in has.values()):
            raise NotPlaced(f"the host {labels[0]} of the cluster is none of {', '.join(labels[1:])}: add that to its host.labels.")
        await me.directory.change()
