"""ClusterHost: the actor of a host that joined a cluster. Jobs get their hosts from it, and through its folder they reach the permits."""

import asyncio
import itertools
import json
import signal
from contextlib import suppress
from typing import Any, ClassVar

from rubato.actors.messages.cluster_hosts import AwaitHost, HostEnded, HostNotStarted, HostStarted, HostStays, SignalHost, StartHost
from rubato.bus.message import Ack
from rubato.runtime.actor import Actor, handler
from rubato.runtime.config import ActorConfig, StateSection
from rubato.runtime.errors import LaunchError
from rubato.runtime.host import Ending
from rubato.runtime.launch.card import find_keys, read_card
from rubato.runtime.launch.folder import make_private
from rubato.runtime.launch.here import LocalHost, start_here
from rubato.runtime.launch.placer import JoinCommand
from rubato.runtime.launch.shared import SharedScope, password_for, scope_of, write_shared
from rubato.runtime.store.embedded import as_guest

STAYS_S = 5.0
"""An ask after a command that still runs is answered after so long."""

LEAVE_S = 10.0
"""For the commands that are left when the host leaves the cluster; each is killed past it."""


class ClusterHost(Actor):
    """A job's host here is one more process, which joins it to that job's run; it ends with this actor, or once its launcher is lost."""

    role: ClassVar[str] = "cluster_host"

    class Config(ActorConfig):
        state: StateSection = StateSection()

    config: Config

    @classmethod
    def preload(cls, config: Any) -> tuple[str, ...] | None:
        """What it starts ends with its own process, which is no fork of the warm parent."""
        return None

    async def on_start(self) -> None:
        """From here on the permits are reached through this host's folder."""
        self._commands: dict[str, Command] = {}
        self._numbers = itertools.count(1)
        self._folder = self.run.folder / "hosts"
        make_private(self._folder)
        write_shared(self.run.folder, self._scope())

    async def on_drain(self) -> None:
        for command in self._commands.values():
            command.host.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                for command in list(self._commands.values()):
                    await command.host.ended()

    async def on_stop(self) -> None:
        for command in self._commands.values():
            command.host.kill()

    @handler
    async def start_host(self, request: StartHost) -> HostStarted | HostNotStarted:
        known = self._commands.get(request.id)
        if known is None:
            for earlier in [each for each in self._commands.values() if each.of.run == request.run and each.of.life != request.life]:
                await earlier.host.release()
            own = self.directory.find(self.node)
            labels = json.dumps(sorted(own.provides) if own is not None else [])
            arguments = (*request.arguments, f"cluster.dir='{self.run.folder}'", f"host.labels={labels}")
            log = self._folder / f"{request.run}.{next(self._numbers)}.log"
            try:
                host = await start_here(JoinCommand(request.module, arguments, request.token), log, lambda _: None)
            except OSError as error:
                return HostNotStarted(f"{self.node} can't start it: {error.strerror} ({error.filename})")
            known = self._commands[request.id] = Command(request, host)
            self.spawn(self._until_over(known), name=f"{self.name}.{host.id}")
            self.log.info("host_started", run=request.run, pid=host.id)
        return HostStarted(known.host.id)

    @handler(concurrency=1024)
    async def await_host(self, request: AwaitHost) -> HostStays | HostEnded:
        command = self._commands.get(request.id)
        if command is None:
            return HostEnded(None, f"{self.node} has it no more")
        command.asked()
        with suppress(TimeoutError):
            async with asyncio.timeout(STAYS_S):
                ending = await command.host.ended()
                return HostEnded(ending.code, ending.sentence)
        return HostStays()

    @handler(concurrency=1024)
    async def signal_host(self, request: SignalHost) -> Ack:
        if command := self._commands.get(request.id):
            command.asked()
            command.host.signal(signal.Signals(request.number))
        return Ack()

    async def _until_over(self, command: "Command") -> None:
        """One whose launcher has not asked after it for long ends; how it ended is known for as long again."""
        ending: Ending | None = None
        while ending is None:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(command.until):
                    ending = await command.host.ended()
            if ending is None and command.is_lapsed:
                self.log.warning("host_lapsed", run=command.of.run, pid=command.host.id)
                command.host.kill()
                ending = await command.host.ended()
        self.log.info("host_ended", run=command.of.run, pid=command.host.id, how=ending.how, sentence=ending.sentence)
        await asyncio.sleep(command.of.lapse_s)
        self._commands.pop(command.of.id, None)

    def _scope(self) -> SharedScope:
        """The cluster's, by this host's own way to its Store. Raises LaunchError where the folder has no keys."""
        card, keys, state = read_card(self.run.folder), find_keys(self.run.folder), self.config.state
        if keys is None:
            raise LaunchError(f"{self.run.folder} has no keys of the cluster: join it anew with rubato add {self.role} --join TOKEN")
        url = card.state_url if state.url else as_guest(card.state_url, password_for(keys.state_password))
        return SharedScope(scope_of(card.id), url, state.durability == "replicated")


class Command:
    """One that runs, or has ended and may still be asked after."""

    def __init__(self, of: StartHost, host: LocalHost) -> None:
        self.of, self.host = of, host
        self.asked()

    def asked(self) -> None:
        """Its launcher is there."""
        self.until = asyncio.get_running_loop().time() + self.of.lapse_s

    @property
    def is_lapsed(self) -> bool:
        return asyncio.get_running_loop().time() >= self.until
