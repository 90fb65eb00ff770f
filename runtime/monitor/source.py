"""Reads a run from outside: its folder always, its Store while somebody runs it."""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from runtime.clock import wall_s
from runtime.errors import LaunchError
from runtime.launch.folder import RunCard, is_held, is_up, read_card
from runtime.monitor.files import ConfigFile, RowTail, log_tail
from runtime.monitor.snapshot import Row, snapshot
from runtime.monitor.trouble import missing_card, silent_store
from runtime.monitor.views import RunState, Snapshot
from runtime.registry import Seen, list_seen
from runtime.store.errors import StoreUnavailable
from runtime.store.store import Store

READ_S = 3.0
"""A Store that has not answered by then is shown as unreachable; the next look tries again."""

Opener = Callable[[str, str], Store]


class View(NamedTuple):
    """One look at a run."""

    shown: Snapshot
    rows: Sequence[Row]


class LiveSource(Protocol):
    """Where the live view gets what it shows."""

    async def read(self) -> View: ...
    def log(self, actor: str, lines: int) -> list[str]: ...


class RunSource:
    """The run in `folder`. Raises LaunchError where there is none."""

    def __init__(self, folder: Path, opener: Opener | None = None) -> None:
        self.folder = folder.resolve()
        self._opener = opener or _open
        self._rows = RowTail(self.folder / "metrics.jsonl")
        self._config = ConfigFile(self.folder / "config.yaml")
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
        shown = snapshot(
            self.folder.name,
            [one.record for one in seen],
            rows,
            self._config.read(),
            state=state,
            trouble=trouble,
            elapsed_s=elapsed_s,
            silent={one.record.name: one.silent_s for one in seen},
        )
        return View(shown, rows)

    async def _live(self, card: RunCard | None) -> tuple[RunState, str, list[Seen]]:
        """How it stands, the sentence about a run that is up and can't be reached or can't go on, and its actors."""
        if card is None:
            return ("unreachable", missing_card(self.folder), []) if is_held(self.folder) else ("ended", "", [])
        if not is_up(card):
            return "ended", "", []
        if not card.state_url:  # it is just starting
            return "running", "", []
        try:
            async with asyncio.timeout(READ_S):
                store = await self._connected(card)
                seen, full = await list_seen(store), await store.full()
        except (StoreUnavailable, TimeoutError):
            if not is_up(card):
                return "ended", "", []
            return "unreachable", silent_store(card.state_url, self.folder, card.launcher_pid, self._answered_s), []
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
        try:
            return read_card(self.folder)
        except (
            LaunchError
        ):  # it was there, or metrics.jsonl is: a folder that is being cleared, or was copied without it
            return None

    async def _connected(self, card: RunCard) -> Store:
        if self._store is None or self._url != card.state_url:
            await self.close()
            self._store, self._url = self._opener(card.state_url, card.id), card.state_url
        return self._store


def _open(url: str, run_id: str) -> Store:
    from runtime.store.open import open_store

    return open_store(url, run_id, patience_s=READ_S)
