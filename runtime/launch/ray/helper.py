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
from rubato.runtime.errors import ExitCode, first_cause
from rubato.runtime.launch.ray.cluster import Cluster, Unusable, line_of_error
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

LOOK_S = 0.2
"""Period of looking for what Ray tells by no event."""

LEFT_S = 20.0
"""For what an earlier launcher left to be gone."""

RENEW_S = 10.0
KILL_S = 3.0
"""For a command to end by SIGKILL, before its actor does."""

SENTENCE = 300


def _why_not(name: str, error: BaseException) -> str:
    if isinstance(error, Unusable):
        return str(error)
    if "No module named 'rubato" in str(error):
        return "a node of the Ray cluster has no rubato among its packages: install on each node what the launching host has."
    return f"Ray can't start {name}: {line_of_error(error)}"


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
                _note(f"{self._order.name}: {line_of_error(error)}")
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
