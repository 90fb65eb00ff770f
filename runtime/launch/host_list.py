"""`rubato hosts`: the hosts of a running job, those that `launch.hosts` asks for and that are not there yet among them."""

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from rubato.runtime.errors import ExitCode, LaunchError
from rubato.runtime.launch.connection import connect
from rubato.runtime.registry import ActorRecord, list_actors
from rubato.runtime.store.store import Store

HostState = Literal["asked", "placed", "ready", "draining", "left", "lost"]
"""asked: of its engine; placed: its command runs; ready, draining: it is in the run; left: in order; lost: another is asked for."""


class HostRecord(msgspec.Struct, frozen=True):
    """What the launcher knows of one host of `launch.hosts`, as it stands in the Store."""

    backend: str
    pools: Mapping[str, int]
    state: HostState = "asked"
    id: str = ""
    """Name that the engine's own commands have for it."""


class HostRow(msgspec.Struct):
    """One host as a user sees it."""

    name: str
    """Of its kind and a number where it was asked for by `launch.hosts`, else that of its node agent."""
    backend: str
    """The engine that placed it; empty for the launching host and for one that joined by token."""
    id: str
    pools: dict[str, int]
    """Processes by pool, or by a role without pools."""
    state: HostState
    node: str = ""
    """Its node agent; empty until it has joined."""
    host: str = ""
    address: str = ""
    """Where other hosts reach it; empty where none can."""
    actors: list[str] = []


HOSTS = "hosts"
"""In the Store: names of the hosts that this launch asks for."""


def record_key(name: str) -> str:
    """In the Store: the HostRecord of the host `name`."""
    return f"host/{name}"


def name_key(node: str) -> str:
    """In the Store: the name by which the host of this node agent was asked for."""
    return f"host_of/{node}"


async def host_rows(store: Store) -> list[HostRow]:
    """All hosts that the job has or asks for, in the order of their names."""
    records = await list_actors(store)
    nodes = [record for record in records if record.role == "node"]
    asked = msgspec.json.decode(await store.get(HOSTS) or b"[]", type=list[str])
    names = await store.fetch([name_key(node.name) for node in nodes])
    known = await store.fetch([record_key(name) for name in asked])
    placed = {name: msgspec.json.decode(data, type=HostRecord) for name, data in zip(asked, known, strict=True) if data}
    newest = {name: node.incarnation for node, name in sorted(zip(nodes, names, strict=True), key=lambda each: each[0].incarnation) if name}
    rows = [
        _joined(node, (name or b"").decode(), records, placed, is_lost=newest.get(name or b"", node.incarnation) != node.incarnation)
        for node, name in zip(nodes, names, strict=True)
    ]
    there = {row.name for row in rows}
    waited = ((name, record) for name, record in placed.items() if name not in there)
    return rows + [HostRow(name, record.backend, record.id, dict(record.pools), record.state) for name, record in waited]


def _joined(
    node: ActorRecord, name: str, records: Sequence[ActorRecord], placed: dict[str, HostRecord], *, is_lost: bool = False
) -> HostRow:
    """`is_lost`: a later host has its name."""
    actors = [record for record in records if record.node == node.name and record is not node]
    record = None if is_lost else placed.get(name)
    state: HostState = "lost" if is_lost else "draining" if node.state == "draining" else "ready"
    return HostRow(
        name if record else node.name,
        record.backend if record else "",
        record.id if record else node.host,
        dict(Counter(actor.pool or actor.role for actor in actors)),
        state,
        node.name,
        node.host,
        node.public,
        [actor.name for actor in actors],
    )


async def show(argv: Sequence[str]) -> int:
    """`rubato hosts`."""
    parser = argparse.ArgumentParser("rubato hosts", description="List the hosts of a running job, and what each runs.")
    parser.add_argument("words", nargs="?", type=Path, metavar="RUN", help="folder of the run, or of this host's part of it")
    parser.add_argument("--run", type=Path, help="the same")
    parser.add_argument("--json", action="store_true", help="print {hosts: [{name, backend, id, pools, state, …}]}")
    given = parser.parse_args(argv)
    if (folder := given.run or given.words) is None:
        raise LaunchError("hosts: of which run? Name its folder: rubato hosts RUN")
    async with connect(folder, types=False) as connection:
        rows = await host_rows(connection.store)
    text = json.dumps({"hosts": msgspec.to_builtins(rows)}) if given.json else "\n".join(map(_line, rows))
    print(text)  # noqa: T201
    return ExitCode.DONE


def _line(row: HostRow) -> str:
    if not row.node:
        return f"{row.name:<8} {row.state} · {row.backend} {row.id}".rstrip()
    by = f" · {row.name}, {row.backend} {row.id}" if row.backend else ""
    return f"{row.node:<8} {row.host:<24} {row.address or 'this host alone':<28} {' '.join(row.actors) or '-'}{by}"
