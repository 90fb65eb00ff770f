"""Plays one trajectory: reset, then turn by turn generate and step, then the score. Ends with a Trajectory or GaveUp, which a record judges."""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any

import msgspec

from actors.breakdown import numbers_of
from actors.config import EvalSection, RolloutSection
from actors.envs.chat import TOKEN_BYTES, Renderer, Transcript
from actors.envs.environment import Observation
from actors.envs.hosting import EnvFailure, EnvHost, HostedEnv, is_plain, sentence
from actors.envs.section import EnvSection
from actors.envs.templates import RenderError
from actors.messages.generation import NOT_ITS_TURN, Aborted, Completion, Generate, Sampling, Tokens
from actors.messages.samples import (
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
from bus.errors import AskFailed, Failed
from bus.message import well_formed
from planning.hopeless import RECENT, is_hopeless
from planning.staleness import is_stale
from runtime.courier import Ref
from runtime.observe.figures import Metrics, Waits

MAX_DETAIL = 300
"""Characters of a failure's own words that are shown."""

MOST_WORDS = 2_000
"""Characters of a failure's own words that are told."""

DIGITS = re.compile(r"\d+")

MAX_NOTICES = 5
"""Kinds of failure the user is told about; the log has all of them."""

WORKERS = "env.workers"
"""The stage in which a step waits for its worker to have time, named as the key that says how many there are."""

SHARES_AFTER = (8, RECENT)
"""After so many tasks the user is told which share of them failed."""

PROMPTS_KEPT = 4 * RECENT
"""Prompts remembered; one that still runs when so many began after it is forgotten."""


@dataclass(eq=False)
class GaveUp(Exception):
    """A rollout ended without a score; `retry` when another attempt may fare better."""

    reason: str
    detail: str = ""
    retry: bool = False
    failure: EnvFailure | None = None


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """What every rollout of a manager shares. `reward` is None where no reward functions are configured."""

    env: EnvSection
    rollout: RolloutSection
    host: EnvHost
    renderer: Renderer
    proxy: Ref
    reward: Ref | None
    policy: Callable[[], PolicyState]
    metrics: Metrics
    waits: Waits
    eval: EvalSection = field(default_factory=EvalSection)
    score_names: tuple[str, ...] = ()
    """Of the reward functions, in their order."""
    turns: AbstractContextManager[None] = field(default_factory=nullcontext)
    """Around the turns of each rollout; it is entered many times at once."""


class Rollout:
    """One attempt at one trajectory. `play` is called once."""

    def __init__(self, context: RolloutContext, ticket: Ticket) -> None:
        self._context = context
        self._ticket = ticket
        self._key = f"{ticket.trajectory_id}.{ticket.attempt}"
        held_out = ticket.purpose == "eval"
        section = context.eval if held_out else context.rollout
        greedy = held_out and context.eval.samples == 1
        self._sampling = Sampling(
            max_new_tokens=context.rollout.max_new_tokens,
            temperature=0.0 if greedy else section.temperature,
            top_p=1.0 if greedy else section.top_p,
            stop_token_ids=context.renderer.stop_token_ids,
            seed=ticket.noise,
            stop=context.renderer.stop_strings,
        )
        self._texts: list[str] = []
        self._finish_reasons: list[str] = []
        self._env_s = self._generate_s = 0.0
        self._entered: float | None = None
        """When its environment was last called, while that has not answered."""
        self._num_kept = 0
        self._is_stepping = False
        self._num_sampled = 0
        self._reward = 0.0
        self._num_invalid = 0
        self._truncated = False
        self._info: dict[str, Any] = {}
        self._transcript: Transcript | None = None

    @property
    def ticket(self) -> Ticket:
        """What it plays by."""
        return self._ticket

    @property
    def sampled(self) -> int:
        """Tokens of the turns that are over."""
        return self._num_kept

    @property
    def most(self) -> int:
        """Tokens that all of its turns together may sample."""
        limits = self._context.rollout
        return min(limits.max_len, limits.max_turns * limits.max_new_tokens)

    @property
    def generate_s(self) -> float:
        """What the turns that are over waited for their tokens."""
        return self._generate_s

    @property
    def away(self) -> bool:
        """It is in its environment."""
        return self._entered is not None

    def env_s(self, now: float) -> float:
        """What its environment took until now."""
        return self._env_s + (0.0 if self._entered is None else now - self._entered)

    def given_up(self, reason: str, detail: str = "", *, retry: bool) -> GiveUp:
        """What the sample buffer is told where no trajectory comes of it."""
        return GiveUp(self._ticket, reason, detail, retry, self._num_sampled, len(self._texts))

    def failed(self, end: GaveUp) -> GiveUp:
        """The same of one that failed, with what was played, so that somebody can read what it failed on."""
        told = self.given_up(end.reason, end.detail[:MOST_WORDS], retry=end.retry)
        if self._transcript is None or not self._num_kept:
            return told
        whole = self._trajectory(self._transcript)
        lean = tuple(msgspec.structs.replace(segment, logprobs=b"") for segment in whole.segments)
        why = f"{end.reason}: {end.detail[:MOST_WORDS]}" if end.detail else end.reason
        return msgspec.structs.replace(told, played=msgspec.structs.replace(whole, segments=lean, reason=why))

    async def play(self) -> Trajectory:
        """The scored trajectory. Raises GaveUp for every way it can end otherwise.

        Cancelled, it waits for nothing: its request ends between two decode steps, and what a worker process does is left or killed.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        env, observation = await self._reset()
        try:
            with self._context.turns:
                transcript = await self._play_turns(env, observation)
        except GaveUp:
            self._context.host.give_back(env, self._ticket.purpose)
            raise
        except asyncio.CancelledError:
            if self._is_stepping:
                await env.abandon()
            else:
                self._context.host.give_back(env, self._ticket.purpose)
            raise
        except EnvFailure as failure:
            await env.close()
            raise _given_up(failure) from failure
        except Exception:
            await env.close()
            raise
        self._context.host.give_back(env, self._ticket.purpose)
        asked = loop.time()
        scores = {"env": self._reward, **await self._score()}
        now = loop.time()
        return msgspec.structs.replace(
            self._trajectory(transcript),
            reward=sum(scores.values()), scores=scores, wall_s=now - began, reward_s=now - asked,
        )  # fmt: skip

    def _trajectory(self, transcript: Transcript) -> Trajectory:
        """What was played so far, without what only its end brings."""
        held_out = self._ticket.purpose == "eval"
        return Trajectory(
            ticket=self._ticket,
            segments=(transcript.segment(),),
            reward=0.0,
            turns=len(self._texts),
            truncated=self._truncated,
            wall_s=0.0,
            temperature=self._sampling.temperature,
            finish_reasons=tuple(self._finish_reasons),
            cut=self._sampling.max_new_tokens > 1 and "length" in self._finish_reasons,
            env_s=self._env_s,
            info=numbers_of(self._info),
            text=shortened("\n".join(self._texts)) if held_out else "",
        )

    async def _reset(self) -> tuple[HostedEnv, Observation]:
        context, ticket = self._context, self._ticket
        loop = asyncio.get_running_loop()
        self._entered = began = loop.time()
        try:
            with self._waiting("env.reset", f"env.reset_timeout_s={context.env.reset_timeout_s:g}"):
                env, observation, info = await context.host.begin(ticket.purpose, ticket.seed, self._told())
        except EnvFailure as failure:
            raise _given_up(failure) from failure
        self._env_s, self._entered = self._env_s + loop.time() - began, None
        self._info.update(info)
        return env, observation

    async def _play_turns(self, env: HostedEnv, observation: Observation) -> Transcript:
        context, limits = self._context, self._context.rollout
        with _rendered("reset"):
            transcript = self._transcript = Transcript(context.renderer.opening(observation))
        if len(transcript) + limits.max_new_tokens > limits.max_len:
            raise GaveUp(
                "generation_failed",
                f"the first prompt has {len(transcript)} tokens; rollout.max_len is {limits.max_len}",
            )
        loop = asyncio.get_running_loop()
        limit = f"env.step_timeout_s={context.env.step_timeout_s:g}"
        while True:
            self._check_age(transcript)
            tokens = await self._generate(transcript)
            text = context.renderer.decode(tokens.ids)
            self._texts.append(text)
            self._entered = entered = loop.time()
            self._is_stepping = True
            busy = nullcontext() if env.asynchronous else context.metrics.busy()
            with self._stepping(limit) as began, busy:
                observation, reward, terminated, truncated, info = await env.step(text, began)
            took_s, self._is_stepping = loop.time() - entered, False
            self._env_s, self._entered = self._env_s + took_s, None
            self._reward += reward
            if info:
                self._info.update(info)
                self._num_invalid += bool(info.get("invalid"))
            if terminated:
                return transcript
            if truncated or len(self._texts) >= limits.max_turns:
                self._truncated = True
                return transcript
            with _rendered("step"):
                shown = context.renderer.next_turn(observation, transcript)
            if len(transcript) + len(shown) // TOKEN_BYTES + limits.max_new_tokens > limits.max_len:
                self._truncated = True
                return transcript
            transcript.show(shown)

    def _check_age(self, transcript: Transcript) -> None:
        """The bound is checked at every turn: a trajectory that can no longer train frees its slot at once."""
        first = transcript.version_first
        if self._ticket.purpose == "eval" or first < 0:
            return
        policy = self._context.policy()
        if is_stale(first, policy.version, policy.alpha):
            age = policy.version - first
            raise GaveUp(
                "stale", f"age {age} after {len(self._texts)} turns; staleness.alpha is {policy.alpha}", retry=True
            )

    async def _generate(self, transcript: Transcript) -> Tokens:
        """The next turn, appended to `transcript`; an aborted request goes on from the tokens it has, under a new id.

        One that waited for its job's turn on a shared pool has not been tried.
        """
        limits, turn = self._context.rollout, len(self._texts)
        # A Store that lost its last seconds gives the same attempt out again: what it gets is no older than its own ticket.
        request_id = f"{self._key}v{self._ticket.version}.{turn}"
        prompt = transcript.prompt
        resumed, reason = Tokens(), ""
        tries = 0
        for attempt in count():
            request = Generate(
                request_id=request_id if attempt == 0 else f"{request_id}r{attempt}",
                session=self._ticket.trajectory_id,
                prompt=prompt,
                sampling=self._sampling,
                # Nothing older than what this trajectory began with: its age counts from there.
                min_version=max(self._ticket.version, transcript.version_first),
                resumed=resumed,
                exact=self._ticket.purpose == "eval",
                task=self._ticket.task,
                rollout=self._ticket.purpose != "eval",
            )
            reply = await self._ask_proxy(request)
            self._num_sampled += (len(reply.tokens.ids) - len(resumed.ids)) // TOKEN_BYTES
            if isinstance(reply, Completion):
                if found := flaw_of_logprobs(reply.tokens.logprobs, len(reply.tokens.ids) // TOKEN_BYTES):
                    raise GaveUp(BAD_LOGPROBS, f"{reply.engine} sent a completion in which {found}")
                try:
                    transcript.sample(reply.tokens)
                except ValueError as error:
                    raise GaveUp("generation_failed", f"{reply.engine} sent {error}", retry=True) from error
                self._finish_reasons.append(reply.finish_reason)
                self._num_kept += len(reply.tokens.ids) // TOKEN_BYTES
                return reply.tokens
            resumed, reason = reply.tokens, reply.reason
            self._check_age(transcript)
            tries += reason != NOT_ITS_TURN
            if tries == limits.generate_tries:
                break
        raise GaveUp("generation_failed", f"aborted {limits.generate_tries} times, lastly: {reason}", retry=True)

    async def _ask_proxy(self, request: Generate) -> Completion | Aborted:
        timeout_s = self._context.rollout.generate_timeout_s
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            with self._waiting("generate", f"rollout.generate_timeout_s={timeout_s:g}", "llm_proxy"):
                return await self._context.proxy.ask(request, timeout=timeout_s)
        except AskFailed as error:
            raise GaveUp("generation_failed", str(error), retry=not isinstance(error, Failed)) from error
        finally:
            self._generate_s += loop.time() - began

    async def _score(self) -> dict[str, float]:
        """What each reward function adds, by its name. The environment is no longer held here."""
        context = self._context
        if context.reward is None:
            return {}
        request = Score(self._key, tuple(self._texts), self._columns(), self._ticket.task)
        timeout_s = context.rollout.reward_timeout_s
        try:
            with self._waiting("score", f"rollout.reward_timeout_s={timeout_s:g}", "reward_service"):
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
            "seed": self._ticket.seed,
            "turns": len(self._texts),
            "invalid_turns": self._num_invalid,
            "truncated": self._truncated,
            "env_reward": self._reward,
            "finish_reasons": self._finish_reasons,
        }
        plain = {key: value for key, value in self._info.items() if isinstance(key, str) and is_plain(value)}
        try:
            return msgspec.msgpack.encode(plain | self._told() | columns)
        except UnicodeEncodeError:
            return msgspec.msgpack.encode(well_formed(plain) | self._told() | columns)

    def _told(self) -> dict[str, Any]:
        """Whose rollout it is, for the environment and the reward functions; keys as in TOLD."""
        ticket = self._ticket
        return {
            "task": ticket.task,
            "row": ticket.row,
            "purpose": ticket.purpose,
            "trajectory": ticket.trajectory_id,
            "version": ticket.version,
        }

    @contextmanager
    def _stepping(self, limit: str) -> Generator[Callable[[], None]]:
        """Waits for a worker, where it takes one, and steps from the call of what this gives."""
        context, loop = self._context, asyncio.get_running_loop()
        asked = since = loop.time()
        with ExitStack() as waiting:

            def began() -> None:
                nonlocal since
                since = loop.time()
                waiting.close()
                waiting.enter_context(self._waiting("env.step", limit))

            if context.host.pooled:
                waiting.enter_context(self._waiting(WORKERS, f"{WORKERS}={context.host.pool.size}"))
            yield began
        context.metrics.observe("env/step_s", loop.time() - since)
        if context.host.pooled:
            context.metrics.observe("env/worker_wait_s", since - asked)

    def _waiting(self, stage: str, limit: str, holder: str = "") -> AbstractContextManager[Any]:
        return self._context.waits.on(self._ticket.trajectory_id, stage=stage, holder=holder, limit=limit)


@contextmanager
def _rendered(method: str) -> Iterator[None]:
    """What can't be rendered is a wrong result of the environment's `method`."""
    try:
        yield
    except RenderError as error:
        what = f"returned an observation from {method} that can't be shown: {error}"
        raise EnvFailure("env_bad_result", method, what) from error


@dataclass(slots=True)
class _PromptRecord:
    """How the rollouts of one prompt fare: of a task at one seed."""

    running: int = 0
    good: int = 0
    failed: int = 0
    hung: bool = False


class RolloutRecord:
    """How tasks fared lately, in the order in which they began: failing is quicker than playing, so those that end first say little.

    Only failures that another attempt would meet again count: a lost worker or engine says nothing. Rollouts of a task fail together, so
    tasks are counted, each by the share of its rollouts that failed, and none before all that began before it are over. One that hangs counts
    at once: its other rollouts would take as long each.
    """

    def __init__(self, env: EnvSection, log: str) -> None:
        self._env = env
        self._log = log
        self._prompts: OrderedDict[tuple[str, int], _PromptRecord] = OrderedDict()
        self._ever_good = False
        self._noticed: set[tuple[str, str]] = set()
        self._shares_told = 0

    def begun(self, ticket: Ticket) -> None:
        """A rollout begins."""
        self._prompts.setdefault((ticket.group_id, ticket.row), _PromptRecord()).running += 1
        if len(self._prompts) > PROMPTS_KEPT:
            self._prompts.popitem(last=False)

    def good(self, ticket: Ticket) -> None:
        """A rollout got through."""
        self._ever_good = True
        self._over(ticket).good += 1

    def bad(self, ticket: Ticket, end: GaveUp) -> tuple[list[str], str]:
        """(notices, verdict): sentences for the user; the verdict, empty where there is none, ends the job."""
        task = self._over(ticket)
        if end.reason == "reward_failed" or (end.retry and end.reason != "crashed"):
            return [], ""  # the reward service judges its own functions
        task.failed += 1
        task.hung |= end.reason == "env_timeout"
        text, kind = self._described(ticket, end)
        known = kind in self._noticed or len(self._noticed) >= MAX_NOTICES
        self._noticed.add(kind)
        notices = [] if known else [text]
        shares = self._shares()
        of_last = (
            f"{sum(shares):.0f} of the last {len(shares)} tasks failed{' in their environment' if end.failure else ''}"
        )
        hung = sum(task.hung for task in self._prompts.values())
        if is_hopeless(shares, ever_good=self._ever_good, hung=hung):
            of_hung = f"{hung} tasks hung, and no rollout of any task got through"
            return notices, f"{text}. {of_last if is_hopeless(shares, ever_good=self._ever_good) else of_hung}"
        enough = self._shares_told < len(SHARES_AFTER) and len(shares) >= SHARES_AFTER[self._shares_told]
        if enough and self._ever_good and sum(shares) >= 1:
            self._shares_told += 1
            notices.append(f"{of_last}; the job goes on with the others")
        return notices, ""

    def _over(self, ticket: Ticket) -> _PromptRecord:
        prompt = self._prompts.get((ticket.group_id, ticket.row)) or _PromptRecord()
        prompt.running -= 1
        return prompt

    def _shares(self) -> list[float]:
        """The failed share of each of the newest tasks of which nothing runs, nor of any task before them."""
        over = takewhile(lambda prompt: prompt.running <= 0, self._prompts.values())
        shares = [prompt.failed / (prompt.failed + prompt.good) for prompt in over if prompt.failed or prompt.good]
        return shares[-RECENT:]

    def _described(self, ticket: Ticket, end: GaveUp) -> tuple[str, tuple[str, str]]:
        """The sentence, and what makes two failures the same to a reader."""
        which = f"task {ticket.task}, row {ticket.row}" if ticket.task else f"task {ticket.row}"
        if (failure := end.failure) is not None:
            text = sentence(self._env, failure, task=which, seed=ticket.seed, log=self._log)
            return text, (failure.outcome, failure.what.partition("(")[0])
        detail = " ".join(end.detail.split())[:MAX_DETAIL]
        text = f"a rollout ended as {end.reason} ({which}, seed {ticket.seed}): {detail}"
        return f"{text}. Log: {self._log}", (end.reason, DIGITS.sub("", detail))


def _given_up(failure: EnvFailure) -> GaveUp:
    return GaveUp(failure.outcome, failure.what, retry=failure.outcome in ("env_lost", "no_worker"), failure=failure)
