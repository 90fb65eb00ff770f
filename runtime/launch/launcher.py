"""One host's part in a run: of the first host, which launches it (state, preparation, actors, outcome, report), and of one that joins."""

import asyncio
import ipaddress
import os
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from rubato.bus.address import bare, is_loopback, spelt
from rubato.bus.errors import AskFailed, BadAddress
from rubato.runtime.config import Config
from rubato.runtime.config.compose import load, part_named, pool_named, preflight, problems
from rubato.runtime.config.schema import schema_of
from rubato.runtime.errors import ConfigError, ExitCode, LaunchError
from rubato.runtime.host import RestartBudget
from rubato.runtime.importer import FOLDER as CODE
from rubato.runtime.importer import use
from rubato.runtime.kept_code import keep, pack, unpack
from rubato.runtime.kernel import free_bytes
from rubato.runtime.launch.agent import ASK_S, JobOutcome, NodeAgent
from rubato.runtime.launch.agent_messages import MOST_ADDED, AddActors, NotAdded
from rubato.runtime.launch.card import RunCard, RunKeys, command_for, find_keys, sources
from rubato.runtime.launch.children import is_ignored, on_signals, prepare, start_module
from rubato.runtime.launch.connection import RunAccess, reach
from rubato.runtime.launch.console import Console, settle, step_table
from rubato.runtime.launch.folder import ON_A_HOST, RunFolder, make_keys, write_keys
from rubato.runtime.launch.gate import GateClient, GateServer, way_through, way_to
from rubato.runtime.launch.host_list import HOSTS, name_key
from rubato.runtime.launch.placer import PlacedHosts, placed_hosts, placer_problems
from rubato.runtime.launch.processes import ProcessBackend, process_backend, process_host
from rubato.runtime.launch.shared import SharedScope, password_for, scope_of, write_shared
from rubato.runtime.launch.token import JoinToken, write_token
from rubato.runtime.node import allow_many_files
from rubato.runtime.observe.figures import STORE
from rubato.runtime.observe.log import configure, logger
from rubato.runtime.places import HostPlaces
from rubato.runtime.registry import LEASE_TTL_S, NODE, list_actors
from rubato.runtime.store import fitness
from rubato.runtime.store.embedded import EmbeddedRedis, ScopedGuest
from rubato.runtime.store.redis import RedisStore
from rubato.runtime.store.store import StoreUnavailable

REDIS_RESTART_S = (0.2, 2.0)
"""Pause before a dead embedded server is started again on its own append-only file: the first, and what it doubles up to."""
REDIS_RESTARTS, REDIS_WINDOW_S = 10, 300.0
"""More deaths than this within the window end the job: its file or its disk is broken."""

LOOK_S = 1.0
"""How often a disk that is full is looked at."""

FOLLOW_S = LEASE_TTL_S / 4
"""How often a host that joined looks for the first one, which is told as out of reach after LEASE_TTL_S."""

REACH_S = 15.0
"""For the first contact with the run: a wrong address is told then."""

EXIT_CODES = {"done": ExitCode.DONE, "failed": ExitCode.FAILED, "lost": ExitCode.FAILED, "interrupted": ExitCode.INTERRUPTED}


