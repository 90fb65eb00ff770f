"""HostPlacer: the seam through which a launch gets further hosts, from an engine that has them (a Ray cluster, a Slurm allocation).

What the engine starts on a host is one command, which joins that host to the run. From then on it is a host like any other that joined:
the bus carries its data, its own node agent supervises its actors, and no actor knows who placed it. The placer knows only that command.
Of the config it is named by `launch.backend`, and of each kind of host by `launch.hosts.NAME`; without hosts no placer is imported.
"""

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import structs

from rubato.runtime.config import Config
from rubato.runtime.config.compose import part_named
from rubato.runtime.errors import ConfigError, ExitCode, LaunchError, RubatoError, said_by
from rubato.runtime.host import Death, Ending, Incarnation, JobHost, RestartBudget
from rubato.runtime.importer import check_module, load_configured
from rubato.runtime.launch.agent import JobOutcome, NodeAgent
from rubato.runtime.launch.host_list import HOSTS, HostRecord, HostState, name_key, record_key
from rubato.runtime.observe.log import logger
from rubato.runtime.registry import role_of
from rubato.runtime.store.store import StoreUnavailable

BACKENDS = {
    "here": "rubato.runtime.launch.here:ThisHost",
    "ray": "rubato.runtime.launch.ray.placer:RayPlacer",
    "slurm": "rubato.runtime.launch.slurm.placer:SlurmPlacer",
}
"""Short names of `launch.backend`; what is none of them is an import path."""

RESTARTS, WINDOW_S = 5, 300.0
"""Hosts lost in place of one within the window, after which the job fails: as an actor's `restarts`."""

WRITE_AGAIN_S = 1.0
"""Between two attempts to write down what became of hosts."""

LEAVE_S = 10.0
"""For the hosts that are still there when the job is over; each is killed past it."""
GIVE_BACK_S = 120.0
"""For a placer to give back one host, or at the end of the run all that are left."""
LET_GO_S = 20.0
"""For what a placer still does once it is cancelled, longer than any of ours: past it the launcher goes on without it."""

ResultT = TypeVar("ResultT")


# -- the seam ----------------------------------------------------------------------------------------------------


class HostSpec(msgspec.Struct, frozen=True):
    """One kind of host. A host of it brings all of `pools` and `roles`, and has what their processes need together."""

    name: str
    """Name in the config; the hosts of it are `name`-1 to `name`-`count`."""
    count: int
    """Hosts alike that the run wants in all: an engine may set room aside for them at once."""
    pools: Mapping[str, int] = {}
    """Pool → processes of it on each host."""
    roles: Mapping[str, int] = {}
    """Role without pools → processes of it on each host."""
    gpus: int = 0
    cpus: int = 0
    labels: tuple[str, ...] = ()
    """The host must be one that all of these are true of."""


class JoinCommand(NamedTuple):
    """`python -m module arguments…`, run in a folder that may be written to, which joins a host to the run and stays until it leaves.

    `token` is the first line of its stdin: a secret, for no command line and no log. SIGTERM makes it drain its actors and end with
    INTERRUPTED. Its last line on stderr is the sentence to hand on.
    """

    module: str
    arguments: tuple[str, ...]
    token: str


class NotPlaced(RubatoError):
    """There can be no such host; the sentence says why, and what to change."""


class PlacedHost(Protocol):
    """One host, from when its command was started."""

    @property
    def id(self) -> str:
        """Name that the engine's own commands have for it."""
        ...

    async def ended(self) -> Ending:
        """Return once its command has ended, or it is lost with its node (`Ending.lost`); any number may wait, before or after."""
        ...

    def signal(self, number: signal.Signals) -> None:
        """Hand a signal on to the command. Nothing happens once that has ended, or where it is out of reach."""
        ...

    async def release(self) -> None:
        """End what is left of it, and give the host back to the engine: `ended` returns too then. A second call does nothing.

        It is cancelled after GIVE_BACK_S, and then the host counts as lost.
        """
        ...


