"""Who waits for what: each wait in progress says what for, on whom and up to which limit, for `monitor --why`."""

import asyncio
from types import TracebackType

import msgspec

MAX_VIEWS = 32
"""Waits shown per actor, oldest first: an actor may hold hundreds, and its status is written each second."""


class WaitView(msgspec.Struct, frozen=True):
    """One wait in progress, as others see it. `limit` is the config key and value that ends it, where there is one."""

    what: str
    detail: str = ""
    holder: str = ""
    age_s: float = 0.0
    limit: str = ""


class Wait:
    """One wait, from entering to leaving its `with` block."""

    __slots__ = ("_owner", "_since", "detail", "holder", "limit", "what")

    def __init__(self, owner: "Waits", what: str, detail: str, holder: str, limit: str, since: float | None) -> None:
        self._owner = owner
        self._since = since
        self.what = what
        self.detail = detail
        self.holder = holder
        self.limit = limit

    def update(self, *, detail: str | None = None, holder: str | None = None) -> None:
        """Say more about the wait while it lasts."""
        self.detail = self.detail if detail is None else detail
        self.holder = self.holder if holder is None else holder

    def view(self, now: float) -> WaitView:
        """The wait at loop time `now`."""
        return WaitView(self.what, self.detail, self.holder, max(0.0, now - (self._since or 0.0)), self.limit)

    def __enter__(self) -> "Wait":
        if self._since is None:
            self._since = asyncio.get_running_loop().time()
        self._owner.open[id(self)] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner.open.pop(id(self), None)


class Waits:
    """The waits of one actor."""

    def __init__(self) -> None:
        self.open: dict[int, Wait] = {}
        """Waits in progress, in the order they began."""

    def on(
        self, what: str, *, detail: str = "", holder: str = "", limit: str = "", age_from: float | None = None
    ) -> Wait:
        """`with waits.on("batch 42", detail="29 of 32 groups", holder="sample_buffer") as wait:` around the awaiting.

        `age_from` is the loop time at which the waiting really began, where that was earlier than entering the block.
        """
        return Wait(self, what, detail, holder, limit, age_from)

    def snapshot(self, now: float) -> list[WaitView]:
        """The `MAX_VIEWS` oldest waits at loop time `now`, oldest first."""
        views = [wait.view(now) for wait in self.open.values()]
        return sorted(views, key=lambda view: -view.age_s)[:MAX_VIEWS]
