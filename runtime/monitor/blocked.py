"""Names, for every blocked stage, who holds it up and how: from what actors publish, and nothing else.

Each wait is followed to its holder: to the wait there that is about the same thing, else to the work that holds everything up
there. What stands still at the end is stalled; where everything moves, the stage that takes most of the time is slow.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast, get_args

from rubato.runtime.monitor.views import ActorView, BlockedRow, Kind, StageRow, WaitRow
from rubato.runtime.observe.figures import CLUSTER_STORE, OTHER_JOB, STORE
from rubato.runtime.registry import BEAT_S, NODE, role_of

SILENT_S = 2.5
"""Two heartbeats and a half: one may be late by a second and no more in a process that runs."""

LATE_MS = 250.0
"""An event loop that runs so late holds up all that talk to it; a healthy one stays under 20."""

NODE_ROLE = "node"

LATE = "loop/late"
"""Metric: the worst lag of the last seconds, in ms."""


class Health(NamedTuple):
    """What is wrong with a process, since when; `limit` is the knob, where there is one."""

    kind: Kind
    reason: str
    age_s: float = 0.0
    limit: str = ""


class Processes:
    """The actors of one snapshot and what is known of their processes."""

    def __init__(self, actors: Sequence[ActorView], waits: Sequence[WaitRow]) -> None:
        self._actors = {actor["name"]: actor for actor in actors}
        nodes = {actor["name"] for actor in actors if actor["role"] == NODE_ROLE}
        self._seen = {wait.what: wait for wait in waits if wait.actor in nodes and wait.stage in PROCESS}
        self.job_ends = any(wait.actor == NODE and wait.stage == ENDING for wait in waits)
        """Whether actors are drained and saved: one that is gone is no trouble then."""
        self.names = sorted({*self._actors, *(name for name, wait in self._seen.items() if wait.stage != "drained")})
        """Actors that are registered, or whose process a node agent watches."""
        self._of_role: dict[str, list[str]] = {}
        for name in self.names:
            self._of_role.setdefault(role_of(name), []).append(name)
        self._hosts = {actor["host"] for actor in actors if actor["role"] == NODE_ROLE and actor["silent_s"] <= SILENT_S}
        self._unfit: dict[str, Health | None] = {}

    def instances(self, holder: str) -> list[str]:
        """The actor of that name, or all of that role, dead ones included."""
        if holder in self._actors or holder in self._seen:
            return [holder]
        return self._of_role.get(holder, [])

    def unfit(self, name: str) -> Health | None:
        """What is wrong with the process of `name`; None where it runs as it should."""
        if name not in self._unfit:
            self._unfit[name] = self._look_at(name)
        return self._unfit[name]

    def _look_at(self, name: str) -> Health | None:
        seen, actor = self._seen.get(name), self._actors.get(name)
        if seen is not None and (actor is None or seen.stage != "starting"):
            return _as_seen(seen)
        if actor is None:
            return Health("dead", "no such actor is up")
        if actor["silent_s"] > SILENT_S:
            cut_off = "" if self._watched(actor) else ", or its host is cut off"
            why = f"no heartbeat for {actor['silent_s']:.1f} s: its event loop is stuck{cut_off}"
            return Health("stalled", why, actor["silent_s"])
        if seen is not None:
            return _as_seen(seen)
        if actor["state"] == "starting":
            return Health("starting", "it is not ready yet")
        if actor["state"] == "draining":
            return DRAINING
        late = actor["metrics"].get(LATE, 0.0)
        if late > LATE_MS:
            why = f"its event loop runs {late:.0f} ms late: too little processor time, or work that blocks it"
            return Health("starved", why)
        return None

    def _watched(self, actor: ActorView) -> bool:
        """A node agent on its host would have said if it were dead or stopped."""
        return actor["host"] in self._hosts


PROCESS: dict[str, tuple[Kind, str]] = {
    "dead": ("dead", "its process ended"),
    "stopped": ("stalled", "its process is stopped"),
    "starting": ("starting", "its process starts"),
    "drained": ("refused", "it was drained"),
}
"""Stages in which a node agent waits for an actor whose process is not as it should be."""


def _as_seen(wait: WaitRow) -> Health:
    """By the node agent that waits."""
    kind, text = PROCESS[wait.stage]
    return Health(kind, f"{text} ({wait.detail})" if wait.detail else text, wait.age_s, wait.limit)


ENDING = "ending"
"""What a node agent waits for once the job, or its host's part of it, is over: its actors' end."""

DRAINING = Health("refused", "it is draining")
"""Shown to actors that wait for one that drains; by itself that is no trouble."""

MIN_AGE_S = 1.0
"""Shorter waits are how work passes from one actor to the next."""

UNUSUAL_S = 0.5
STALL_S = 2.0
STALL_FACTOR = 3.0
"""Standing still for `STALL_S`, and this many times longer than the longest that was seen to end, is no slowness; from `UNUSUAL_S`
on it is at least slow."""

BUSY = 0.8
"""Average number under way; a stage with less is not what others wait for."""

EXPLAINED = 0.5
"""A holder whose own stages make up less than this share of what others wait there is itself what takes the time."""

SEVERITY: tuple[Kind, ...] = get_args(Kind)

RELATED = 8
"""Waits about the same thing that are followed: the members of a group."""

PLUMBING = ("ask", "handler", "credit", "refused")
"""Waits that the runtime itself declares."""

ASIDE = "aside"
"""A wait in which an actor gives another one, `what`, no work for some time: `detail` says why."""


class Verdict(NamedTuple):
    """Who holds a wait up. `via` are the actors on the way."""

    holder: str
    kind: Kind
    reason: str
    limit: str = ""
    via: tuple[str, ...] = ()
    unusual: bool = False
    """It took never so long before: no need to ask where the time goes otherwise."""


Steps = tuple[tuple[str, str, str], ...]
"""On the way from a wait to who holds it up: (actor, stage, what) of each."""


class Diagnosis:
    """Of one snapshot."""

    def __init__(self, actors: Sequence[ActorView], waits: Sequence[WaitRow]) -> None:
        self._processes = Processes(actors, waits)
        self._stages = {actor["name"]: actor["stages"] for actor in actors}
        self._waits: dict[str, list[WaitRow]] = {}
        self._about: dict[str, list[WaitRow]] = {}
        for wait in waits:
            self._waits.setdefault(wait.actor, []).append(wait)
            self._about.setdefault(wait.what, []).append(wait)

    def rows(self) -> list[BlockedRow]:
        """One per blocked stage and culprit: processes first, then the longest waits."""
        processes = ((name, self._processes.unfit(name)) for name in self._processes.names)
        found = [_process_row(name, bad) for name, bad in processes if bad is not None and bad is not DRAINING]
        told: set[tuple[str, ...]] = set()
        fit = [wait for actor in self._waits if not self._processes.unfit(actor) for wait in self._waits[actor]]
        judged = [(wait, verdict) for wait in fit if (verdict := self._judge(wait)) is not None]
        # Who is furthest from the cause comes first: it tells what the matter is with the job.
        for wait, verdict in sorted(judged, key=lambda found: (-len(found[1].via), -found[0].age_s)):
            row = _row(wait, verdict)
            keys = {(row["actor"], row["stage"], row["holder"]), (row["what"], row["holder"], row["kind"])}
            if not keys & told:
                found.append(row)
                told |= keys
        return found

    def _judge(self, wait: WaitRow) -> Verdict | None:
        """Who holds `wait` up; None where it is no blocked stage."""
        if wait.stage == ASIDE:
            return Verdict(wait.what, "refused", wait.detail)
        if wait.stage in (*PROCESS, ENDING) or (wait.age_s < MIN_AGE_S and wait.stage != "refused"):
            return None
        verdict = self._follow(wait, ())
        gone = verdict.kind == "dead" and not self._processes.instances(verdict.holder)
        if self._processes.job_ends and (gone or verdict.kind == "refused"):
            return None
        if verdict.kind != "slow":
            return verdict
        if not self._idle(wait):
            return None  # in progress
        slow = verdict if verdict.unusual else self._busiest(wait, ())
        # One that waits for itself has all the work it can do.
        return None if slow is None or self._askers(wait) & {*slow.via[1:], slow.holder} else slow

    # -- along the waits ----------------------------------------------------------------------------------------

    def _follow(self, wait: WaitRow, path: Steps) -> Verdict:
        """Who holds `wait` up, in the end."""
        asker, holder = wait.actor, wait.holder
        if holder in ("", STORE):
            return self._working(wait, holder or asker, path)
        if holder == OTHER_JOB:
            return Verdict(holder, "slow", wait.detail, via=_via(path))
        if holder == CLUSTER_STORE:
            return Verdict(holder, "stalled", "it does not answer: every job that waits for a permit waits", via=_via(path))
        path = (*path, (asker, wait.stage, wait.what))
        names = self._processes.instances(holder)
        if not names:
            return Verdict(holder, "dead", f"no {holder} is up; bring one with: rubato add {holder}", via=_via(path))
        return _worst(self._at(name, wait, path) for name in names)

    def _at(self, name: str, wait: WaitRow, path: Steps) -> Verdict:
        asker = wait.actor
        if name != asker:
            if bad := self._processes.unfit(name):
                return Verdict(name, bad.kind, bad.reason, bad.limit, _via(path))
            refused = wait if wait.stage == "refused" else self._refusal(asker, name)
            if refused is not None:
                return Verdict(name, "refused", f"{refused.what}: {refused.detail}", via=_via(path))
        following = self._following(name, wait, path)
        if not following:
            return self._working(wait, name, path)
        return _worst(self._follow(next_wait, path) for next_wait in following)

    def _following(self, name: str, wait: WaitRow, path: Steps = ()) -> list[WaitRow]:
        """The waits of `name` that `wait` waits for: about the same thing, else the one that holds up everything there."""
        waits = [
            w
            for w in self._waits.get(name, [])
            if w.stage not in ("refused", "ask", ASIDE) and (name, w.stage, w.what) not in path and not self._asks_back(w, wait)
        ]
        if name == wait.actor:
            others = [w for w in waits if w.stage != wait.stage and not self._idle(w)]
            related = [w for w in others if distance(w, wait) < 2]
            return (related or others)[:RELATED]
        close = min((distance(w, wait) for w in waits), default=2)
        if close < 2:
            return [w for w in waits if distance(w, wait) == close][:RELATED]
        blocking = [w for w in waits if w.blocks_actor][:1]
        if blocking and blocking[0].stage == "handler":
            return [w for w in self._waits[name] if w.stage == "ask"][:1] or blocking
        return blocking

    def _asks_back(self, wait: WaitRow, asked: WaitRow) -> bool:
        """Whether `wait` asks the actor of `asked` for more work: no part of what that actor waits for, unless it hands `asked` on."""
        if not self._idle(wait) or asked.actor not in self._processes.instances(wait.holder):
            return False
        return asked.stage not in (wait.what, wait.stage)

    def _askers(self, wait: WaitRow) -> set[str]:
        """Actors for which the actor of `wait` waits: itself, and those that asked it for the same thing."""
        name = wait.actor
        return {name} | {w.actor for w in self._about.get(wait.what, []) if self._idle(w) and name in self._processes.instances(w.holder)}

    def _refusal(self, asker: str, holder: str) -> WaitRow | None:
        return next((w for w in self._waits.get(asker, []) if w.stage == "refused" and w.holder == holder), None)

    def _working(self, wait: WaitRow, holder: str, path: Steps) -> Verdict:
        """Nothing leads on from here: `holder` stands still, or is slow."""
        longest_s = self._longest(wait)
        unusual = longest_s >= 0.0 and wait.quiet_s > max(UNUSUAL_S, STALL_FACTOR * longest_s)
        # The holder's own figures may be a beat older, or newer: it may have moved since.
        stalled = unusual and wait.quiet_s > STALL_S + (BEAT_S if holder not in (wait.actor, STORE) else 0.0)
        where = wait.stage if wait.stage in wait.what else f"{wait.stage} of {wait.what}"
        usual = f"longest before {seconds(longest_s)}" if longest_s >= 0.0 else "the first of its kind"
        moved = "no progress" if stalled else "under way"
        reason = f"{moved} in {where} for {seconds(wait.quiet_s)}; {usual}"
        return Verdict(holder, "stalled" if stalled else "slow", reason, wait.limit, _via(path), unusual)

    # -- along the loads ----------------------------------------------------------------------------------------

    def _busiest(self, wait: WaitRow, via: tuple[str, ...]) -> Verdict | None:
        """Where most of the time goes of what `wait` waits for; None where there is no such place."""
        asker, stage = wait.actor, wait.stage
        names = self._processes.instances(wait.holder)
        if not names or len(via) > len(self._stages):
            return None
        via = (*via, asker)
        for name in names:
            if name != asker and (bad := self._processes.unfit(name)):
                return Verdict(name, bad.kind, bad.reason, bad.limit, via)
            same = [w for w in self._following(name, wait) if self._idle(w) and distance(w, wait) == 0]
            if same and name != asker:
                return self._busiest(same[0], via)
        incoming = sum(s.load for s in self._of(asker, stage, wait.holder) if not s.idle)
        work = {name: self._work(name, stage if name == asker else "") for name in names}
        name = max(names, key=lambda name: sum(row.load for row in work[name]))
        explained = sum(row.load for rows in work.values() for row in rows)
        if explained < EXPLAINED * incoming:
            told = f"{incoming:.1f} wait for it on average in {stage}, {_longest_so_far(self._longest(wait))}"
            return Verdict(name, "slow", told, via=via) if incoming >= BUSY else None
        top = max(work[name], key=lambda row: row.load, default=None)
        if top is None or top.load < BUSY:
            return None
        if top.holder in ("", STORE):
            told = f"{top.load:.1f} are in {top.stage} on average, {_longest_so_far(top.longest_s)}"
            return Verdict(top.holder or name, "slow", told, via=(*via, name))
        leading = WaitRow(actor=name, what="", holder=top.holder, stage=top.stage)
        return self._busiest(leading, via)

    def _work(self, name: str, besides: str) -> list[StageRow]:
        """The stages in which `name` has work in hand."""
        stages = self._stages.get(name, [])
        return [row for row in stages if not row.idle and row.stage not in PLUMBING and row.stage != besides]

    # -- parts --------------------------------------------------------------------------------------------------

    def _of(self, actor: str, stage: str, holder: str) -> list[StageRow]:
        return [s for s in self._stages.get(actor, []) if s.stage == stage and s.holder == holder]

    def _longest(self, wait: WaitRow) -> float:
        return next((s.longest_s for s in self._of(wait.actor, wait.stage, wait.holder)), -1.0)

    def _idle(self, wait: WaitRow) -> bool:
        return any(s.idle for s in self._of(wait.actor, wait.stage, wait.holder))


def _row(wait: WaitRow, verdict: Verdict) -> BlockedRow:
    return BlockedRow(
        stage=wait.stage, actor=wait.actor, what=wait.what, detail=wait.detail, age_s=wait.age_s,
        holder=verdict.holder, kind=verdict.kind, reason=verdict.reason, limit=verdict.limit or wait.limit,
    )  # fmt: skip


def _process_row(name: str, bad: Health) -> BlockedRow:
    where = {"stage": "process", "actor": name, "what": name, "detail": "", "holder": name}
    return cast("BlockedRow", {**where, **bad._asdict()})


def seconds(value: float) -> str:
    """A duration for a person: `0.4 s`, `12.4 s`, `3 min 20 s`."""
    if value < 100.0:
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    return f"{minutes} min {rest} s"


def _longest_so_far(longest_s: float) -> str:
    return f"longest {seconds(longest_s)}" if longest_s >= 0.0 else "none ended yet"


def distance(wait: WaitRow, parent: WaitRow | None) -> int:
    """0: about the same thing as `parent`; 1: about something that it names; 2: about something else."""
    if parent is None or wait.what == parent.what:
        return 0
    return 1 if any(_belongs(wait.what, word) for word in _identifiers(parent)) else 2


def _belongs(what: str, word: str) -> bool:
    """Whether `what` is `word` or a part of it, as in t10460 of `t10460.2`."""
    return what == word or (what.startswith(word) and not what[len(word)].isalnum())


def _identifiers(wait: WaitRow) -> Iterable[str]:
    """Words that name one thing: with a letter and a digit."""
    for word in f"{wait.what} {wait.detail}".replace(";", " ").replace(",", " ").split():
        if any(c.isdigit() for c in word) and any(c.isalpha() for c in word):
            yield word


def _worst(verdicts: Iterable[Verdict]) -> Verdict:
    return min(verdicts, key=lambda verdict: SEVERITY.index(verdict.kind))


def _via(path: Steps) -> tuple[str, ...]:
    return tuple(dict.fromkeys(actor for actor, _, _ in path))