class Launcher:
    """Runs `config` in `folder`; `run` returns the exit code."""

    def __init__(
        self, config: Config, folder: Path, *, resume: bool, force: bool, update_code: bool = False, told: Sequence[str] = ()
    ) -> None:
        self._config, self._told = config, told
        self._folder = RunFolder(folder.resolve())
        self._resume, self._force, self._update_code = resume, force, update_code
        self._console = Console(step_table(config.report.console), config.hidden)
        self._clock = asyncio.get_running_loop().time
        self._keys: RunKeys | None = None
        self._agent: NodeAgent | None = None
        self._placed: PlacedHosts | None = None
        self._main: asyncio.Task[Any] | None = None
        self._hung_up = False
        """Whether it ends because its terminal was closed, with no other signal since."""

    async def run(self) -> int:
        """Raises CancelledError where a signal came before there was anything to drain."""
        allow_many_files()
        self._refuse_what_shows_now()
        self._main = asyncio.current_task()
        on_signals(self._interrupt)
        card = self._folder.open(
            resume=self._resume, force=self._force, model=self._config.model_path, update_code=self._update_code,
            same_sockets=self._config.state.shared,
        )  # fmt: skip
        try:
            self._keys = find_keys(self._folder.path)
            if self._keys is None and self._config.launch.hosts:  # they are brought by this launch: their user need not know a key
                self._keys = make_keys(self._folder.path)
            card.host = self._host_address()
            card.schema, card.sources = schema_of(self._config), sources()
            configure(self._folder.path / "logs" / f"{NODE}.jsonl", actor=NODE, hide=self._config.hidden)
            self._folder.config.touch(mode=0o600)  # state.url may hold a password
            self._folder.config.write_text(self._config.dump())
            keep(self._folder.path / CODE, self._config.tree())
            self._folder.write(card)  # killed from here on, its resume knows what to clear away
            self._console.say(f"rubato · run {self._folder.path.name} · {self._folder.path}")
            for sentence in filter(None, (self._folder.open_to_others(), *self._told, *self._unheard())):
                self._console.notice(sentence)
            async with AsyncExitStack() as stack:
                outcome = await self._serve(card, stack)
            self._folder.write_end(card)
        finally:
            self._console.close()
            self._folder.close()
        return await self._finish(outcome)

    def _refuse_what_shows_now(self) -> None:
        """Raises LaunchError or ConfigError before anything is made or written."""
        if wrong := self._folder.problems(resume=self._resume, force=self._force, model=self._config.model_path):
            raise LaunchError(wrong[0])
        self._keys = find_keys(self._folder.path)
        if self._config.state.shared and self._keys is None:
            raise LaunchError(f"state.shared needs the run's own keys. Make them with: {command_for(self._folder.path)}")
        self._host_address()
        if wrong := [
            *HostPlaces.here(self._config).problems(),
            *placer_problems(self._config),
            *fitness.problems(self._config.state),
            *problems(self._config, self._folder.path, replaced=self._force),
        ]:
            raise ConfigError("\n".join(wrong))

    async def _serve(self, card: RunCard, stack: AsyncExitStack) -> JobOutcome:
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        roles = [role for role in self._config.actors if self._config.members(role)]
        backend = await stack.enter_async_context(process_backend(self._folder.path, self._config, roles, tasks))
        await self._open_state(card, stack, tasks)
        self._folder.write(card)
        await _prepare(self._folder.path, self._console, [*self._config.brought_by, *self._config.prepare])
        preflight(self._config, self._folder.path)
        keys = self._keys.curve if self._keys else None
        connection = await stack.enter_async_context(reach(self._config, card, self._folder.path, keys))
        for record in await list_actors(connection.store):  # left over from a launcher that was killed
            if record.node == NODE:
                await connection.store.release(f"actor/{record.name}", record.incarnation)
        self._folder.commit()
        return await self._host(connection, backend, tasks)

    async def _host(self, connection: RunAccess, backend: ProcessBackend, tasks: asyncio.TaskGroup) -> JobOutcome:
        """Run the node agent and the actors until there is an outcome, then stop them."""
        began = self._clock()
        async with process_host(connection, self._console, backend, tasks) as agent, AsyncExitStack() as placed:
            shared, code = self._config.dump(shared=True).encode(), pack(self._folder.path / CODE)
            await connection.store.write({"config": shared, "code": code, HOSTS: None})
            self._agent = agent
            agent.start_actors()
            if self._config.launch.hosts:
                assert self._keys is not None, "hosts come by them"
                card = connection.card
                token = write_token(JoinToken(card.id, card.gate, card.state_url, self._keys))
                self._placed = await placed.enter_async_context(placed_hosts(self._config, self._folder.path, token, agent))
            agent.spawn(self._announce_ready(agent, began), name="launch.ready")
            outcome = await agent.over
            over = self._clock()
            await agent.stop(outcome.kind)
            card = connection.card
            card.stopped_s, card.checkpoint_s = round(self._clock() - over, 3), round(agent.saved_s, 3)
        return outcome

    async def _announce_ready(self, agent: NodeAgent, began: float) -> None:
        await agent.all_ready.wait()
        self._console.stage("actors", " ".join(agent.host.names()), self._clock() - began)

    async def _open_state(self, card: RunCard, stack: AsyncExitStack, tasks: asyncio.TaskGroup) -> None:
        """Reach the Store, or start one and keep it alive."""
        began, state = self._clock(), self._config.state
        if state.url:
            card.state_url = guest_url = str(self._config.tree()["state"]["url"])
            what = "redis given by state.url"
            for sentence in await fitness.examine(card.url, card.id, state):
                self._console.notice(sentence)
            if state.fails_over:
                from rubato.runtime.store import sentinel  # of no use to most

                stack.callback(tasks.create_task(sentinel.watch(card.url, self._failed_over), name="launch.failovers").cancel)
        else:
            password = self._keys.state_password if self._keys else ""
            guest = ScopedGuest(scope_of(card.id), password_for(password)) if state.shared else None
            durability = "always" if state.durability == "always" else "everysec"
            server = EmbeddedRedis(self._folder.path, durability, sockets=Path(card.sockets), password=password, guest=guest)
            card.state_url = await server.start()
            stack.push_async_callback(server.stop)
            stack.callback(tasks.create_task(self._keep_alive(server), name="launch.redis").cancel)  # before that stop
            what = server.describe()
            guest_url = server.guest_url if guest else ""
        if state.shared:
            write_shared(self._folder.path, SharedScope(scope_of(card.id), guest_url, state.durability == "replicated"))
        await self._open_gate(card, stack, tasks)
        self._console.stage("state", what, self._clock() - began)

    def _failed_over(self, before: str, now: str) -> None:
        logger("launch").warning("store_failed_over", before=before, now=now)
        self._console.notice(fitness.failed_over(self._config.state, before, now))

    def _host_address(self) -> str:
        """`bus.host`, if it is allowed. Raises LaunchError with what to do."""
        host = self._config.bus.host
        if bare(host) in ("0.0.0.0", "*", "::"):
            raise LaunchError(f"bus.host={host} is no address that another host could use. Name one of this host's own.")
        if host and not is_loopback(host) and self._keys is None and not self._config.launch.hosts:
            raise LaunchError(f"bus.host={host} lets other hosts in, which needs keys. Make them with: {command_for(self._folder.path)}")
        return host

    async def _open_gate(self, card: RunCard, stack: AsyncExitStack, tasks: asyncio.TaskGroup) -> None:
        """Let hosts that join reach the Store, where there is an address to come to and keys to know them by."""
        connect = way_to(card.url)
        if not card.host or self._keys is None or connect is None:
            card.gate = ""
            return
        port = self._config.bus.port or card.gate.rpartition(":")[2]
        where = f"tcp://{card.host}:{port}" if port else self._config.bus.bind(card.host)
        gate = GateServer(card.id, where, self._keys.curve, connect, tasks)
        try:
            await gate.start()
        except BadAddress as error:
            raise LaunchError(f"the gate for other hosts: {error}. Change bus.host, bus.port or bus.ports.") from error
        stack.push_async_callback(gate.close)
        card.gate = gate.address
        self._console.stage("gate", f"{card.gate} · token: rubato keys join-token --run {self._folder.path}")

    async def _keep_alive(self, server: EmbeddedRedis) -> None:
        """Start it again whenever it ends. Raises LaunchError when it ends again and again."""
        budget = RestartBudget(REDIS_RESTARTS, REDIS_WINDOW_S, REDIS_RESTART_S)
        while True:
            code = await server.wait()
            if not server.has_room():
                logger("launch").warning("redis_without_room", code=code)
                await self._room_for(server)
                budget = RestartBudget(REDIS_RESTARTS, REDIS_WINDOW_S, REDIS_RESTART_S)
            plan = budget.died(self._clock())
            logger("launch").warning("redis_died", code=code, attempt=plan.attempt)
            if plan.delay_s is None:
                raise LaunchError(
                    f"the embedded redis ended {plan.attempt} times (last with {code}). Log: {self._folder.path}/state/redis.log"
                )
            self._console.notice(f"the embedded redis died ({code}); restarting it on its append-only file")
            await asyncio.sleep(plan.delay_s)
            try:
                await server.start()
            except LaunchError as error:  # it ended while it started: counted above
                logger("launch").warning("redis_not_back", error=str(error))
            else:
                self._console.notice("the embedded redis is back", good=True)

    async def _room_for(self, server: EmbeddedRedis) -> None:
        """Return once its disk has room. That it has the agent tells, once the Store answers."""
        state = self._folder.path / "state"
        while not server.has_room():
            if self._agent is not None:
                self._agent.room(STORE, str(state), free_bytes(state))
            await asyncio.sleep(LOOK_S)

    def _unheard(self) -> list[str]:
        """How the run is stopped where Ctrl-C does not reach it."""
        if not is_ignored(signal.SIGINT):
            return []
        stop = shlex.join(["rubato", "stop", "--run", str(self._folder.path)])
        return [f"this launch was started with SIGINT ignored: stop it with {stop}, or kill -TERM {os.getpid()}"]

    def _interrupt(self, number: signal.Signals) -> None:
        """The first signal saves, the next one ends everything. Of a closed terminal several SIGHUPs may come, which are one, and no haste."""
        agent = self._agent
        over = agent is not None and agent.over.done()
        if number == signal.SIGHUP and (over or self._hung_up):
            return
        again, self._hung_up = over and not self._hung_up, number == signal.SIGHUP
        if agent is None:
            assert self._main is not None, "signals are caught from run() on"
            self._main.cancel()
        elif again:
            agent.host.kill_all()
            if self._placed is not None:
                self._placed.host.kill_all()
        else:
            resume = shlex.join(["rubato", "launch", "--resume", str(self._folder.path)])
            agent.end(JobOutcome("interrupted", f"stopped. Go on with: {resume}"))
            self._console.notice("stopping: what runs is drained and saved; once more to stop now")

    async def _finish(self, outcome: JobOutcome) -> int:
        from rubato.runtime.observe.timeline import merge_traces  # of no use before

        if outcome.kind == "failed":
            print(self._config.hidden(outcome.sentence), file=sys.stderr)  # noqa: T201 - the sentence for the user
        elif outcome.kind == "interrupted":
            self._console.say(outcome.sentence)
        try:
            await asyncio.get_running_loop().run_in_executor(None, merge_traces, self._folder.path)
        except OSError as error:
            self._console.notice(f"trace.json could not be written: {error.strerror}")
        if self._config.report.finish and outcome.kind == "done":
            await asyncio.get_running_loop().run_in_executor(None, settle)
            process = await start_module(self._config.report.finish, str(self._folder.path))
            await process.wait()
        return EXIT_CODES[outcome.kind]


