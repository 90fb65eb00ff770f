"""The life of a sample group, and so the one place where a sample's fate is decided. Pure: no clock, no store, no chance.

    OPEN ──settle──▶ READY ──bind(step)──▶ BOUND ──train──▶ TRAINED ──commit──▶ ENDED  trained, zero_spread
      │                │                     │  ◀──fall_back──┤
      │                │  ◀──────unbind──────┼────────────────┘
      │                │                     ├──commit─────────────────────▶ ENDED  trained, zero_spread
      │                │                     └──poison─────────────────────▶ ENDED  poisoned
      └────discard─────┴───────────────────────────────────────────────────▶ ENDED  stale, group_too_small, unused,
                                                                                    surplus, or a batch policy's

A member's fate is returned once, in the SampleEnd that a transition returns: where it failed alone, as it fails (`failed`, `stale`, `surplus`, `lost`;
its group is open or ready then, or bound where its payload is lost); otherwise as its group ends. No fate is ever taken back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from rubato.actors.config import SamplesSection, TrainSection
from rubato.actors.data.prompts import Mixture, TaskCursor
from rubato.actors.messages.samples import EvalResult, Purpose, Ticket, has_spread
from rubato.actors.report.breakdown import breakdown
from rubato.actors.samples.sample import TRAINED, Outcome, Tally, noise_of, seed_of, trajectory_id
from rubato.runtime.actor import RunInfo

NOTHING = Outcome(-1, None)
"""No trajectory came."""

UNKNOWN = Outcome(-1, None, -1, -1)
"""How much was sampled is not known: it still runs, or its holder is gone."""

GroupState = Literal["open", "ready", "bound", "trained", "ended"]
MemberState = Literal["pending", "running", "scored", "failed"]

POISON_RAISES = 2
"""A step whose training raised so often is not tried again: its groups end as `poisoned`."""

BARREN_BATCHES, LEAST_BARREN = 10, 128
"""`samples.max_barren_groups` where it is empty: so many batches' worth of groups, and at least so many groups."""

MIN_SCORED = 2
"""A single reward has no advantage over anything."""


class SampleEnd(msgspec.Struct, frozen=True, array_like=True):
    """One sample's end: an entry of the log that samples.jsonl tells. `step` and `term` are 0 where it was not trained."""

    trajectory_id: str
    group_id: str
    attempt: int
    row: int
    fate: str
    step: int
    term: int
    outcome: Outcome
    reason: str
    task: str = ""


MOST_REASONS = 8
"""Reasons of failed members that are counted apart while groups come to nothing; others are one."""


class Barren(msgspec.Struct, array_like=True):
    """Groups that came to nothing one after another: too small, or refused by a batch policy."""

    in_a_row: int = 0
    """How many, since the last one that may train."""
    too_small: int = 0
    """Number of those in a row that had fewer than `MIN_SCORED` scored members."""
    reasons: dict[str, int] = {}
    """Why members of these failed, and how many each; no more than `MOST_REASONS`."""
    why: str = ""
    """Why the policy refused the newest of the others."""

    def note(self, group: "Group", why: str = "") -> None:
        """A group is complete; `why` a policy refused it, if one did."""
        if why:
            self.in_a_row += 1
            self.why = why
        elif group.fate == "group_too_small":
            self.in_a_row += 1
            self.too_small += 1
            for member in group.members:
                if member.state == "failed":
                    self._count(member.reason.partition(":")[0] or member.fate)
        elif group.state == "ready":
            self.begin_anew()

    def begin_anew(self) -> None:
        """Count groups that come to nothing from here on."""
        self.in_a_row = self.too_small = 0
        self.reasons = {}

    def _count(self, reason: str) -> None:
        name = reason if reason in self.reasons or len(self.reasons) < MOST_REASONS else "other reasons"
        self.reasons[name] = self.reasons.get(name, 0) + 1


class PolicyRecord(msgspec.Struct, frozen=True, array_like=True):
    """State that a batch policy has to remember (policy.py)."""

    state: msgspec.Raw
    """As it encodes it."""
    needed: str = ""
    """Why a run with this state can't go on without the policy; empty where it can."""


