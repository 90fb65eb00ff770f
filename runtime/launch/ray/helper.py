"""`python -m rubato.runtime.launch.ray.helper`: the process beside the launcher that speaks to Ray, and alone imports it.

It takes orders from its stdin and reports on its stdout (lines.py). Its actors and placement groups are those of its driver: where it
ends, however that is, Ray ends them.
"""

import asyncio
import importlib
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from rubato.bus.address import bare, is_loopback
from rubato.runtime.errors import ExitCode, RubatoError, first_cause
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
from rubato.runtime.launch.ray.wants import RayNode, bundle_of, selector_of, why_none

REACH_S = 5.0
"""For the address of a cluster to take a connection."""

LOOK_S = 0.2
"""Period of looking for what Ray tells by no event."""

LEFT_S = 20.0
"""For what an earlier launcher left to be gone."""

RENEW_S = 10.0
KILL_S = 3.0
"""For a command to end by SIGKILL, before its actor does."""

LONGEST_WHY = 500
SENTENCE = 300


class Unusable(RubatoError):
    """The cluster can't be used; the sentence says why."""


class Cluster:
    """The Ray cluster of this process's driver. Its methods block, and are for threads beside the loop."""

    def __init__(self, order: Connect) -> None:
        """Raises Unusable."""
        self.ray: Any = importlib.import_module("ray")
        self._namespace = order.namespace
        self._seen: dict[str, RayNode] = {}
        address = _address(order.address)
        options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
        try:
            self.ray.init(address, namespace=order.namespace, log_to_driver=False, logging_level="ERROR", **options)
        except (Exception, SystemExit) as error:
            raise Unusable(f"the Ray cluster at {_told(order.address, address)} can't be used: {_line(error)}") from error

    def nodes(self) -> dict[str, RayNode]:
        """Those that are alive, by id."""
        found = {row["NodeID"]: RayNode.of(row) for row in self.ray.nodes() if row["Alive"]}
        self._seen |= found
        return found

    def why_none(self, order: Place) -> str:
        """Of a node that was there before another may come in its place, so it counts."""
        self.nodes()
        return why_none(order.spec, list(self._seen.values()))

    def left(self) -> tuple[list[str], list[str]]:
        """Names of the actors and of the placement groups of this run."""
        actors = [str(name) for name in self.ray.util.list_named_actors()]
        table = self.ray.util.placement_group_table()
        prefix = f"{self._namespace}/"
        return actors, [row["name"] for row in table.values() if row["state"] != "REMOVED" and row["name"].startswith(prefix)]

    def clear(self) -> None:
        """End by name what is left of this run."""
        actors, groups = self.left()
        for name in actors:
            with suppress(ValueError):  # it is gone
                self.ray.kill(self.ray.get_actor(name))
        for name in groups:
            with suppress(ValueError):
                self.ray.util.remove_placement_group(self.ray.util.get_placement_group(name))

    def ask(self, order: Place, made: list[Any]) -> None:
        """A placement group for the host, and its actor, which is pending until the group has a node. Both are put into `made`."""
        from rubato.runtime.launch.ray.actor import HostActor

        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        selector = selector_of(order.spec)
        group = self.ray.util.placement_group(
            [bundle_of(order.spec)], name=f"{self._namespace}/{order.name}", bundle_label_selector=[selector] if selector else None
        )
        made.append(group)
        made.append(
            self.ray.remote(HostActor)
            .options(
                name=order.name, max_restarts=0, max_task_retries=0, num_cpus=0, num_gpus=order.spec.gpus,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            ).remote()
        )  # fmt: skip

    def end(self, made: list[Any]) -> None:
        for actor in made[1:]:
            self.ray.kill(actor)
        for group in made[:1]:
            self.ray.util.remove_placement_group(group)


