"""Who waits for what: each wait in progress says what for, on whom and up to which limit; each stage, how long that usually takes."""

import asyncio
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

MAX_VIEWS = 48
"""Waits shown per actor: an actor may hold hundreds, and its status is written each second."""

SHOWN_PER_STAGE = 4
"""The oldest of each stage are always among them, so that a crowd in one stage hides no other."""

WINDOW_S = 5.0
"""Loads are means over the last so many seconds: live, and longer than most single waits."""

KEPT = 256
"""Ended waits remembered per stage; where more ended within `WINDOW_S`, the load is the mean over those."""

MAX_STAGES = 64
"""Pairs of stage and holder remembered per actor; the one that was used longest ago is forgotten first."""

REFUSAL_S = 3.0
"""A refusal is shown until the holder answers, or for this long after the last one: pauses between tries are shorter."""

ITSELF = "itself"
"""Stands for the waiting actor where a holder is named: another stage of its own."""

STORE = "store"
"""Stands for the Store where a holder is named: it is no actor, but may be waited for like one."""


class WaitView(msgspec.Struct, frozen=True):
    """One wait in progress, as others see it. `limit` is the config key and value that ends it, where there is one."""

    what: str
    detail: str = ""
    holder: str = ""
    """An actor, a role (any of its instances), STORE, ITSELF, or empty: what this very stage does."""
    age_s: float = 0.0
    limit: str = ""
    stage: str = ""
    quiet_s: float = 0.0
    """Since it last moved; its age where it never did."""
    blocks_actor: bool = False
    """The actor does nothing else meanwhile: whoever waits for it waits for this."""


class StageView(msgspec.Struct, frozen=True, omit_defaults=True):
    """All waits of one stage for one holder."""

    stage: str
    holder: str = ""
    num: int = 0
    """In progress."""
    load: float = 0.0
    """In progress on average over the last `WINDOW_S` seconds."""
    longest_s: float = -1.0
    """The longest that one of the newest `KEPT` took, or stood still; -1 where none ended or moved yet."""
    idle: bool = False
    """Waits for more work: it holds nothing up that is in hand."""


class _Stage:
    """What is remembered of one stage and holder."""

    __slots__ = ("ended", "gaps", "idle", "num")

    def __init__(self, *, idle: bool) -> None:
        self.idle = idle
        self.num = 0
        self.ended: deque[tuple[float, float]] = deque(maxlen=KEPT)
        """(began, ended), loop times."""
        self.gaps: deque[float] = deque(maxlen=KEPT)

    def load(self, since: float, now: float) -> float:
        """Waits that ended since then, as a mean over the time between."""
        if len(self.ended) == KEPT:
            since = max(since, self.ended[0][1])
        spent = sum(end - max(begin, since) for begin, end in self.ended if end > since)
        return spent / max(now - since, 1e-9)


@dataclass(slots=True, eq=False)
class Wait:
    """One wait, from entering to leaving its `with` block, or from `open` to `close`."""

    _owner: "Waits"
    what: str
    stage: str
    detail: str
    holder: str
    limit: str
    blocks_actor: bool
    idle: bool
    _since: float | None
    _moved: float | None
    _describe: Callable[[], tuple[str, str]] | None = None

    def described_by(self, describe: Callable[[], tuple[str, str]]) -> "Wait":
        """Ask `describe` for (detail, holder) whenever somebody looks, where these change more often than that."""
        self._describe = describe
        return self

    def update(self, *, detail: str | None = None, holder: str | None = None) -> None:
        """Say more about the wait while it lasts."""
        self.detail = self.detail if detail is None else detail
        self.holder = self.holder if holder is None else holder

    def moved(self) -> None:
        """What is waited for makes progress."""
        now = self._owner.now()
        self._owner.stage(self.stage, self.holder, idle=self.idle).gaps.append(now - (self._moved or now))
        self._moved = now

    def view(self, now: float) -> WaitView:
        """The wait at loop time `now`."""
        if self._describe is not None:
            self.detail, self.holder = self._describe()
        age_s, quiet_s = max(0.0, now - (self._since or 0.0)), max(0.0, now - (self._moved or 0.0))
        return WaitView(self.what, self.detail, self.holder, age_s, self.limit, self.stage, quiet_s, self.blocks_actor)

    def began(self, now: float) -> float:
        return now if self._since is None else self._since

    def open(self) -> "Wait":
        """Begin, where a `with` block does not fit."""
        if self._since is None:
            self._since = self._moved = self._owner.now()
        self._owner.open[id(self)] = self
        return self

    def close(self) -> None:
        """End it; once is enough."""
        if self._owner.open.pop(id(self), None) is not None:
            self._owner.ended(self, self._owner.now(), self._moved or 0.0)

    def __enter__(self) -> "Wait":
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()


