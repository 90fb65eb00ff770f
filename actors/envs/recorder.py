"""The record of one attempt at a trajectory: its tokens, how the next turn is asked for and how often, and what is handed over at its end."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from rubato.actors.config import EvalSection, RolloutSection
from rubato.actors.envs.chat import TOKEN_BYTES, Renderer, Transcript
from rubato.actors.envs.hosting import EnvFailure, is_plain
from rubato.actors.messages.generation import Completion, Generate, GenerateReply, NotItsTurn, Route, Sampling, Tokens, why_early
from rubato.actors.messages.samples import (
    BAD_LOGPROBS,
    GiveUp,
    NotScored,
    PolicyState,
    Score,
    Ticket,
    Trajectory,
    flaw_of_logprobs,
    shortened,
)
from rubato.actors.report.breakdown import numbers_of
from rubato.bus.errors import AskFailed, Failed
from rubato.bus.message import well_formed
from rubato.planning.engine_info import WeightsNeed
from rubato.planning.staleness import is_stale
from rubato.runtime.courier import Ref
from rubato.runtime.observe.figures import Waits

MOST_WORDS = 2_000
"""Characters of a failure's own words that go to the sample buffer."""


@dataclass(eq=False)
class GaveUp(Exception):
    """The end of a rollout without a score; `retry` when another attempt may fare better."""

    reason: str
    detail: str = ""
    retry: bool = False
    failure: EnvFailure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderContext:
    """Parts that all recorders of one task share. `reward` is None where no reward functions are configured."""

    rollout: RolloutSection
    eval: EvalSection
    renderer: Renderer
    proxy: Ref
    policy: Callable[[], PolicyState]
    waits: Waits
    reward: Ref | None = None
    score_names: tuple[str, ...] = ()
    """Names of the reward functions, in their order."""


