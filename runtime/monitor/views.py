"""The plain data that the monitor shows and `--json` prints."""

from typing import Literal, NotRequired, TypedDict

from rubato.runtime.observe.figures import StageView, WaitView

RunState = Literal["running", "unreachable", "ended"]
"""`unreachable`: the launcher lives but its Store does not answer, or is not known; `ended`: no launcher, its last state."""

Kind = Literal["dead", "stalled", "refused", "starved", "starting", "slow"]
"""Worst first. dead: no process. stalled: alive, no progress. refused: answers, but does not take what it is given.
starved: its event loop runs late. starting: not ready yet. slow: makes progress."""


class StageRow(StageView, frozen=True, omit_defaults=False):
    """One stage of an actor. Its `holder` is never ITSELF: it is named."""


class WaitRow(WaitView, frozen=True, kw_only=True):
    """One wait in progress of `actor`. Its `holder` is never ITSELF, and its `stage` never empty."""

    actor: str


class RankRow(TypedDict):
    """One process of an actor that has several."""

    rank: int
    pid: int
    host: str
    device: str


class ActorView(TypedDict):
    """One live actor. `idle` is a share from 0 to 1; `rate_s` messages per second; `silent_s` since its last heartbeat.

    `pool`, and `hardware`, the class of that pool's, are empty where its role has no pools.
    """

    name: str
    role: str
    pid: int
    host: str
    state: str
    incarnation: int
    mailbox: int
    rate_s: float
    idle: float
    silent_s: float
    metrics: dict[str, float]
    stages: list[StageRow]
    pool: str
    hardware: str
    ranks: NotRequired[list[RankRow]]
    """The processes among which it shares out its work; absent where it does not."""


class BlockedRow(TypedDict):
    """One blocked stage: `actor` waits in `stage` for `what` since `age_s`, because `holder` is `kind`. `limit` ends it, where one is set.

    `stage` is `process` where it is the actor itself that does not run as it should, whatever waits for it.
    """

    stage: str
    actor: str
    what: str
    detail: str
    age_s: float
    holder: str
    kind: Kind
    reason: str
    limit: str


class Snapshot(TypedDict):
    """The object that `monitor --json` prints."""

    run: str
    state: RunState
    trouble: str
    """Why it is unreachable, or paused because the Store has no room, and what to do, in a sentence; else empty."""
    step: int
    steps: int | None
    alpha: float | None
    """The bound on age; -1 where the job has none, None where it is not known."""
    version: int | None
    elapsed_s: float
    actors: list[ActorView]
    queues: dict[str, float]
    waits: list[WaitRow]
    blocked: list[BlockedRow]
    metrics: dict[str, float]
    notices: list[str]
    """What the launcher told lately that was no good news, oldest first."""
    advice: dict[str, float]
    """What a change would gain in throughput, 0.18 for 18 %, by the newest rows: `advice/<what holds the run up>/<change>`."""