class Waits:
    """The waits of one actor."""

    def __init__(self) -> None:
        self.open: dict[int, Wait] = {}
        """Waits in progress, in the order they began."""
        self._time: Callable[[], float] | None = None
        self._born = 0.0
        self._stages: OrderedDict[tuple[str, str], _Stage] = OrderedDict()
        self.refusals: dict[str, tuple[str, str, float, float, float]] = {}
        """Holder → (what it refused, why, first and last time, until when it is shown)."""

    def on(
        self,
        what: str,
        *,
        stage: str = "",
        detail: str = "",
        holder: str = "",
        limit: str = "",
        age_from: float | None = None,
        blocks_actor: bool = False,
        idle: bool = False,
    ) -> Wait:
        """`with waits.on("batch 42", stage="batch", detail="29 of 32 groups", holder="sample_buffer") as wait:` around the awaiting.

        `stage` names the kind of waiting, `what` the one thing (it is the stage where none is given). `age_from` is the loop time
        at which the waiting really began, where that was earlier than entering the block.
        """
        return Wait(self, what, stage or what, detail, holder, limit, blocks_actor, idle, age_from, age_from)

    def now(self) -> float:
        """Loop time; the loop is the one of the first wait, so that a wait may end after its loop did."""
        if self._time is None:
            self._time = asyncio.get_running_loop().time
            self._born = self._time()
        return self._time()

    def refused(self, holder: str, what: str, why: str, *, for_s: float = REFUSAL_S) -> None:
        """`holder` did not take `what`; shown until it answers, or for `for_s`."""
        now = self.now()
        first = self.refusals[holder][2] if holder in self.refusals else now
        self.refusals[holder] = (what, why, first, now, now + for_s)

    def answered(self, holder: str) -> None:
        """`holder` takes what it is given (again)."""
        self.refusals.pop(holder, None)

    def snapshot(self, now: float, more: Sequence[WaitView] = ()) -> list[WaitView]:
        """At most `MAX_VIEWS` waits at loop time `now`, those of `more` included, oldest first."""
        views = [wait.view(now) for wait in self.open.values()]
        views += [
            WaitView(what, why, holder, now - first, "", "refused", now - last)
            for holder, (what, why, first, last, until) in self.refusals.items()
            if now <= until
        ]
        views += more
        views.sort(key=lambda view: -view.age_s)
        return _thinned(views) if len(views) > MAX_VIEWS else views

    def stages(self, now: float) -> list[StageView]:
        """Every stage that was used lately, at loop time `now`."""
        since = max(now - WINDOW_S, min(self._born, now - 1e-9))
        shares: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for wait in self.open.values():
            self.stage(wait.stage, wait.holder, idle=wait.idle)
            shares[wait.stage, wait.holder].append((now - max(since, wait.began(now))) / (now - since))
        views: list[StageView] = []
        for key, held in self._stages.items():
            load = round(sum(shares[key]) + held.load(since, now), 4)
            views.append(StageView(*key, len(shares[key]), load, max(held.gaps, default=-1.0), held.idle))
        return views

    def stage(self, stage: str, holder: str, *, idle: bool) -> _Stage:
        key = (stage, holder)
        found = self._stages.get(key)
        if found is None:
            found = self._stages[key] = _Stage(idle=idle)
            if len(self._stages) > MAX_STAGES:
                self._stages.popitem(last=False)
        else:
            self._stages.move_to_end(key)
        return found

    def ended(self, wait: Wait, now: float, moved: float) -> None:
        held = self.stage(wait.stage, wait.holder, idle=wait.idle)
        held.ended.append((wait.began(now), now))
        held.gaps.append(max(0.0, now - moved))


def _thinned(views: list[WaitView]) -> list[WaitView]:
    """The oldest of each stage, then the oldest of all, oldest first."""
    seen: dict[tuple[str, str], int] = {}
    first: list[WaitView] = []
    rest: list[WaitView] = []
    for view in views:
        key = (view.stage, view.holder)
        seen[key] = seen.get(key, 0) + 1
        (first if seen[key] <= SHOWN_PER_STAGE else rest).append(view)
    return sorted([*first, *rest][:MAX_VIEWS], key=lambda view: -view.age_s)
