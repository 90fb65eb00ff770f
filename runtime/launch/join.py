"""A host that joins a running job: a node agent of its own, with its own sockets, blobs and processes, until either side ends it."""

import asyncio
import ipaddress
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

from bus.errors import AskFailed, BadAddress
from runtime.blobs.server import BlobServer
from runtime.config import Config, load
from runtime.errors import LaunchError
from runtime.kept_code import FOLDER as CODE
from runtime.kept_code import keep, pack, unpack, use
from runtime.keys import write_keys
from runtime.launch.agent import ASK_S, JobOutcome, NodeAgent
from runtime.launch.children import allow_many_files, on_signals
from runtime.launch.connection import RunAccess, reach
from runtime.launch.console import Console, step_table
from runtime.launch.folder import RunCard, RunFolder
from runtime.launch.gate import GateClient, way_through
from runtime.launch.launcher import EXIT_CODES
from runtime.launch.processes import process_host
from runtime.launch.token import JoinToken
from runtime.messages import MOST_ADDED, AddActors, NotAdded
from runtime.observe.log import configure
from runtime.registry import NODE
from runtime.store.errors import StoreUnavailable
from runtime.store.open import open_store

REACH_S = 15.0
"""For the first contact with the run: a wrong address is told then."""


class Joiner:
    """Brings `num` actors of `role` into the run that `token` opens; `run` returns the exit code."""

    def __init__(
        self, token: JoinToken, role: str, num: int, folder: Path, host: str = "", overrides: tuple[str, ...] = ()
    ) -> None:
        self._token = token
        self._role, self._num = role, num
        self._folder = RunFolder(folder.resolve())
        self._host = host
        self._overrides = overrides

    async def run(self) -> int:
        """Raises LaunchError, before anything is written, for what this host alone can tell is wrong."""
        if not 1 <= self._num <= MOST_ADDED:
            raise LaunchError(f"can't add {self._num} actors: between 1 and {MOST_ADDED} at a time.")
        host = _checked(self._host) if self._host else _own_address(self._token.gate or self._token.state_url)
        allow_many_files()
        main = asyncio.current_task()
        assert main is not None
        on_signals(main.cancel)
        card = self._folder.open(resume=False, force=False)
        card.id = self._token.run_id
        card.host = host
        try:
            async with AsyncExitStack() as stack:
                outcome = await self._serve(card, stack)
        finally:
            self._folder.close()
        print(outcome.sentence, file=sys.stderr)  # noqa: T201 - the sentence for the user
        return EXIT_CODES[outcome.kind]

    async def _serve(self, card: RunCard, stack: AsyncExitStack) -> JobOutcome:
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        await self._open_gate(card, stack)
        config = await self._fetch_config(card)
        connection = await stack.enter_async_context(reach(config, card, self._folder.path, self._token.keys.curve))
        card.node = f"node-{await connection.store.increment('nodes', at_least=2)}"
        configure(self._folder.path / "logs" / f"{card.node}.jsonl", actor=card.node)
        server = BlobServer(Path(card.sockets) / "blobs.sock")
        await server.start()
        stack.push_async_callback(server.close)
        actor_class, actor_config = config.actor_class(self._role), config.actor_config(self._role)
        actor_class.check_host(actor_config)
        actor_class.preflight(actor_config, self._folder.path)
        return await self._host_actors(connection, tasks)

    async def _host_actors(self, connection: RunAccess, tasks: asyncio.TaskGroup) -> JobOutcome:
        """Get names from the first host, start the actors, and stay until there is an outcome.

        Only a host that is let in keeps the job's keys and the way to its Store, for the actors that it starts.
        """
        console = Console(step_table(connection.config.report.console))
        async with process_host(connection, console, tasks) as agent:
            agent.spawn(_follow(agent, connection.config.run.lease_s), name="follow_run")
            try:
                names = await self._ask_for_names(agent)
                write_keys(self._folder.path, self._token.keys)
                self._folder.write(connection.card)
                self._folder.commit()
                on_signals(lambda: _interrupt(agent))
                for name in names:
                    agent.start(name)
                told = f"{agent.name} joined {self._token.run_id} with {', '.join(names)} · {self._folder.path}"
                console.say(told)
                return await agent.over
            finally:
                await agent.stop("interrupted")

    async def _ask_for_names(self, agent: NodeAgent) -> tuple[str, ...]:
        try:
            reply = await agent.ref(NODE).ask(AddActors(self._role, self._num, agent.name), timeout=ASK_S)
        except AskFailed as error:
            raise LaunchError(f"the run {self._token.run_id} did not let this host in: {error}") from error
        if isinstance(reply, NotAdded):
            raise LaunchError(reply.why)
        return reply.names

    async def _open_gate(self, card: RunCard, stack: AsyncExitStack) -> None:
        """From here on the run's Store seems to be on this host."""
        card.state_url = self._token.state_url
        if not self._token.gate:
            return
        path = Path(card.sockets) / "state.sock"
        gate = GateClient(card.id, self._token.gate, self._token.keys.curve, path, f"gate@{card.host}")
        try:
            await gate.start()
        except BadAddress as error:
            raise LaunchError(f"the way to the run's state: {error}") from error
        stack.push_async_callback(gate.close)
        card.state_url = way_through(self._token.state_url, path)

    async def _fetch_config(self, card: RunCard) -> Config:
        """The job's config as the first host resolved it, with this host's own overrides."""
        store = open_store(card.state_url, card.id)
        try:
            async with asyncio.timeout(REACH_S):
                text, code = await store.get("config"), await store.get("code")
        except (TimeoutError, StoreUnavailable) as error:
            raise LaunchError(
                f"the run {card.id} could not be reached at {self._token.gate or 'its state.url'} within {REACH_S:.0f} s. "
                "Is it running, is that address reachable from here, and is the token its newest one?"
            ) from error
        finally:
            await store.close()
        if text is None:
            raise LaunchError(
                f"the run {card.id} has no config yet: it is still starting, or the token is another run's."
            )
        self._folder.config.touch(mode=0o600)
        self._folder.config.write_bytes(text)
        kept = self._folder.path / CODE
        unpack(code or pack(kept), kept)
        use(kept)
        config = load(self._folder.config, [f"bus.host='{card.host}'", *self._overrides])
        keep(kept, config.tree())
        self._folder.config.write_text(config.dump())
        if self._role not in config.actors:
            raise LaunchError(f"{self._role} is not a role of this run. Its roles are {', '.join(config.actors)}.")
        return config