def _address(given: str) -> str:
    """The one for ray.init, where something listens. Raises Unusable."""
    address = os.environ.get("RAY_ADDRESS", "") or "auto" if given == "auto" else given
    if address in ("auto", "local"):
        return address
    scheme, _, place = address.rpartition("://")
    host, _, port = place.rpartition(":")
    if scheme not in ("", "ray") or not host or not port.isdigit():
        what = f"{_told(given, address)} is no address of a Ray cluster"
        raise Unusable(f"{what}. Use HOST:PORT on one of its nodes, ray://HOST:10001 elsewhere, auto or local.")
    try:
        socket.create_connection((bare(host), int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Unusable(f"no Ray cluster answers at {_told(given, address)} ({reason}). Is it up, and is this its address?") from error
    return address


def _told(given: str, address: str) -> str:
    """The address with where it comes from."""
    return f"launch.address={given}" if given == address else f"RAY_ADDRESS={address}"


def _why_not(name: str, error: BaseException) -> str:
    if isinstance(error, Unusable):
        return str(error)
    if "No module named 'rubato" in str(error):
        return "a node of the Ray cluster has no rubato among its packages: install on each node what the launching host has."
    return f"Ray can't start {name}: {_line(error)}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:LONGEST_WHY] or type(error).__name__


class Helper:
    """Follows orders until there are none; `say` reports."""

    def __init__(self, cluster: Cluster, connect: Connect, say: Callable[[Report], None], tasks: asyncio.TaskGroup) -> None:
        self._cluster, self._connect, self._say, self._tasks = cluster, connect, say, tasks
        self._hosts: dict[int, Host] = {}

    def follow(self, order: Order) -> None:
        if isinstance(order, Place):
            host = self._hosts[order.number] = Host(self._cluster, self._connect, order, self._say, self._tasks)
            host.life.add_done_callback(lambda _: self._hosts.pop(order.number, None))
        elif isinstance(order, Signal) and order.number in self._hosts:
            self._hosts[order.number].signal(order.signal)
        elif isinstance(order, Release):
            self._tasks.create_task(self._release(order.number))

    def release_all(self) -> None:
        for number in tuple(self._hosts):
            self._tasks.create_task(self._release(number))

    async def _release(self, number: int) -> None:
        if host := self._hosts.get(number):
            await host.release()
        self._say(Released(number))


class Host:
    """One host, from the wish for it to its end."""

    def __init__(self, cluster: Cluster, connect: Connect, order: Place, say: Callable[[Report], None], tasks: asyncio.TaskGroup) -> None:
        self._cluster, self._connect, self._order, self._say = cluster, connect, order, say
        self._actor: Any = None
        self.life = tasks.create_task(self._live())

    def signal(self, number: int) -> None:
        if self._actor is not None:
            self._actor.signal.remote(number)

    async def release(self) -> None:
        """Return once nothing is left of it."""
        if self._actor is not None:
            self.signal(9)
            await asyncio.wait([self.life], timeout=KILL_S)
        self.life.cancel()
        await asyncio.wait([self.life])

    async def _live(self) -> None:
        """Place it, say so, stay until it has ended, say that, and leave nothing."""
        number, made = self._order.number, list[Any]()
        ending = Ended(number, -9, "")
        try:
            node = await self._place(made)
            _note(f"{self._order.name} is on the node {node}")
            self._actor = made[1]
            self._say(Placed(number))
            async with asyncio.TaskGroup() as tasks:
                renewing = tasks.create_task(self._renew())
                ending = await self._ended(node)
                renewing.cancel()
        except Exception as error:  # noqa: BLE001 - whatever Ray says of it ends this host alone
            cause = first_cause(error)
            self._say(Refused(number, _why_not(self._order.name, cause)))
        finally:
            await asyncio.to_thread(self._cluster.end, made)
            if self._actor is not None:
                self._say(ending)

    async def _place(self, made: list[Any]) -> str:
        """The address of its node, on which its command runs. Raises Unusable."""
        if why := await asyncio.to_thread(self._cluster.why_none, self._order):
            raise Unusable(why)
        asking = asyncio.get_running_loop().run_in_executor(None, self._cluster.ask, self._order, made)
        try:
            await asyncio.shield(asking)
        finally:
            await asyncio.wait([asking])  # what is half made could not be taken back
        actor = made[1]
        actor.run.remote(self._order.module, self._order.arguments, self._order.token)
        actor.lapse.remote(self._connect.lease_s)
        node, _, failed = await actor.started.remote()
        if failed:
            raise Unusable(f"the node {node} can't start {self._order.module}: {failed}")
        if is_loopback(self._connect.host) and not _is_here(node):
            host = self._connect.host
            raise Unusable(f"bus.host={host} leads nowhere from the node {node}. Set it to this host's address as that node reaches it.")
        return node

    async def _ended(self, node: str) -> Ended:
        """Ray says that an actor is unavailable before it says that it died, and may be wrong."""
        errors: Any = importlib.import_module("ray.exceptions")
        clock = asyncio.get_running_loop().time
        away: float | None = None
        while away is None or clock() - away < self._connect.lease_s:
            try:
                code, output = await self._actor.ended.remote()
            except errors.ActorUnavailableError:
                away = clock() if away is None else away
                await asyncio.sleep(LOOK_S)
            except errors.RayError as error:
                _note(f"{self._order.name}: {_line(error)}")
                break
            else:
                lines = output.strip().splitlines() or [""]
                return Ended(self._order.number, code, lines[-1].strip()[:SENTENCE], output)
        return Ended(self._order.number, None, f"its node {node} went away, or Ray ended what it had there")

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(min(self._connect.lease_s / 5, RENEW_S))
            self._actor.renew.remote()


def _note(text: str) -> None:
    """A line of RUN/hosts/ray.log."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - it has no other log


def _is_here(address: str) -> bool:
    """Whether it is an address of this machine."""
    try:
        socket.create_server((bare(address), 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError:
        return False
    return True


async def _serve(cluster: Cluster, connect: Connect, say: Callable[[Report], None]) -> None:
    loop, orders = asyncio.get_running_loop(), asyncio.StreamReader(limit=LONGEST_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin.buffer)
    await _clear(cluster)
    say(Connected())
    decoder = msgspec.json.Decoder(Order)
    async with asyncio.TaskGroup() as tasks:
        helper = Helper(cluster, connect, say, tasks)
        while line := await orders.readline():
            helper.follow(decoder.decode(line))
        helper.release_all()


async def _clear(cluster: Cluster) -> None:
    """Raises Unusable where something of an earlier launcher does not end."""
    await asyncio.to_thread(cluster.clear)
    left: tuple[list[str], ...] = ()
    try:
        async with asyncio.timeout(LEFT_S):
            while any(left := await asyncio.to_thread(cluster.left)):  # noqa: ASYNC110 - Ray tells it by no event
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        names = ", ".join(name for names in left for name in names)
        raise Unusable(f"the Ray cluster does not end what an earlier launcher of this run left there: {names}") from None


def main() -> int:
    """Reports go to what stdout was: Ray prints, and may print there."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def say(report: Report) -> None:
        with suppress(BrokenPipeError):
            out.write(line_of(report))

    connect = msgspec.json.decode(sys.stdin.buffer.readline(LONGEST_LINE), type=Connect)
    try:
        cluster = Cluster(connect)
        asyncio.run(_serve(cluster, connect, say))
    except Unusable as error:
        say(Unreachable(str(error)))
        return ExitCode.REFUSED
    cluster.ray.shutdown()
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