class Part(NamedTuple):
    """`num` actors of `role`, in `pool` where it has several. Without a role `pool` names a pool, or a role that has none."""

    role: str
    num: int
    pool: str = ""


class Joiner:
    """Brings `parts` into the run that `token` opens; `run` returns the exit code."""

    def __init__(self, token: JoinToken, parts: Sequence[Part], folder: Path, host: str = "", overrides: tuple[str, ...] = ()) -> None:
        self._token, self._parts = token, parts
        self._folder = RunFolder(folder.resolve(), words=ON_A_HOST)
        self._host = host
        self._overrides = overrides

    async def run(self) -> int:
        """Raises LaunchError, before anything is written, for what this host alone can tell is wrong."""
        for part in self._parts:
            if not 1 <= part.num <= MOST_ADDED:
                raise LaunchError(f"can't add {part.num} actors: between 1 and {MOST_ADDED} at a time.")
        host = _checked(self._host) if self._host else _own_address(self._token.reached_at)
        allow_many_files()
        main = asyncio.current_task()
        assert main is not None
        on_signals(lambda _: main.cancel())
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
        card.schema, card.sources = schema_of(config), sources()
        if config.host.listen:
            from rubato.runtime.launch.endpoint import check_listen  # for hosts alone that listen

            check_listen(config.host.listen)  # before the run hears of this host
        connection = await stack.enter_async_context(reach(config, card, self._folder.path, self._token.keys.curve))
        card.node = f"node-{await connection.store.increment('nodes', at_least=2)}"
        configure(self._folder.path / "logs" / f"{card.node}.jsonl", actor=card.node, hide=config.hidden)
        self._parts = [_resolved(part, config) for part in self._parts]
        places = HostPlaces.here(config)
        for role, num, pool in self._parts:
            if why := places.why_not(role, pool, num):
                raise LaunchError(why)
            for index in range(num):
                places.take(f"{pool or role}-{index}", role, pool)
            config.actor_class(role).check_host(config.actor_config(role, pool))
        console = Console(step_table(config.report.console), config.hidden)
        if said := self._folder.open_to_others():
            console.notice(said)
        missing = config.model_path and not (self._folder.path / config.model_path).exists()
        await _prepare(self._folder.path, console, [*config.brought_by, *(config.prepare if missing else ())])  # as the first host did
        for role, _, pool in self._parts:
            config.actor_class(role).preflight(config.actor_config(role, pool), self._folder.path)
        return await self._host_actors(connection, tasks, console)

    async def _host_actors(self, connection: RunAccess, tasks: asyncio.TaskGroup, console: Console) -> JobOutcome:
        """Get names from the first host, start the actors, and stay until there is an outcome.

        Only a host that is let in keeps the job's keys and the way to its Store, for the actors that it starts.
        """
        folder, roles = self._folder.path, [part.role for part in self._parts]
        async with (
            process_backend(folder, connection.config, roles, tasks) as backend,
            process_host(connection, console, backend, tasks) as agent,
        ):
            agent.spawn(follow(agent, connection.config.run.lease_s), name="follow_run")
            try:
                names = {name: part.pool for part in self._parts for name in await self._names_for(agent, part)}
                if name := connection.config.host.name:
                    await connection.store.write({name_key(agent.name): name.encode()})
                write_keys(self._folder.path, self._token.keys)
                self._folder.write(connection.card)
                self._folder.commit()
                on_signals(lambda number: _interrupt(agent, number))
                for name, pool in names.items():
                    agent.start(name, pool)
                console.say(f"{agent.name} joined {self._token.run_id} with {', '.join(names)} · {self._folder.path}")
                return await agent.over
            finally:
                await agent.stop("lost" if agent.over.done() and agent.over.result().kind == "lost" else "interrupted")

    async def _names_for(self, agent: NodeAgent, part: Part) -> tuple[str, ...]:
        try:
            reply = await agent.ref(NODE).ask(AddActors(part.role, part.num, agent.name, part.pool), timeout=ASK_S)
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
        store = RedisStore(card.url, card.id)
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
            raise LaunchError(f"the run {card.id} has no config yet: it is still starting, or the token is another run's.")
        self._folder.config.touch(mode=0o600)
        self._folder.config.write_bytes(text)
        kept = self._folder.path / CODE
        unpack(code or pack(kept), kept)
        use(kept)
        config = load(self._folder.config, [f"bus.host='{card.host}'", *self._overrides])
        keep(kept, config.tree())
        self._folder.config.write_text(config.dump())
        return config


