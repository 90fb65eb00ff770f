"""Reads a run from outside: its folder always, its Store while it runs; and says why one can't be looked at."""

import asyncio
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from rubato.runtime.config.yaml_core import NotYaml, read_yaml
from rubato.runtime.errors import ConfigError, LaunchError
from rubato.runtime.importer import load_configured
from rubato.runtime.launch.card import RunCard, is_up, read_card
from rubato.runtime.launch.children import is_stopped
from rubato.runtime.launch.folder import is_held
from rubato.runtime.monitor.blocked import seconds
from rubato.runtime.monitor.snapshot import Row, alpha_of, snapshot
from rubato.runtime.monitor.views import RunState, Snapshot
from rubato.runtime.observe.trace import wall_s
from rubato.runtime.registry import NODE, SeenRecord, list_seen
from rubato.runtime.store.redis import RedisStore
from rubato.runtime.store.store import Store, StoreUnavailable

READ_S = 3.0
"""A Store that has not answered by then is shown as unreachable; the next look tries again."""


class View(NamedTuple):
    """One look at a run."""

    shown: Snapshot
    rows: Sequence[Row]


class RunSource:
    """The run in `folder`. Raises LaunchError where there is none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._rows = RowTail(self.folder / "metrics.jsonl")
        self._store: Store | None = None
        self._url = ""
        self._answered_s = 0.0
        if not os.path.exists(self.folder / "metrics.jsonl"):  # unlike Path.exists, it takes any length
            read_card(self.folder)

    async def read(self) -> View:
        """The run now; never raises for a run that ends or whose Store goes away meanwhile."""
        card = self._card()
        state, trouble, seen = await self._live(card)
        rows = self._rows.read()
        elapsed_s = rows[-1].get("time/wall_s", 0.0) if rows else 0.0
        if card is not None and state != "ended":
            elapsed_s = wall_s() - card.started_s
        config = read_config(self.folder / "config.yaml")
        shown = snapshot(
            self.folder.name,
            [one.record for one in seen],
            rows,
            config,
            state=state,
            trouble=trouble,
            elapsed_s=elapsed_s,
            silent={one.record.name: one.silent_s for one in seen},
            notices=notices(self.folder / "logs" / f"{card.node if card else NODE}.jsonl"),
            advice=_advice(rows, config),
        )
        return View(shown, rows)

    async def _live(self, card: RunCard | None) -> tuple[RunState, str, list[SeenRecord]]:
        """How it stands, the sentence about a run that is up and can't be reached or can't go on, and its actors."""
        if card is None and is_held(self.folder):
            said = (
                f"{self.folder / 'run.json'} is missing, so nothing of the run can be reached, but its launcher runs. "
                "End the launcher, then start the run again with --resume."
            )
            return "unreachable", said, []
        if card is None or not is_up(card):
            return "ended", "", []
        if not card.state_url:  # it is just starting
            return "running", "", []
        try:
            url = card.url
        except ConfigError as error:
            return "unreachable", str(error), []
        try:
            async with asyncio.timeout(READ_S):
                store = await self._connected(card, url)
                seen, full = await list_seen(store), await store.full()
        except (StoreUnavailable, TimeoutError):
            if not is_up(card):
                return "ended", "", []
            return "unreachable", silent_store(url, self.folder, card.launcher_pid, self._answered_s), []
        self._answered_s = wall_s()
        return "running", full, seen

    def log(self, actor: str, lines: int) -> list[str]:
        """The newest lines of the log of `actor`."""
        return log_tail(self.folder / "logs" / f"{actor}.jsonl", lines)

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()
            self._store = None

    def _card(self) -> RunCard | None:
        """None where it is away: from a folder that is being cleared, or was copied without it."""
        try:
            return read_card(self.folder)
        except LaunchError:
            return None

    async def _connected(self, card: RunCard, url: str) -> Store:
        if self._store is None or self._url != url:
            await self.close()
            self._store, self._url = RedisStore(url, card.id, patience_s=READ_S), url
        return self._store


MAX_ROWS = 10_000
"""Rows kept, newest first to stay: what a sparkline can show, in a few MB."""

NEWEST = 32
"""Rows that advice is made from, or less."""

LOG_BYTES = 32 * 1024
"""Read from the end of a log: some hundred lines, more than a screen holds."""

MAX_NOTICES = 3
"""A screen has room for; the log has all."""

BASIC = ("t", "level", "logger", "actor", "event", "incarnation")
"""Fields of a log line that are written by position or left out."""


class RowTail:
    """The rows of a metrics.jsonl that grows. A line that is still being written is left for the next time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rows: deque[dict[str, float]] = deque(maxlen=MAX_ROWS)

    def read(self) -> list[Row]:
        """All rows so far, oldest first; a resumed run's repeated steps replace those they repeat."""
        try:
            with self._path.open("rb") as file:
                if self._path.stat().st_size < self._offset:
                    self._offset = 0
                    self._rows.clear()
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return list(self._rows)
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            self._add(_numbers(_object(line)))
        return list(self._rows)

    def _add(self, row: dict[str, float]) -> None:
        if not row:
            return
        while self._rows and "step" in row and self._rows[-1].get("step", 0) >= row["step"]:
            self._rows.pop()
        self._rows.append(row)