class HostPlacer(Protocol):
    """Made as `Placer(config, folder)`, in the launcher's process, of the job's Config and the run's folder.

    It must not hold up the launcher's loop: what blocks, or what is heavy to import, belongs into a process of its own.
    """

    async def place(self, spec: HostSpec, join: JoinCommand) -> PlacedHost:
        """Start `join` on one more host of `spec`, and return once it runs. Asked anew for each host, and for one in place of each lost one.

        Waits for a host that may still come: the launcher cancels it after `launch.place_timeout_s`, and then nothing of the request may
        be left with the engine; one that has not ended LET_GO_S later is not waited for. Raises NotPlaced where none can come.
        """
        ...

    async def close(self) -> None:
        """The run is over: release every host that is left, within GIVE_BACK_S.

        What it placed must also end where the launcher is killed, and close never called.
        """
        ...


# -- the hosts of a config -----------------------------------------------------------------------------------------


def specs_of(config: Config) -> dict[str, HostSpec]:
    """Specs of hosts that the config's `launch.hosts` asks for, by name."""
    found: dict[str, HostSpec] = {}
    for name, asked in config.launch.hosts.items():
        members = {part: (part_named(config, part), num) for part, num in asked.pools.items()}
        sections = [(config.actors[p.role].pools[p.name], num) for p, num in members.values() if p.name]
        found[name] = HostSpec(
            name,
            asked.count,
            {pool: num for pool, (p, num) in members.items() if p.name},
            {role: num for role, (p, num) in members.items() if not p.name},
            max(asked.gpus, sum(section.gpus * num for section, num in sections)),
            max(asked.cpus, sum(section.cores * num for section, num in sections)),
            tuple(dict.fromkeys((*asked.labels, *(label for section, _ in sections for label in section.labels)))),
        )
    return found


def placer_problems(config: Config) -> list[str]:
    """A sentence where `launch.backend` is needed and names no placer; imports nothing of a user's."""
    if not config.launch.hosts:
        return []
    if wrong := _too_many(config):
        return wrong
    try:
        check_module(_target(config), key="launch.backend")
    except ConfigError as error:
        return [f"{error} Or name one of {', '.join(BACKENDS)}."]
    if config.launch.backend in BACKENDS:  # one of a user's is not imported here
        look = getattr(load_configured(_target(config), key="launch.backend"), "problems", None)
        return look(config) if look else []
    return []


def _too_many(config: Config) -> list[str]:
    """A sentence for each role of which hosts would bring more than a run may have."""
    wanted = Counter[str]()
    for asked in config.launch.hosts.values():
        for part, num in asked.pools.items():
            wanted[part_named(config, part).role] += asked.count * num
    return [
        f"launch.hosts brings {num} {role} beside {here} of the launching host: a run has at most {most}"
        for role, num in wanted.items()
        if (here := len(config.members(role))) + num > (most := config.actor_class(role).most)
    ]


def _target(config: Config) -> str:
    return BACKENDS.get(config.launch.backend, config.launch.backend)


def join_command(spec: HostSpec, name: str, token: str) -> JoinCommand:
    """Command that the host `name` of `spec` runs."""
    brings = ",".join(f"{name}={num}" for name, num in {**spec.pools, **spec.roles}.items())
    labels = [f"host.labels={json.dumps(spec.labels)}"] if spec.labels else []
    return JoinCommand("rubato.runtime.cli", ("add", f"host.name={name}", *labels, "--pools", brings, "--join", "-"), token)


@asynccontextmanager
async def placed_hosts(config: Config, folder: Path, token: str, agent: NodeAgent) -> AsyncGenerator["PlacedHosts"]:
    """The hosts of the config come and are kept in the run during the block; at its end none is left."""
    made = load_configured(_target(config), key="launch.backend")
    try:
        placer: HostPlacer = made(config, folder)
    except RubatoError:
        raise
    except Exception as error:
        raise LaunchError(f"launch.backend={config.launch.backend} can't be made: {said_by(error)}") from error
    hosts = PlacedHosts(placer, specs_of(config), token, agent, config.launch.place_timeout_s)
    try:
        hosts.begin()
        yield hosts
        await hosts.end()
    finally:
        with _told_only("close"):
            await _bounded(placer.close(), GIVE_BACK_S, "close")


class _TooLate(RubatoError):
    """It was cancelled at its limit, and ended."""