class Recorder:
    """One trajectory while it is made. A driver opens a context, lets the policy speak in it, and shows it what comes between.

    The token ids, log-probabilities and versions are those that engines sent: nothing is tokenised again. A trajectory may have
    several contexts, each of which becomes a segment, and their turns may be generated at once. `reward` and further `parts` of it by name,
    `info`, `num_invalid` and `truncated` are the driver's to write.
    """

    def __init__(self, context: RecorderContext, ticket: Ticket) -> None:
        self.ticket = ticket
        self.transcripts: list[Transcript] = []
        self.texts: list[str] = []
        """Text of each turn that is over."""
        self.finish_reasons: list[str] = []
        """Why each of them ended."""
        self.reward = 0.0
        self.parts: dict[str, float] = {}
        self.info: dict[str, Any] = {}
        self.num_invalid = 0
        self.truncated = False
        self.generate_s = 0.0
        """Seconds that the turns which are over waited for their tokens."""
        self.sampled = 0
        """Tokens of the turns that are over."""
        self._context = context
        self.key = f"{ticket.trajectory_id}.{ticket.attempt}"
        """Names its requests, which have one answer however often they are asked. A driver that may ask others next time makes it its own."""
        held_out = ticket.purpose == "eval"
        section = context.eval if held_out else context.rollout
        greedy = held_out and context.eval.samples == 1
        self.sampling = Sampling(
            max_new_tokens=context.rollout.max_new_tokens,
            temperature=0.0 if greedy else section.temperature,
            top_p=1.0 if greedy else section.top_p,
            stop_token_ids=context.renderer.stop_token_ids,
            seed=ticket.noise,
            stop=context.renderer.stop_strings,
        )
        self._num_asked = self._num_sampled = 0
        self._env_s = 0.0
        self._entered: float | None = None

    @property
    def most(self) -> int:
        """Upper bound of the tokens that all turns together may sample."""
        limits = self._context.rollout
        return min(limits.max_len, limits.max_turns * limits.max_new_tokens)

    @property
    def away(self) -> bool:
        """True while the driver is in its environment."""
        return self._entered is not None

    def env_s(self, now: float) -> float:
        """Seconds that the environment took until `now`."""
        return self._env_s + (0.0 if self._entered is None else now - self._entered)

    @contextmanager
    def outside(self) -> Generator[None]:
        """A stretch that the driver spends in its environment."""
        loop = asyncio.get_running_loop()
        self._entered = loop.time()
        try:
            yield
        finally:
            self._env_s, self._entered = self.env_s(loop.time()), None

    def waiting(self, stage: str, limit: str, holder: str = "") -> AbstractContextManager[Any]:
        """A wait of this trajectory, as the monitor shows it."""
        return self._context.waits.on(self.ticket.trajectory_id, stage=stage, holder=holder, limit=limit)

    def identity(self) -> dict[str, Any]:
        """Whose trajectory it is, for environments and reward functions; keys as in hosting.TOLD."""
        ticket = self.ticket
        return {
            "task": ticket.task,
            "row": ticket.row,
            "purpose": ticket.purpose,
            "trajectory": ticket.trajectory_id,
            "version": ticket.version,
        }

    def open(self, prompt: bytes) -> Transcript:
        """A new context that begins with `prompt`. Raises GaveUp where no turn fits behind it."""
        transcript = Transcript(prompt)
        self.transcripts.append(transcript)
        if not self.fits(transcript):
            raise GaveUp(
                "generation_failed", f"the first prompt has {len(transcript)} tokens; rollout.max_len is {self._context.rollout.max_len}"
            )
        return transcript

    def fits(self, transcript: Transcript, shown: bytes = b"") -> bool:
        """Whether a turn may follow once the token ids `shown` were appended."""
        limits = self._context.rollout
        return len(transcript) + len(shown) // TOKEN_BYTES + limits.max_new_tokens <= limits.max_len

    async def generate(self, transcript: Transcript) -> str:
        """Text of the next turn; see `complete`."""
        return (await self.complete(transcript, self.sampling))[0]

    async def complete(self, transcript: Transcript, sampling: Sampling) -> tuple[str, Completion]:
        """Text of the next turn, and what the engine sent, which is appended to `transcript`. Raises GaveUp, also where that is too old to train.

        A request that ended as Aborted goes on from the tokens it has, under a new id, `generate_tries` times in all. NotItsTurn does not
        count: nothing was tried.
        """
        limits, turn = self._context.rollout, self._num_asked
        self._num_asked += 1
        # A Store that lost its last seconds gives the same attempt out again: what it gets is no older than its own ticket.
        request_id = f"{self.key}v{self.ticket.version}.{turn}"
        prompt = transcript.prompt
        resumed, tries, is_eval = Tokens(), 0, self.ticket.purpose == "eval"
        loop, waited_s = asyncio.get_running_loop(), 0.0
        self.check_age()
        for attempt in count():
            request = Generate(
                request_id=request_id if attempt == 0 else f"{request_id}r{attempt}",
                session=self.ticket.trajectory_id,
                prompt=prompt,
                sampling=sampling,
                # Nothing older than what its other turns began with: its age counts from the oldest.
                weights=WeightsNeed(max(self.ticket.version, self._version_first), exact=is_eval),
                resumed=resumed,
                route=Route(self.ticket.task, rollout=not is_eval),
            )
            asked = loop.time()
            reply = await self._ask_proxy(request)
            waited_s += loop.time() - asked
            self._num_sampled += (len(reply.tokens.ids) - len(resumed.ids)) // TOKEN_BYTES
            # Not where the engine went back, since a trainer began again with its checkpoint: what is too old is sampled anew.
            is_new = all(span.version >= self.ticket.version for span in reply.tokens.spans)
            if is_new and isinstance(reply, Completion):
                self.generate_s += waited_s
                return self._append(transcript, reply), reply
            resumed = reply.tokens if is_new else Tokens()
            self.check_age()
            tries += not isinstance(reply, NotItsTurn)
            if tries == limits.generate_tries:
                raise GaveUp("generation_failed", f"aborted {tries} times, lastly: {why_early(reply)}", retry=True)
        raise AssertionError

    async def finish(self, began: float) -> Trajectory:
        """The scored trajectory, which began at the loop's time `began`. Raises GaveUp where it can't be scored."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        scores = {"env": self.reward, **self.parts, **await self._score()}
        now = loop.time()
        return msgspec.structs.replace(
            self._trajectory(), reward=sum(scores.values()), scores=scores, wall_s=now - began, reward_s=now - asked
        )

    def given_up(self, reason: str, detail: str = "", *, retry: bool) -> GiveUp:
        """The message to the sample buffer where no trajectory comes of the attempt."""
        return GiveUp(self.ticket, reason, detail, retry, self._num_sampled, len(self.texts))

    def failed(self, end: GaveUp) -> GiveUp:
        """The same of an attempt that failed, with what was played, for its user to read."""
        message = self.given_up(end.reason, end.detail[:MOST_WORDS], retry=end.retry)
        if not self.sampled:
            return message
        whole = self._trajectory()
        lean = tuple(msgspec.structs.replace(segment, logprobs=b"") for segment in whole.segments)
        why = f"{end.reason}: {end.detail[:MOST_WORDS]}" if end.detail else end.reason
        return msgspec.structs.replace(message, played=msgspec.structs.replace(whole, segments=lean, reason=why))

    @property
    def _version_first(self) -> int:
        return min((each.version_first for each in self.transcripts if each.version_first >= 0), default=-1)

    @property
    def version_last(self) -> int:
        """The newest weights that its ticket promised it or that sampled it."""
        return max(self.ticket.version, *(each.version_last for each in self.transcripts), -1)

    def check_age(self) -> None:
        """Raises GaveUp for what is too old to train. Checked at every turn: such a trajectory frees its slot at once."""
        first = self._version_first
        if self.ticket.purpose == "eval" or first < 0:
            return
        policy = self._context.policy()
        if is_stale(first, policy.version, policy.alpha):
            age = policy.version - first
            raise GaveUp("stale", f"age {age} after {len(self.texts)} turns; staleness.alpha is {policy.alpha}", retry=True)

    async def _ask_proxy(self, request: Generate) -> GenerateReply:
        timeout_s = self._context.rollout.generate_timeout_s
        try:
            with self.waiting("generate", f"rollout.generate_timeout_s={timeout_s:g}", "llm_proxy"):
                return await self._context.proxy.ask(request, timeout=timeout_s)
        except AskFailed as error:
            raise GaveUp("generation_failed", str(error), retry=not isinstance(error, Failed)) from error

    def _append(self, transcript: Transcript, reply: Completion) -> str:
        num = len(reply.tokens.ids) // TOKEN_BYTES
        if flaw := flaw_of_logprobs(reply.tokens.logprobs, num):
            raise GaveUp(BAD_LOGPROBS, f"{reply.engine} sent a completion in which {flaw}")
        try:
            transcript.sample(reply.tokens)
        except ValueError as error:
            raise GaveUp("generation_failed", f"{reply.engine} sent {error}", retry=True) from error
        self.finish_reasons.append(reply.finish_reason)
        self.sampled += num
        self.texts.append(self._context.renderer.decode(reply.tokens.ids))
        return self.texts[-1]

    async def _score(self) -> dict[str, float]:
        """Scores by the name of their reward function."""
        context = self._context
        if context.reward is None:
            return {}
        request = Score(self.key, tuple(self.texts), self._columns(), self.ticket.task)
        timeout_s = context.rollout.reward_timeout_s
        try:
            with self.waiting("score", f"rollout.reward_timeout_s={timeout_s:g}", "reward_service"):
                reply = await context.reward.ask(request, timeout=timeout_s)
        except AskFailed as error:
            raise GaveUp("reward_failed", str(error), retry=not isinstance(error, Failed)) from error
        if isinstance(reply, NotScored):
            raise GaveUp("reward_failed", f"{reply.reason}: {reply.detail}")
        # A reward service of the user's own may have more to say than there are functions.
        names = [*context.score_names, *(f"score_{at}" for at in range(len(context.score_names), len(reply.scores)))]
        return dict(zip(names, reply.scores, strict=False))

    def _columns(self) -> bytes:
        """For the reward functions, as MessagePack: what can be sent of the environment's info, and ours, which no key of it replaces."""
        columns = {
            "seed": self.ticket.seed,
            "turns": len(self.texts),
            "invalid_turns": self.num_invalid,
            "truncated": self.truncated,
            "env_reward": self.reward,
            "finish_reasons": self.finish_reasons,
        }
        plain = {key: value for key, value in self.info.items() if isinstance(key, str) and is_plain(value)}
        try:
            return msgspec.msgpack.encode(plain | self.identity() | columns)
        except UnicodeEncodeError:
            return msgspec.msgpack.encode(well_formed(plain) | self.identity() | columns)

    def _trajectory(self) -> Trajectory:
        """The trajectory so far, without what only its end brings."""
        held_out = self.ticket.purpose == "eval"
        return Trajectory(
            ticket=self.ticket,
            segments=tuple(each.segment() for each in self.transcripts),
            reward=0.0,
            turns=len(self.texts),
            truncated=self.truncated,
            wall_s=0.0,
            temperature=self.sampling.temperature,
            finish_reasons=tuple(self.finish_reasons),
            cut=self.sampling.max_new_tokens > 1 and "length" in self.finish_reasons,
            env_s=self._env_s,
            info=numbers_of(self.info),
            text=shortened("\n".join(self.texts)) if held_out else "",
        )