def read_config(path: Path) -> dict[str, Any]:
    """The resolved config as plain data, parsed again only when it changed; empty where there is none or it can't be read."""
    try:
        return _parsed(path, path.stat().st_mtime_ns)
    except (OSError, NotYaml):
        return {}


@lru_cache(maxsize=1)
def _parsed(path: Path, _changed_ns: int) -> dict[str, Any]:
    found: object = read_yaml(path.read_text())
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _advice(rows: Sequence[Row], config: dict[str, Any]) -> Mapping[str, float]:
    """What `report.advice` makes of the newest rows; nothing where it leads nowhere here, as with a run from another host."""
    report = config.get("report")
    target: object = cast("dict[str, object]", report).get("advice") if isinstance(report, dict) else None
    alpha = alpha_of(config)
    if not isinstance(target, str) or not target or not rows:
        return {}
    try:
        return load_configured(target)(rows[-NEWEST:], -1 if alpha is None else int(alpha))
    except (ConfigError, ArithmeticError, LookupError, TypeError, ValueError):
        return {}


def log_tail(path: Path, lines: int) -> list[str]:
    """The newest `lines` of a log, each as `HH:MM:SS event field=value …`; empty where there is none."""
    return [_formatted(entry) for entry in _entries(path)][-lines:]


def notices(path: Path) -> list[str]:
    """The newest bad news in a node agent's log, oldest first."""
    told = [entry for entry in _entries(path) if entry.get("event") == "notice" and not entry.get("good")]
    return [str(entry.get("text", "")) for entry in told][-MAX_NOTICES:]


def _entries(path: Path) -> list[dict[str, Any]]:
    """The end of a log; empty where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_BYTES))
            found = file.read().splitlines()
    except OSError:
        return []
    whole = found[1:] if size > LOG_BYTES else found
    return [entry for line in whole if (entry := _object(line))]


def _formatted(entry: dict[str, Any]) -> str:
    level = str(entry.get("level", "info"))
    mark = "" if level in ("info", "debug") else f"{level}: "
    fields = " ".join(f"{key}={value}" for key, value in entry.items() if key not in BASIC)
    return f"{str(entry.get('t', ''))[11:19]} {mark}{entry.get('event', '')} {fields}".rstrip()


def _object(line: bytes) -> dict[str, Any]:
    try:
        found: object = json.loads(line)
    except ValueError:
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _numbers(entry: dict[str, Any]) -> dict[str, float]:
    return {key: v for key, v in entry.items() if isinstance(v, int | float) and not isinstance(v, bool)}


CONNECT_S = 0.2


def silent_store(url: str, folder: Path, launcher_pid: int, answered_s: float = 0.0) -> str:
    """The sentence about a Store that did not answer; `answered_s`: when it last did so here, in wall-clock seconds, 0 where never.

    An embedded Redis writes each heartbeat to its file in `folder`: the age of that file is the length of its silence.
    """
    state = folder / "state"
    written = [path.stat().st_mtime for path in state.rglob("appendonly*") if path.is_file()]
    since_s = max([answered_s, *written])
    since = f" for {seconds(max(0.0, wall_s() - since_s))}" if since_s else ""
    parts = urlsplit(url)
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"  # without the password
    said = f"the Store at {address} does not answer{since}: actors that need it wait"
    pid = _listener(parts.path) if parts.scheme == "unix" else 0
    if pid and is_stopped(pid):
        return f"{said}. Its process {pid} is stopped; continue it with: kill -CONT {pid}"
    log = f"See {state / 'redis.log'}" if written else "See whether a server runs there and this host reaches it"
    stop = f"kill -TERM {launcher_pid}, and once more if it shall not save first"
    return f"{said}. {log}. rubato stop needs the Store too; without it end the run by its launcher: {stop}"


def _listener(path: str) -> int:
    """Process id of the listener on a Unix socket, also of one that is stopped; 0 where there is none or the system can't tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(CONNECT_S)
        try:
            connection.connect(path)
            return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        except OSError:
            return 0
