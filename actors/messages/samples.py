"""Samples: how a trajectory is scored, and the SampleBuffer's protocol with environment managers and the trainer."""

import math
from array import array
from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

from rubato.actors.messages.generation import VersionSpan
from rubato.bus.message import Ack, Buffer, Message, Request

Purpose = Literal["train", "eval"]

PART_BYTES = 32 * 1024 * 1024
"""Half of what a frame may have."""

MOST_REWARD = 1e30
"""Training computes in float32, and statistics with squares: beyond this the weights would end as infinities."""


MOST_FIGURES = 64
"""Scores that a trajectory may have, and numbers of its environment's info."""

MOST_TEXT = 32_768
"""Characters that are kept of what one held-out rollout wrote; of a longer one its beginning and its end."""

SPREAD = 1e-6
"""A group whose rewards differ by less teaches nothing: its advantages are exactly zero."""


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether rewards differ enough to say which rollout was better: the one rule of what teaches, for buffer and trainer."""
    return max(rewards, default=0.0) - min(rewards, default=0.0) >= SPREAD


def flaw_of_reward(reward: float) -> Literal["", "not_finite", "out_of_range"]:
    """Why this can't be a reward."""
    if not math.isfinite(reward):
        return "not_finite"
    return "out_of_range" if abs(reward) > MOST_REWARD else ""


def shortened(text: str, most: int = MOST_TEXT) -> str:
    """`text`, or its first and last halves of `most` characters with a note of what is left out between them."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters left out …\n{text[len(text) - half :]}"


class Scores(Message, frozen=True):
    """One number without a flaw per reward function, in the order of `reward.functions`."""

    scores: tuple[float, ...]


class NotScored(Message, frozen=True):
    """A failure by its name, never a reward of 0. `reason` is `not_finite`, `out_of_range`, `wrong_type`, `wrong_length`, or a PoolError's."""

    reason: str
    detail: str


class Score(Request[Scores | NotScored], frozen=True):
    """Score one trajectory. `completions` are its assistant texts, turn by turn; `columns` is a MessagePack map of keyword columns."""

    idempotent: ClassVar[bool] = True
    trajectory_id: str
    completions: tuple[str, ...]
    columns: bytes
    task: str = ""
    """Whose reward functions are asked."""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """The right to run one trajectory, leased: renew it with RenewLeases or lose it to another attempt."""

    trajectory_id: str
    group_id: str
    attempt: int
    row: int
    """Of the task's data set; where it has none, how many groups of the task there were before."""
    seed: int
    """Seed of the environment: the same for every member of a group."""
    version: int
    """Weight version at admission: no token of the trajectory may be older."""
    purpose: Purpose = "train"
    noise: int = 0
    """Seed of the sampling: of run seed, trajectory and counted tries, so that an attempt that was lost draws the same tokens again."""
    task: str = ""
    """Name of the task, as the config's `tasks` has it; empty where it names none."""


MOST_LOGPROB, LEAST_LOGPROB = 1e-3, -100.0
"""Above the first is more than rounding; below the second, of a probability of 4e-44, no sampler draws a token."""


def flaw_of_logprobs(logprobs: bytes, num: int | None = None) -> str:
    """What makes these float32 log-probabilities none of `num` sampled tokens; empty where they may be."""
    if len(logprobs) % 4 or (num is not None and len(logprobs) != 4 * num):
        return f"the log-probabilities have {len(logprobs)} bytes, not 4 for each of {num} tokens"
    values = array("f", logprobs)
    if not _all_finite(logprobs, values):
        odd = next(value for value in values if not math.isfinite(value))
        return f"a log-probability is not finite ({odd:g})"
    if values and (most := max(values)) > MOST_LOGPROB:
        return f"a log-probability is {most:g}, above 0"
    if values and (least := min(values)) < LEAST_LOGPROB:
        return f"a log-probability is {least:g}, below {LEAST_LOGPROB:g}: no sampler draws such a token"
    return ""


def _all_finite(floats: bytes, values: "array[float]") -> bool:
    """A number is infinite or none only where the highest seven bits of its exponent are set, which nearly never is."""
    exponents = floats[3::4]
    if not exponents.count(0x7F) and not exponents.count(0xFF):
        return True
    return all(map(math.isfinite, values))


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """One contiguous token context. Arrays of equal length: int32 `tokens`, uint8 `mask` (1 = sampled), float32 `logprobs` (0 where not sampled)."""

    tokens: bytes
    mask: bytes
    logprobs: bytes
    spans: tuple[VersionSpan, ...]
    """Positions are token indices within this segment."""