async def _follow(agent: NodeAgent, lease_s: float) -> None:
    await agent.hosts.first_is_lost(lease_s)
    agent.end(JobOutcome("failed", f"the run was out of reach for {lease_s:g} s (run.lease_s): this host leaves it"))


def _interrupt(agent: NodeAgent) -> None:
    if agent.over.done():
        agent.host.kill_all()
    agent.end(JobOutcome("interrupted", f"{agent.name} left the run"))


def _own_address(there: str) -> str:
    """The address of this host that leads to `there`: no packet is sent."""
    parts = urlsplit(there)
    family = socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((parts.hostname, parts.port or 1))
            return _spelt(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        raise LaunchError(
            f"this host has no way to {parts.hostname} ({_reason(error)}). Name its own address with --host."
        ) from error


def _checked(host: str) -> str:
    """`--host`, if it is an address of this host that another one could use. Raises LaunchError."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    except ValueError:
        raise LaunchError(f"--host {host} is no IP address. Name one of this host's own.") from None
    if address.is_unspecified:
        raise LaunchError(f"--host {host} is no address that another host could use. Name one of this host's own.")
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError as error:
        raise LaunchError(
            f"--host {host} is not an address of this host ({error.strerror}). Name one of its own."
        ) from error
    return _spelt(str(address))


def _spelt(address: str) -> str:
    """As an address of the bus holds it."""
    return f"[{address}]" if ":" in address else address


def _reason(error: OSError | UnicodeError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
