"""The watchdog: says what a node agent sees of its processes, and tells the user once when a stage is blocked for too long."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from runtime.monitor.snapshot import snapshot
from runtime.monitor.views import BlockedRow
from runtime.monitor.why import blocked_line
from runtime.observe.waits import Wait, Waits
from runtime.registry import list_seen
from runtime.store.errors import StoreUnavailable
from runtime.store.store import Store

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

LOOK_S = 1.0
"""As often as actors publish their figures."""

Key = tuple[str, str, str, str]


class Watch:
    """Processes that are not as they should be are waits of the node agent (stages `starting`, `stopped`, `dead`)."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._open: dict[str, Wait] = {}
        self._since: dict[Key, float] = {}
        self._told: set[Key] = set()

    # -- what the node agent sees -------------------------------------------------------------------------------

    def starting(self, name: str) -> None:
        """Its process was started for the first time."""
        self._is(name, "starting")

    def died(self, name: str, detail: str, limit: str) -> None:
        """Its process ended, and will be started again; until it is ready again."""
        self._is(name, "dead", detail, limit)

    def stopped(self, name: str, *, now: bool) -> None:
        """Whether something stopped its process (SIGSTOP)."""
        found = self._open.get(name)
        if now and found is None:
            self._is(name, "stopped", "SIGSTOP; kill -CONT lets it go on")
        elif not now and found is not None and found.stage == "stopped":
            self.well(name)

    def well(self, name: str) -> None:
        """It is ready, or gone for good."""
        found = self._open.pop(name, None)
        if found is not None:
            found.close()

    def _is(self, name: str, stage: str, detail: str = "", limit: str = "") -> None:
        self.well(name)
        self._open[name] = self._waits.on(name, stage=stage, detail=detail, limit=limit).open()

    # -- what it tells ------------------------------------------------------------------------------------------

    async def follow(
        self,
        store: Store,
        limit_s: float,
        look: Callable[[], None],
        tell: Callable[[str], None],
        log: "FilteringBoundLogger",
    ) -> None:
        """Until cancelled: `look` at the processes, then `tell` of each stage that is blocked for `limit_s`, once until it moves, and of a
        Store that has no room.

        A slow stage is only logged: a job's slowest stage is no news.
        """
        loop = asyncio.get_running_loop()
        full = ""
        while True:
            await asyncio.sleep(LOOK_S)
            look()
            try:
                seen = await list_seen(store)
                said = await store.full()
            except StoreUnavailable:
                continue
            if said != full:
                full = said
                log.warning("store_room", full=full)
                tell(full or "the Store has room again: the run goes on")
            silent = {one.record.name: one.silent_s for one in seen}
            rows = snapshot("", [one.record for one in seen], [], {}, silent=silent)["blocked"]
            for row in self.overdue(rows, loop.time(), limit_s):
                line = blocked_line(row) + (f"; limit {row['limit']}" if row["limit"] else "")
                log.warning("blocked", kind=row["kind"], stage=row["stage"], holder=row["holder"], line=line)
                if row["kind"] != "slow":
                    tell(line)

    def overdue(self, rows: list[BlockedRow], now: float, limit_s: float) -> list[BlockedRow]:
        """Rows that were there for `limit_s` and not told yet; what is gone from `rows` may be told again."""
        present = {(row["actor"], row["stage"], row["holder"], row["kind"]): row for row in rows}
        self._since = {key: self._since.get(key, now) for key in present}
        self._told &= present.keys()
        due = [key for key in present if key not in self._told and now - self._since[key] >= limit_s]
        self._told |= set(due)
        return [present[key] for key in due]