class Trajectory(msgspec.Struct, frozen=True, array_like=True):
    """A finished, scored rollout."""

    ticket: Ticket
    segments: tuple[Segment, ...]
    reward: float
    """Sum of step rewards and of what the reward functions added; always finite."""
    turns: int
    truncated: bool
    wall_s: float
    temperature: float = 1.0
    """Its log-probabilities are of the distribution at this temperature; 0 is greedy, with log-probabilities at 1."""
    finish_reasons: tuple[str, ...] = ()
    """Of each turn: `stop` or `length`."""
    cut: bool = False
    """Some turn ended at its limit, where that was more than one token."""
    env_s: float = 0.0
    """Of `wall_s`, what resets and steps of the environment took."""
    scores: dict[str, float] = {}
    """What `reward` is the sum of: `env`, the step rewards, and what each reward function gave, by its name."""
    info: dict[str, float] = {}
    """The numbers of the environment's info, each the newest under its key. No more than `MOST_FIGURES`, and the same for `scores`."""
    text: str = ""
    """Of a held-out rollout: its turns, joined by newlines, `shortened`."""
    reason: str = ""
    """Why a rollout failed that is sent only to be read: then there are no log-probabilities, and `reward` says nothing."""
    reward_s: float = 0.0
    """Of `wall_s`, what the wait for its scores took."""

    @property
    def version_first(self) -> int:
        """The oldest weight version that sampled a token of it: age counts from that. Raises ValueError where nothing was sampled.

        It is the first, but where a turn went on at an engine that was behind, or several contexts were sampled at once.
        """
        versions = [span.version for segment in self.segments for span in segment.spans]
        if not versions:
            raise ValueError(f"trajectory {self.ticket.trajectory_id} has no first version: nothing of it was sampled")
        return min(versions)


class PolicyState(Message, frozen=True):
    """The newest weight version and the staleness bound; decided by the SampleBuffer alone, pushed as a hint to holders of tickets."""

    version: int
    alpha: int
    newest: int = -1
    """The newest version that can have sampled anything; -1 where it is not said."""


class Tickets(Message, frozen=True):
    """Reply to Admit: possibly empty when the wait ended; `closed` when the job will admit nothing more."""

    tickets: tuple[Ticket, ...]
    policy: PolicyState
    closed: bool = False
    issuer: int = 0
    """Incarnation of the sample buffer that issued them."""
    aside: bool = False
    """The asker is set aside: its environments fail while those of others do not, so it gets one ticket after ever longer pauses."""


class Admit(Request[Tickets], frozen=True):
    """Ask for up to `num` tickets; held back until at least one may be admitted or `wait_s` passed."""

    num: int
    holder: str
    """Actor name of the asker; its death returns its tickets."""
    incarnation: int
    wait_s: float = 10.0


class RenewLeases(Request[PolicyState], frozen=True):
    """Renew the leases of all that the holder runs (`trajectory_id`, `attempt`). A ticket of this incarnation that it leaves out was
    lost on its way, and is issued again."""

    idempotent: ClassVar[bool] = True
    held: tuple[tuple[str, int], ...]
    holder: str
    incarnation: int


class Cancel(Message, frozen=True):
    """Sample buffer → environment manager: nothing can come of these rollouts (`trajectory_id`, `attempt`) any more, so they end at once.

    A hint: one that is lost is sent again as the holder renews, and one that was wrong costs another attempt.
    """

    rollouts: tuple[tuple[str, int], ...]
    incarnation: int
    """Of the holder; no other is meant."""
    issuer: int
    """Incarnation of the sample buffer that sends it; tickets that a newer one issued are not meant."""


class Stored(Message, frozen=True):
    """Reply to Put and GiveUp, sent once durable. `fate` is empty while the sample may still train, else its named end."""

    fate: str
    policy: PolicyState
    aside: bool = False
    """As in Tickets."""


class Put(Request[Stored], frozen=True):
    """Hand a scored trajectory over. Acknowledged means durable; a refused attempt gets fate `superseded`."""

    idempotent: ClassVar[bool] = True
    trajectory: Trajectory


BAD_LOGPROBS = "bad_logprobs"
"""Why a rollout ended: an engine gave log-probabilities that are none. Its sample's reason has the detail too: engine and flaw."""