class Training(msgspec.Struct):
    """Where training stands."""

    version: int = 0
    """Steps trained so far, by the newest Claim or Advance. The weights of the last may be on their way yet."""
    committed: int = 0
    """Steps that a durable checkpoint covers."""
    term: int = msgspec.field(default=0, name="epoch")
    cursor: int = 0
    """Groups admitted so far: the next one's number."""
    tasks: dict[str, TaskCursor] = {}
    """How far each task has come."""
    ended: int = 0
    """Index of the newest end."""
    raised_step: int = 0
    """The step in which training raised last."""
    raises: int = 0
    """How often it did in that step."""
    raised_term: int = msgspec.field(default=0, name="raised_epoch")
    """The term in which it raised last."""
    tally: Tally = msgspec.field(default_factory=Tally)
    barren: Barren = msgspec.field(default_factory=Barren)
    policies: dict[str, PolicyRecord] = {}
    """By their keys, as they were when this was last journaled."""

    def draw(self, mixture: Mixture) -> tuple[str, int]:
        """Task and row of the next group. Raises ConfigError where a sampler of the user's fails."""
        drawn = mixture.draw(self.tasks)
        self.cursor += 1
        return drawn

    def note_raise(self, step: int, term: int) -> bool:
        """Training on `step` raised; whether that is not tried again."""
        self.raises = self.raises + 1 if self.raised_step == step else 1
        self.raised_step, self.raised_term = step, term
        return self.raises >= POISON_RAISES


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """Samples that a step trains, for the checkpoint that will cover it: enough to end its samples should the Store forget them."""

    step: int
    cursor: int
    """Groups admitted when the step was handed out."""
    ends: tuple[SampleEnd, ...]
    """Ends of all members, groups in the order of the batch."""
    policies: dict[str, PolicyRecord] = {}
    """As they were then."""


class Member(msgspec.Struct, array_like=True):
    """One rollout of a group, over all its attempts."""

    state: MemberState = "pending"
    attempt: int = 0
    """Tickets issued so far; the newest alone counts."""
    tries: int = 0
    """Attempts that came to nothing."""
    version: int = 0
    """Weight version when the newest ticket was issued."""
    holder: str = ""
    """Holder of the newest ticket; empty once it said that nothing came of it."""
    incarnation: int = 0
    fate: str = ""
    """Fate of a failed member."""
    reason: str = ""
    outcome: Outcome = NOTHING
    digest: str = ""
    """Digest of the payload's file; empty where the payload is in the Store."""
    failures: int = 0
    """Number of `tries` that failed; the others were lost with their process, and draw the same tokens again."""

    @property
    def settled(self) -> bool:
        return self.state in ("scored", "failed")

    def unsent(self) -> None:
        """Its newest ticket never left for its holder."""
        self.attempt -= 1
        self.holder = ""

    @property
    def is_lost(self) -> bool:
        """Taken back without a word of its holder, which may be heard of yet."""
        return self.state == "pending" and bool(self.holder)

    def heard_of(self, holder: str, incarnation: int) -> bool:
        """Its attempt runs, at `holder` as that is now, unless it was given back. Whether this changed anything."""
        was = self.state, self.incarnation
        if self.is_lost:
            self.state = "running"
        if self.holder == holder:
            self.incarnation = max(self.incarnation, incarnation)
        return (self.state, self.incarnation) != was

    def oldest_version(self, now: int) -> int:
        """The version that its first token has, or may still get, at weight version `now`."""
        if self.state == "pending":
            return now
        return self.version if self.state == "running" else self.outcome.version_first