async def _bounded(work: Coroutine[Any, Any, ResultT], limit_s: float | None, what: str) -> ResultT:
    """The result of `work` of a placer. After `limit_s`, or once this is cancelled, `work` is cancelled and has LET_GO_S to end.

    Raises _TooLate where that limit ended it, and NotPlaced where nothing did: it is left to itself then, and no end of this process waits
    for it. So it is in no TaskGroup: that would wait for it for ever.
    """
    task = asyncio.get_running_loop().create_task(work, name=f"host.placer.{what}")
    cancelled = False
    try:
        await asyncio.wait([task], timeout=limit_s)
    except asyncio.CancelledError:
        cancelled = True
    if is_late := not task.done():
        task.cancel()
        try:
            await asyncio.wait([task], timeout=LET_GO_S)
        finally:
            if not task.done():
                asyncio.tasks._unregister_task(task)  # pyright: ignore - in asyncio's page on extending it; a loop waits for others as it closes
    if not task.done():
        raise NotPlaced(f"{what}() of launch.backend does not let go: it was cancelled, and did not end within {LET_GO_S:g} s")
    if is_late and task.cancelled() and not cancelled:
        raise _TooLate(f"{what}() of launch.backend did not end within {limit_s:g} s")
    return task.result()


@contextmanager
def _told_only(what: str) -> Generator[None]:
    """A user's placer that raises there spoils no run."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        logger("host").warning("placer_raised", what=what, error=said_by(error))


class PlacedHosts:
    """Keeps the hosts of `specs` in the run: one that died or was lost is asked for anew, one that left in order is not.

    A host that can't be placed at all ends the job. It is the back end of a JobHost, whose names are those of hosts.
    """

    def __init__(self, placer: HostPlacer, specs: Mapping[str, HostSpec], token: str, agent: NodeAgent, limit_s: float) -> None:
        self._placer, self._specs, self._agent, self._limit_s = placer, specs, agent, limit_s
        self._placing: set[asyncio.Task[Incarnation]] = set()
        self._token = token
        self._records: dict[str, HostRecord] = {}
        self._unwritten: dict[str, bytes] = {}
        self._writes = False
        left = frozenset((ExitCode.DONE, ExitCode.INTERRUPTED))
        self.host = JobHost(self, agent.spawn, self._died, leaves_by=left)

    def begin(self) -> None:
        """Ask for every host."""
        backend = self._agent.job.launch.backend
        for spec in self._specs.values():
            for index in range(spec.count):
                self._records[f"{spec.name}-{index + 1}"] = HostRecord(backend, {**spec.pools, **spec.roles})
        self._write({HOSTS: msgspec.json.encode(list(self._records))})
        for name in self._records:
            self.host.start(name, RestartBudget(RESTARTS, WINDOW_S))

    async def end(self) -> None:
        """End with the run: asks for hosts that still wait get none, and hosts that are left get the order to go."""
        for placing in self._placing:
            placing.cancel()
        await self.host.drain_all(LEAVE_S, by_rank=False)

    async def start(self, name: str) -> Incarnation:
        """The host `name`, once it was placed; where it can't be, one that has ended already and says why."""
        placing = self._agent.spawn(self._place(name), name=f"host.place.{name}")
        self._placing.add(placing)
        try:
            await asyncio.wait([placing])
        finally:
            self._placing.discard(placing)
        return _Unplaced("the run is over") if placing.cancelled() else placing.result()

    async def _place(self, name: str) -> Incarnation:
        spec = self._specs[role_of(name)]
        self._becomes(name, "asked")
        try:
            host = await _bounded(self._placer.place(spec, join_command(spec, name, self._token)), self._limit_s, "place")
            engine_id = _id_of(host)
        except _TooLate:
            return _Unplaced(f"none came within {self._limit_s:g} s (launch.place_timeout_s)")
        except Exception as error:  # noqa: BLE001 - NotPlaced, or what a user's placer raises: no host either way
            return _Unplaced(said_by(error))
        logger("host").info("placed", host=name, id=engine_id, pools=dict(spec.pools), roles=dict(spec.roles))
        self._becomes(name, "placed", engine_id)
        return _Hosted(host, self._agent.spawn)

    async def _died(self, death: Death) -> None:
        self._becomes(death.name, "left" if death.expected else "lost")
        if not death.expected:
            await self._tell_ended(death.name)
        if death.expected or self._agent.over.done():
            return
        # A process that was killed said nothing of its end: the last that it said was of something else.
        said = "" if (death.ending.code or 0) < 0 else death.ending.sentence
        because = f": {said}" if said else ""
        if death.restart_in_s is None:
            times = f" after {death.attempt} attempts" if death.attempt > 1 else ""
            sentence = f"the host {death.name} can't be had{times} ({death.ending.how}){because}"
            self._agent.end(JobOutcome("failed", sentence, death.name))
            return
        again = f"asking for another in {death.restart_in_s:.1f} s ({death.attempt} of {death.limit})"
        self._agent.screen.notice(f"the host {death.name} is gone ({death.ending.how}) after {death.after_s:.1f} s{because}; {again}")

    async def _tell_ended(self, name: str) -> None:
        """The node agents that had this name end with its process; while the Store is away they are out of reach, for all that is known."""
        with suppress(StoreUnavailable):
            for key, host in (await self._agent.store.scan(name_key(""))).items():
                if host.decode() == name:
                    self._agent.hosts.ended(key.removeprefix(name_key("")))

    def _becomes(self, name: str, state: HostState, engine_id: str = "") -> None:
        """As `rubato hosts` shows it."""
        self._records[name] = record = structs.replace(self._records[name], state=state, id=engine_id)
        self._write({record_key(name): msgspec.json.encode(record)})

    def _write(self, changes: Mapping[str, bytes]) -> None:
        self._unwritten |= changes
        if not self._writes:
            self._writes = True
            self._agent.spawn(self._write_all(), name="host.records")

    async def _write_all(self) -> None:
        """One write after another, so that the newest of a host stands; again while the Store is away."""
        while self._unwritten and not self._agent.over.done():
            changes, self._unwritten = self._unwritten, {}
            try:
                await self._agent.store.write(changes)
            except StoreUnavailable:
                self._unwritten = changes | self._unwritten
                await asyncio.sleep(WRITE_AGAIN_S)
        self._writes = False