class GiveUp(Request[Stored], frozen=True):
    """A trajectory ended without a score. `retry` asks for another attempt; otherwise it is `failed` with `reason`."""

    idempotent: ClassVar[bool] = True
    ticket: Ticket
    reason: str
    """A named outcome: env_reset_failed, env_step_failed, env_timeout, env_bad_result, env_lost, no_worker, reward_failed,
    generation_failed, bad_logprobs, stale, cancelled, drained."""
    detail: str = ""
    retry: bool = False
    tokens: int = 0
    """Sampled by turns that were over, or that were to go on elsewhere."""
    turns: int = 0
    played: Trajectory | None = None
    """What was shown and sampled until then, to be read; no longer than a trajectory may be."""


class Term(Message, frozen=True):
    """The trainer's licence: only the newest term claims and commits. `bound` lists uncommitted steps to train again, oldest first."""

    term: int
    committed: int
    bound: tuple[int, ...]


class DrawTerm(Request[Term], frozen=True):
    """A starting trainer takes over; `at_least` is its checkpoint's term + 1. `step` is the checkpoint's step: it is committed if it was not yet."""

    at_least: int
    step: int


class Batch(Message, frozen=True):
    """Groups bound to `step`, oldest first."""

    step: int
    parts: tuple[Buffer, ...]
    """The groups as MessagePack, cut into pieces: together they may be larger than a frame."""
    receipt: bytes
    """For the checkpoint that covers the step: by it the SampleBuffer ends these samples should the Store forget them."""
    figures: dict[str, float] = {}
    """Metrics of the step from batch policies, for its row."""

    @classmethod
    def of(cls, step: int, groups: Sequence[Sequence[bytes]], receipt: bytes, figures: dict[str, float] | None = None) -> "Batch":
        """A batch of these `groups`, each of MessagePack-encoded Trajectory."""
        whole = memoryview(msgspec.msgpack.encode(groups))
        parts = tuple(Buffer(whole[at : at + PART_BYTES]) for at in range(0, len(whole), PART_BYTES))
        return cls(step, parts, receipt, figures or {})

    @property
    def groups(self) -> tuple[tuple[bytes, ...], ...]:
        """Each is a tuple of MessagePack-encoded Trajectory. Decoded anew each time."""
        return msgspec.msgpack.decode(b"".join(part.data for part in self.parts), type=tuple[tuple[bytes, ...], ...])


class NotReady(Message, frozen=True):
    """No batch before the wait ended; `why` names what is missing."""

    ready: int
    wanted: int
    why: str
    version: int = -1
    """Of a claim: the weights that its step would start from, as far as the SampleBuffer knows."""


class Claim(Request[Batch | NotReady], frozen=True):
    """Bind `groups` groups to `step`, or get the ones already bound to it. Held back up to `wait_s`."""

    idempotent: ClassVar[bool] = True
    step: int
    term: int
    groups: int
    wait_s: float = 10.0
    ess: float = 1.0
    """Share of effective samples in the batch of the step before; 1 where not known."""
    kl: float = 0.0
    """In nats, what ages added to KL(behaviour ‖ policy) in the step before; 0 where not known."""


class Advance(Request[PolicyState], frozen=True):
    """Step `step` was trained and its weights published as version `step`: frees its slots and admits fresh work."""

    idempotent: ClassVar[bool] = True
    step: int
    term: int


class StepRaised(Request[Ack], frozen=True):
    """Training on `step` raised `error`; counts once per term. A death of the trainer is not reported here, and does not count."""

    idempotent: ClassVar[bool] = True
    step: int
    term: int
    error: str


class Commit(Request[Ack], frozen=True):
    """A durable checkpoint covers every step up to `step`: their samples are `trained` for good."""

    idempotent: ClassVar[bool] = True
    step: int
    term: int


class EvalResult(Message, frozen=True):
    """What the held-out rollouts came to, every token of them sampled under `version`; the `failed` ones have no reward."""

    version: int
    rewards: tuple[tuple[float, ...], ...]
    """Of each held-out prompt, those of its rollouts that finished."""
    failed: int
    figures: dict[str, float] = {}
    """Means over the rollouts that finished, as `breakdown` names them."""
    tasks: tuple[str, ...] = ()
    """Of each held-out prompt, the name of its task; empty where tasks have none."""


class Evaluate(Request[EvalResult | NotReady], frozen=True):
    """Run up to `num` held-out prompts of each task under weight version `version`, each `samples` times. Asking again with the same
    `key` joins it; another key ends what is unfinished."""

    idempotent: ClassVar[bool] = True
    key: str
    num: int
    wait_s: float = 10.0
    version: int = 0
    samples: int = 1


class Close(Request[Ack], frozen=True):
    """The job reached its end: admit nothing more."""

    idempotent: ClassVar[bool] = True
