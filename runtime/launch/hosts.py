"""The hosts of a job: which of its actors runs on which, how many may leave, and what the first host asks of those that joined."""

import asyncio
import difflib
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from rubato.bus.errors import AskFailed
from rubato.bus.message import Request
from rubato.runtime.actor import Actor
from rubato.runtime.config import Config
from rubato.runtime.host import JobHost
from rubato.runtime.launch.agent_messages import MOST_ADDED, AddActors, Added, DrainActors, NotAdded, RestartActors, StopJob
from rubato.runtime.launch.host_list import name_key
from rubato.runtime.places import HostPlaces
from rubato.runtime.registry import LEASE_TTL_S, NODE, role_of

NODE_ROLE = role_of(NODE)

DRAIN_LIMIT_S = 25.0
"""A little longer than a kernel's own drain limit: an actor is killed only when its kernel hangs too."""
TELL_S = 5.0
SURE_S = 5.0
"""A host that is back by then was never lost: a link may break and be made anew."""


class JobHosts:
    """As `agent` knows them; `here` runs what is on its own host. Only the first host's agent knows all actors of the job."""

    def __init__(self, agent: Actor, job: Config, here: JobHost, places: HostPlaces, tell: Callable[[str, bool], None]) -> None:
        """`tell` says a sentence to the user, good news or not, while the job runs."""
        self._agent, self._job, self._here, self._places, self._tell = agent, job, here, places, tell
        self._given: dict[str, str] = {}
        """Actor → the host that joined and runs it; also while that one is out of reach, because it may come back with it."""
        self._pools: dict[str, str] = {}
        """Of those that were given."""
        self._lost: dict[str, float] = {}
        """Host → loop time at which it went out of reach."""
        self._told_gone: dict[str, float] = {}
        """The same of those that were told as gone."""
        self._said: set[str] = set()
        """Hosts that said so."""
        self._ended: set[str] = set()
        """Hosts whose process has ended, which their placer tells of."""
        self._leaving: set[str] = set()
        self._left: set[str] = set()
        """Actors that were drained: a request that is repeated, because its answer was lost, gets that answer again."""

    def others(self) -> list[str]:
        """The hosts in reach besides this one."""
        return [name for name in self._agent.peers(NODE_ROLE) if name != self._agent.name]

    def where(self, name: str) -> str:
        """The host that runs the actor `name`; empty where none does."""
        if name in self._here.names():
            return self._agent.name
        host = self._given.get(name, "")
        return host if self._agent.directory.find(name) is not None or host in self.others() else ""

    def leaves(self, host: str) -> None:
        """It said that it leaves."""
        self._said.add(host)

    def seen(self, joined: Sequence[str], left: Sequence[str]) -> None:
        """The first host tells its user of hosts that go out of reach, come back, or are gone."""
        if self._agent.name != NODE:
            return
        now = asyncio.get_running_loop().time()
        for host in (name for name in left if role_of(name) == NODE_ROLE and name not in (*joined, *self._ended)):
            self._lost[host] = now
            self._agent.spawn(self._tell_of(host, now), name=f"node.lost.{host}")
        for host in (name for name in joined if name in self._lost):
            away_s = now - self._lost.pop(host)
            if away_s > SURE_S:
                self._tell(f"{host} is back after {away_s:.0f} s{self._with(host)}", True)
        for host in (name for name in joined if name in self._told_gone):
            self._tell(f"{host} is back after all, after {now - self._told_gone.pop(host):.0f} s{self._with(host)}", True)

    def ended(self, host: str) -> None:
        """Its process has ended: it does not come back, and its placer says so."""
        self._ended.add(host)
        self._lost.pop(host, None)

    async def _tell_of(self, host: str, since: float) -> None:
        """What becomes of a host that is out of reach `since` then."""
        lease_s = self._job.run.lease_s
        if host not in self._said:
            await asyncio.sleep(SURE_S)
        if self._lost.get(host) != since:
            return
        if host in self._said:
            self._said.discard(host)
            self._lost.pop(host)
            self._tell(f"{host} left the run", True)
            return
        back = "It goes on where it can, and comes back by itself when the way to it is open"
        limit = f"after {lease_s:g} s (run.lease_s) it leaves the run"
        self._tell(f"{host} is out of reach{self._with(host)}. {back}; {limit}", False)
        await asyncio.sleep(lease_s)
        if self._lost.get(host) == since:
            self._told_gone[host] = self._lost.pop(host)
            self._tell(f"{host} is gone: it was out of reach for {lease_s:g} s{self._with(host)}", False)

    def _with(self, host: str) -> str:
        """The actors that were given to it."""
        names = [name for name, where in self._given.items() if where == host]
        return f", and with it {', '.join(names)}" if names else ""

    def expected(self) -> dict[str, str]:
        """Actor → its host: those that run, start or are started again, also on hosts that are out of reach and may come back."""
        there = {*self.others(), *self._lost}
        given = {name: host for name, host in self._given.items() if host in there}
        return {**dict.fromkeys(self._here.names(), self._agent.name), **given}

    def in_reach(self) -> dict[str, bool]:
        """Whether it is, of this host and of each that joined and has not left."""
        return {**dict.fromkeys(self._lost, False), **dict.fromkeys((self._agent.name, *self.others()), True)}

    def pool_of(self, name: str) -> str:
        """The pool of the actor `name`, where its role has pools."""
        return self._places.of(name).pool or self._pools.get(name, "")

    def running(self) -> list[str]:
        """The actors of all hosts in reach."""
        return [*self._here.names(), *(name for name in self._given if self.where(name))]

    def name_actors(self, request: AddActors) -> Added | NotAdded:
        """Names that no other actor has; those for a host that joined are noted as its own."""
        role, num = request.role, request.num
        if role not in self._job.actors:
            return NotAdded(f"{role} is not a role of this run. Its roles are {', '.join(self._job.actors)}.")
        if not 1 <= num <= MOST_ADDED:
            return NotAdded(f"can't add {num} actors: between 1 and {MOST_ADDED} at a time.")
        most, running = self._job.actor_class(role).most, [role_of(name) for name in self.running()].count(role)
        if running + num > most:
            return NotAdded(f"can't add {num} {role}: a run has at most {most}, and {running} runs already.")
        there = (*self._here.names(leaving=True), *self._given)
        taken = [int(n.rsplit("-", 1)[1]) for n in there if role_of(n) == role]
        first = max(taken, default=0) + 1
        names = tuple(f"{role}-{first + i}" for i in range(num))
        if request.node:
            self._given |= dict.fromkeys(names, request.node)
            self._pools |= dict.fromkeys(names, request.pool)
        return Added(names)

    def in_pool(self, pool: str) -> list[str]:
        """The actors of `pool`, wherever they run."""
        return [name for name in self.running() if pool == self.pool_of(name)]

    async def drain(self, names: Sequence[str], pool: str = "") -> Added | NotAdded:
        """Drain these actors and those of `pool` wherever they run, or refuse all; the name of a host that joined stands for its actors,
        and lets it go.
        """
        names = await self._by_node(names)
        if pool:
            if refused := self._no_pool(pool):
                return refused
            names = tuple(dict.fromkeys((*names, *self.in_pool(pool))))
        hosts = [name for name in names if name in self.others()]
        actors = [name for name in self.running() if name in names or self.where(name) in hosts]
        wanted = [name for name in names if name not in self._left or name in (*hosts, *actors)]
        if refused := self._unknown(wanted) or self._too_few(wanted, actors):
            return refused
        work = [self._let_go(host) for host in hosts]
        by_host = {host: on for host, on in self._by_host(actors).items() if host not in hosts}
        work += [self._on(host, DrainActors(tuple(on))) for host, on in by_host.items()]
        self._leaving |= set(actors)
        try:
            done = await self._all(names, work)
        finally:
            self._leaving -= set(actors)
        if isinstance(done, Added):
            self._left |= {*hosts, *actors}
            for name in actors:
                self._given.pop(name, None)
                self._pools.pop(name, None)
        return done

    async def restart(self, names: Sequence[str], *, held: bool = False) -> Added | NotAdded:
        """Drain these actors wherever they run and start them again there, or refuse all; with `held` those that something holds still."""
        if refused := self._unknown(names):
            return refused
        work = [self._on(host, RestartActors(tuple(on), held)) for host, on in self._by_host(names).items()]
        return await self._all(names, work)

    def followers(self) -> tuple[int, Collection[str]]:
        """The hosts that leave only after the first one's actors of lower orders than the first of these, and that order."""
        found = dict[str, int]()
        others = self.others()
        for name, host in self._given.items():
            role = role_of(name)
            if host in others and role in self._job.actors and (of := self._job.actor_class(role)).drains_across:
                found[host] = min(of.drain_order, found.get(host, of.drain_order))
        return min(found.values(), default=0), found

    async def stop(self, hosts: Collection[str], limit_s: float, *, now: bool) -> None:
        """Tell hosts that joined that the job is over, and give them `limit_s` to hand back what they hold; TELL_S more where one is silent.

        One acknowledges at once: past its lease it is not waited for.
        """
        ask_s = min(limit_s, LEASE_TTL_S) + TELL_S
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s + TELL_S):
                await self._all((), [self._ask(host, StopJob(now, "the run is over"), ask_s) for host in hosts])
                await self._gone(hosts, limit_s)

    # -- parts --------------------------------------------------------------------------------------------------

    async def _by_node(self, names: Sequence[str]) -> Sequence[str]:
        """With its node agent in place of a host's name in `launch.hosts`, such as far-1: of several in reach that of the newest."""
        if not self._job.launch.hosts or not {*names}.difference(self.running(), self.others(), self._left):
            return names
        named = {key.removeprefix(name_key("")): name.decode() for key, name in (await self._agent.store.scan(name_key(""))).items()}
        known = self._agent.directory.names()
        there = named.keys() & {*self.others(), *self._left}  # names of nodes that are gone stay in the Store
        nodes = {named[node]: node for node in sorted(there, key=lambda node: known.get(node, 0))}
        return [nodes.get(name, name) for name in names]

    def _by_host(self, names: Iterable[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(self.where(name), []).append(name)
        return found

    def _unknown(self, names: Sequence[str]) -> NotAdded | None:
        running = [*self.running(), *self.others()]
        unknown = [name for name in names if name not in running]
        if self._agent.name in unknown:
            return NotAdded(f"{self._agent.name} launched the run. {self._how_to_stop()}")
        told = f"{', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} not in this run, so nothing was done."
        return NotAdded(f"{told} Running: {', '.join(running)}.") if unknown else None

    def _no_pool(self, pool: str) -> NotAdded | None:
        pools = [name for spec in self._job.actors.values() for name in spec.pools]
        if pool in pools:
            return None
        near = difflib.get_close_matches(pool, pools, n=1)
        known = f"Its pools are {', '.join(pools)}." if pools else "It has none."
        return NotAdded(f"{pool} is not a pool of this run. {f'Did you mean {near[0]}?' if near else known}")

    def _too_few(self, names: Sequence[str], going: Sequence[str]) -> NotAdded | None:
        if self._agent.name != NODE:
            return None
        left = [role_of(name) for name in self.running() if name not in going and name not in self._leaving]
        for role in dict.fromkeys(map(role_of, going)):
            if left.count(role) < (least := self._job.actor_class(role).least):
                why = f"{', '.join(names)} can't be drained: a run needs at least {least} {role}"
                return NotAdded(f"{why}. {self._how_to_stop()}")
        return None

    def _how_to_stop(self) -> str:
        return f"Save and end the run with: rubato stop --run {self._agent.run.folder}"

    async def _all(self, names: Sequence[str], work: Iterable[Coroutine[Any, Any, str]]) -> Added | NotAdded:
        """Each of `work` returns why it could not be done, or nothing."""
        async with asyncio.TaskGroup() as tasks:
            done = [tasks.create_task(one) for one in work]
        refused = [task.result() for task in done if task.result()]
        return NotAdded(" ".join(refused)) if refused else Added(tuple(names))

    async def _on(self, host: str, request: DrainActors | RestartActors) -> str:
        """Have `host` do it, or do it where that is this one."""
        if host != self._agent.name:
            return await self._ask(host, request)
        act = self._here.drain if isinstance(request, DrainActors) else partial(self._here.restart, held=request.held)
        async with asyncio.TaskGroup() as tasks:
            for name in request.names:
                tasks.create_task(act(name, DRAIN_LIMIT_S))
        return ""

    async def _let_go(self, host: str) -> str:
        if refused := await self._ask(host, StopJob(reason=f"{host} was let go")):
            return refused
        left = await self._gone([host], DRAIN_LIMIT_S)
        return "" if left else f"{host} still drains its actors; it leaves when they have ended."

    async def _ask(self, host: str, request: Request[Any], limit_s: float = DRAIN_LIMIT_S + TELL_S) -> str:
        try:
            reply = await self._agent.ref(host).ask(request, timeout=limit_s)
        except AskFailed as error:
            return f"{host} did not answer: {error}."
        return reply.why if isinstance(reply, NotAdded) else ""

    async def _gone(self, hosts: Collection[str], limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                while set(hosts) & set(self.others()):
                    await self._agent.directory.change()
        except TimeoutError:
            return False
        return True