def _id_of(host: PlacedHost) -> str:
    """Raises LaunchError for what is none: a user's placer may return anything."""
    if not isinstance(engine_id := getattr(host, "id", None), str):
        raise LaunchError(f"place() of launch.backend returned {host!r:.100}, which is no PlacedHost: its id is no text. Mend the placer.")
    return engine_id


class _Hosted:
    """An Incarnation: a placed host, which is given back when it has ended."""

    def __init__(self, host: PlacedHost, spawn: Callable[..., "asyncio.Task[Any]"]) -> None:
        self._host, self._spawn = host, spawn
        self._is_watched, self._is_killed, self._holds_on = True, False, False
        self._stay = spawn(self._ending(), name=f"host.{host.id}")

    def drain(self) -> None:
        with _told_only("signal"):
            self._host.signal(signal.SIGTERM)

    def kill(self) -> None:
        self._spawn(self._force(), name=f"host.release.{self._host.id}")

    def is_stopped(self) -> bool:
        return False

    async def ended(self) -> Ending:
        return await asyncio.shield(self._stay)

    async def _ending(self) -> Ending:
        try:
            return await _bounded(self._host.ended(), None, "ended")
        except asyncio.CancelledError:
            if not self._is_killed:
                raise
            return Ending("lost", "it was killed, and its placer does not say that it ended", lost=True)
        except Exception as error:  # noqa: BLE001 - a user's placer no longer knows: the host is as good as gone
            return Ending("lost", said_by(error), lost=True)
        finally:
            self._is_watched = False
            await self._release()

    async def _force(self) -> None:
        """Have it ended, whether or not its placer says so."""
        await self._release()
        await asyncio.wait([self._stay], timeout=LET_GO_S)
        if self._is_watched:
            self._is_killed = True
            self._stay.cancel()

    async def _release(self) -> None:
        with _told_only("release"):
            if self._holds_on:
                return
            try:
                await _bounded(self._host.release(), GIVE_BACK_S, "release")
            except (_TooLate, NotPlaced):
                self._holds_on = True
                raise


class _Unplaced:
    """An Incarnation that never was. The first time that counts for good."""

    def __init__(self, why: str) -> None:
        self._why = why

    def drain(self) -> None: ...

    def kill(self) -> None: ...

    def is_stopped(self) -> bool:
        return False

    async def ended(self) -> Ending:
        return Ending("not placed", self._why, permanent=True)