def _resolved(part: Part, config: Config) -> Part:
    """With its role and its pool, of those that the run has. Raises LaunchError or ConfigError."""
    if not part.role:
        found = part_named(config, part.pool)
        return Part(found.role, part.num, found.name)
    if part.role not in config.actors:
        raise LaunchError(f"{part.role} is not a role of this run. Its roles are {', '.join(config.actors)}.")
    return part._replace(pool=pool_named(config, part.role, part.pool))


async def _prepare(folder: Path, console: Console, modules: Sequence[str]) -> None:
    """What `modules` make in the run folder; a module finds what is there. Raises LaunchError where one fails."""
    clock = asyncio.get_running_loop().time
    for target in modules:
        began = clock()
        what = await prepare(target, folder, console.preparing)
        if what:
            console.stage("model", what, clock() - began)


async def follow(agent: NodeAgent, lease_s: float) -> None:
    """Leave once the first host's agent was not to be found for `lease_s`, which no call to the Store outlasts. A shorter absence is told
    while it lasts.
    """
    clock = asyncio.get_running_loop().time
    seen, told = clock(), False
    while (away_s := clock() - seen) <= lease_s:
        await asyncio.sleep(FOLLOW_S)
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(max(FOLLOW_S, seen + lease_s - clock())):
                there = await agent.store.held(f"actor/{NODE}")
            if there is not None:
                seen = clock()
                if told:
                    agent.screen.notice(f"the run is in reach again after {away_s:.0f} s", good=True)
                told = False
        if not told and clock() - seen > LEASE_TTL_S:
            told = True
            agent.screen.notice(f"the run is out of reach: this host leaves it after {lease_s:g} s (run.lease_s)")
    agent.end(JobOutcome("lost", f"the run was out of reach for {lease_s:g} s (run.lease_s): this host leaves it"))


def _interrupt(agent: NodeAgent, number: signal.Signals) -> None:
    if agent.over.done() and number != signal.SIGHUP:
        agent.host.kill_all()
    agent.end(JobOutcome("interrupted", f"{agent.name} left the run"))


def _own_address(there: Sequence[str]) -> str:
    """The address of this host that leads to one of these URLs: no packet is sent. Raises LaunchError, of the last."""
    *others, last = there
    for each in others:
        with suppress(LaunchError):
            return _address_to(each)
    return _address_to(last)


def _address_to(there: str) -> str:
    parts = urlsplit(there)
    family = socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((parts.hostname, parts.port or 1))
            return spelt(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LaunchError(f"this host has no way to {parts.hostname} ({reason}). Name its own address with --host.") from error


def _checked(host: str) -> str:
    """`--host`, if it is an address of this host that another one could use. Raises LaunchError."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else bare(host))
    except ValueError:
        raise LaunchError(f"--host {host} is no IP address. Name one of this host's own.") from None
    if address.is_unspecified:
        raise LaunchError(f"--host {host} is no address that another host could use. Name one of this host's own.")
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError as error:
        raise LaunchError(f"--host {host} is not an address of this host ({error.strerror}). Name one of its own.") from error
    return spelt(str(address))