class Group(msgspec.Struct, array_like=True):
    """Members that play the same row of one task. `step` is what it is bound to."""

    id: str
    row: int
    members: list[Member]
    purpose: Purpose = "train"
    begun: int = 0
    """Weight version when it was opened; of a held-out round the only one that samples it."""
    state: GroupState = "open"
    step: int = 0
    fate: str = ""
    """Fate of an ended group."""
    samples: int = 1
    """Rollouts of each prompt, next to each other, in a held-out round."""
    teaches: bool | None = None
    """Whether its step learns from it; None: where its rewards have spread."""
    task: str = ""
    exam: tuple[tuple[str, int], ...] = ()
    """Task and row of each prompt of a held-out round."""
    filed: bool = False
    """A held-out round's samples lie in the run folder."""

    @classmethod
    def trained_in(cls, name: str, step: int, ends: list[SampleEnd]) -> "Group":
        """A group as a checkpoint knows it: `ends` has all of its members, in order."""
        members = [
            Member("scored", end.attempt, outcome=end.outcome, reason=end.reason)
            if end.fate in TRAINED
            else Member("failed", end.attempt, outcome=end.outcome, reason=end.reason, fate=end.fate)
            for end in ends
        ]
        teaches = any(end.fate == "trained" for end in ends)
        return cls(name, ends[0].row, members, state="trained", step=step, teaches=teaches, task=ends[0].task)

    # -- transitions --------------------------------------------------------------------------------------------

    def run(self, index: int, holder: str, incarnation: int, version: int) -> None:
        """A ticket of member `index` goes to `holder`, at weight `version`."""
        self._expect("open")
        member = self.members[index]
        member.state, member.version = "running", version
        member.attempt += 1
        member.holder, member.incarnation = holder, incarnation

    def take(self, index: int, digest: str) -> None:
        """Member `index` was scored, as its `outcome` says."""
        self._expect("open")
        member = self.members[index]
        member.state = "scored"
        member.digest = digest

    def fail(self, index: int, fate: str, reason: str) -> list[SampleEnd]:
        """Member `index` ends without training; the others go on without it."""
        self._expect("open", "ready", "bound")
        member = self.members[index]
        member.state = "failed"
        member.fate = fate
        member.reason = reason
        return [self._end_of(index, fate)]

    def settle(self, refused: str = "") -> list[SampleEnd]:
        """Nothing more can come of an open group: it may be claimed, unless too few were scored, or the batch policy gives it the fate
        `refused`."""
        self._expect("open", "ready")
        if self.num_scored < MIN_SCORED:
            return self.discard("group_too_small")
        if refused:
            return self.discard(refused)
        self.state = "ready"
        return []

    def bind(self, step: int, teaches: bool | None = None) -> None:
        """`step` trains it."""
        self._expect("ready")
        self.state = "bound"
        self.step = step
        self.teaches = teaches

    def unbind(self) -> None:
        """A checkpoint shows that its step trained other groups: the Store had forgotten them."""
        self._expect("bound", "trained")
        self.state = "ready"
        self.step = 0
        self.teaches = None

    def train(self) -> None:
        """Its step was trained; a checkpoint that covers it is still to come."""
        self._expect("bound")
        self.state = "trained"

    def fall_back(self) -> None:
        """The trainer lost the step: the same groups are trained again, in the same order."""
        self._expect("trained")
        self.state = "bound"

    def commit(self, term: int) -> list[SampleEnd]:
        """A durable checkpoint covers its step."""
        self._expect("bound", "trained")
        return self._end(self.verdict, term)

    def poison(self) -> list[SampleEnd]:
        """Training on it raised again."""
        self._expect("bound")
        return self._end("poisoned")

    def discard(self, fate: str) -> list[SampleEnd]:
        """It will not train."""
        self._expect("open", "ready")
        return self._end(fate)

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        return all(member.settled for member in self.members)

    @property
    def hopeless(self) -> bool:
        """So many members failed that too few can be scored."""
        return sum(member.state != "failed" for member in self.members) < MIN_SCORED

    @property
    def num_scored(self) -> int:
        return sum(member.state == "scored" for member in self.members)

    @property
    def num_settled(self) -> int:
        return sum(member.settled for member in self.members)

    @property
    def scored(self) -> list[int]:
        """Members whose samples train, in order."""
        return [index for index, member in enumerate(self.members) if member.state == "scored"]

    @property
    def held_tokens(self) -> list[int]:
        """How many tokens each of its samples has that have no fate yet."""
        return [member.outcome.tokens for member in self.members if member.state == "scored"]

    @property
    def inline(self) -> list[str]:
        """Samples that train and whose payloads lie in the Store."""
        return [trajectory_id(self.id, index) for index in self.scored if not self.members[index].digest]

    def rewards(self, cut_penalty: float = 0.0) -> list[float]:
        """Rewards of its scored members, in order, less `cut_penalty` where a turn was cut at its limit."""
        outcomes = [member.outcome for member in self.members if member.state == "scored"]
        return [(outcome.reward or 0.0) - cut_penalty * outcome.cut for outcome in outcomes]

    @property
    def verdict(self) -> str:
        """The fate of its scored members once they are trained."""
        teaches = has_spread(self.rewards()) if self.teaches is None else self.teaches
        return "trained" if teaches else "zero_spread"

    def fate_of(self, index: int) -> str:
        """The fate that the reply to a member's holder has: empty while its sample may train, or has trained."""
        fate = self.members[index].fate or self.fate
        return "" if fate in TRAINED else fate

    def result(self) -> EvalResult:
        """Result of a complete held-out round."""
        found = [member.outcome.reward for member in self.members]
        prompts = [found[at : at + self.samples] for at in range(0, len(found), self.samples)]
        rewards = tuple(tuple(reward for reward in prompt if reward is not None) for prompt in prompts)
        tasks = tuple(task for task, _ in self.exam) if any(task for task, _ in self.exam) else ()
        scored = [member.outcome for member in self.members if member.outcome.reward is not None]
        return EvalResult(self.begun, rewards, found.count(None), breakdown(scored), tasks)

    def version(self, now: int) -> int:
        """The oldest version that a first token of the group has or may still get, at weight version `now`."""
        return min((m.oldest_version(now) for m in self.members if m.state != "failed"), default=now)

    def version_scored(self, now: int) -> int:
        """As `version`, but of the samples that are there already."""
        return min((m.outcome.version_first for m in self.members if m.state == "scored"), default=now)

    def ticket(self, index: int, run_seed: int) -> Ticket:
        """The newest ticket of member `index`."""
        member = self.members[index]
        task, row = (self.task, self.row) if self.purpose == "train" else self.exam[index // self.samples]
        seed = seed_of(self.purpose, run_seed, row, task)
        name = trajectory_id(self.id, index)
        noise = noise_of(run_seed, name, member.failures)
        return Ticket(name, self.id, member.attempt, row, seed, member.version, self.purpose, noise, task)

    def _expect(self, *states: GroupState) -> None:
        if self.state not in states:
            raise ValueError(f"group {self.id} is {self.state}, where only {' or '.join(states)} may be")

    def ends(self, term: int) -> list[SampleEnd]:
        """How all members end once its step is committed, in order."""
        return [self._end_of(i, m.fate or self.verdict, term) for i, m in enumerate(self.members)]

    def remembered(self) -> "Group":
        """The remainder of an ended group, for those that report on it again: which attempts ended, and how, without their figures."""
        known = [(m, UNKNOWN if m.outcome == UNKNOWN else NOTHING) for m in self.members]
        return msgspec.structs.replace(self, members=[Member(m.state, m.attempt, fate=m.fate, outcome=left) for m, left in known])

    def _end(self, fate: str, term: int = 0) -> list[SampleEnd]:
        ends = [self._end_of(i, fate, term) for i, m in enumerate(self.members) if m.state != "failed"]
        self.state = "ended"
        self.fate = fate
        return ends

    def _end_of(self, index: int, fate: str, term: int = 0) -> SampleEnd:
        member, is_trained = self.members[index], fate in TRAINED
        return SampleEnd(
            trajectory_id=trajectory_id(self.id, index),
            group_id=self.id,
            attempt=member.attempt,
            row=self.row,
            fate=fate,
            step=self.step if is_trained else 0,
            term=term if is_trained else 0,
            outcome=UNKNOWN if member.state == "running" else member.outcome,
            reason=member.reason,
            task=self.task,
        )


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """The numbers of the configuration that decide about groups."""

    group_size: int
    batch_groups: int
    steps: int
    run_seed: int
    max_attempts: int
    unbounded_batches: int
    ticket_ttl_s: float
    over_batch: bool = False
    """Advantages are taken over the batch, not within groups."""
    all_teach: bool = False
    """Groups without spread are trained too: they are kept near a reference."""
    extra_rollouts: int = 0
    """Members of a group beyond `group_size`, which is how many train."""
    cut_penalty: float = 0.0
    """Off the reward of a sample of which a turn was cut, before advantages."""
    max_barren_groups: int = LEAST_BARREN
    """Groups in a row that may come to nothing."""
    mixture: Mixture = field(default_factory=Mixture)


@dataclass
class Changes:
    """Content of a durable write: `groups` by id that changed, payloads to keep (bytes) or let go of (None), ends in their order."""

    groups: dict[str, None] = field(default_factory=dict)
    payloads: dict[str, bytes | None] = field(default_factory=dict)
    ends: list[SampleEnd] = field(default_factory=list)
    training: bool = False


def teach(groups: Sequence[Group], limits: GroupLimits) -> None:
    """Note which of the groups of a step teach, as the trainer's advantages have it."""
    rewards = [group.rewards(limits.cut_penalty) for group in groups]
    whole = has_spread([reward for rewards_G in rewards for reward in rewards_G])
    for group, rewards_G in zip(groups, rewards, strict=True):
        group.teaches = limits.all_teach or (whole if limits.over_batch else has_spread(rewards_G))


def limits_of(train: TrainSection, samples: SamplesSection, run: RunInfo, mixture: Mixture) -> GroupLimits:
    """As the configuration has them."""
    return GroupLimits(
        group_size=train.group_size,
        batch_groups=train.batch_groups,
        steps=run.steps,
        run_seed=run.seed,
        max_attempts=samples.max_attempts,
        unbounded_batches=samples.unbounded_batches,
        ticket_ttl_s=samples.ticket_ttl_s,
        extra_rollouts=samples.extra_rollouts,
        over_batch=train.advantage == "reinforce_pp",
        all_teach=train.kl_coef > 0,
        mixture=mixture,
        max_barren_groups=samples.max_barren_groups or max(LEAST_BARREN, BARREN_BATCHES * train.batch_groups),
        cut_penalty=train.overlong_penalty if train.overlong == "penalty" else 0.0,
    )
