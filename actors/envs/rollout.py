"""A rollout: an environment plays one trajectory turn by turn, a recorder keeps it; and how the rollouts of a task fare."""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

from rubato.actors.envs.hosting import EnvFailure, EnvHost, HostedEnv, sentence
from rubato.actors.envs.recorder import GaveUp, Recorder, RecorderContext
from rubato.actors.envs.section import EnvSection
from rubato.actors.envs.templates import RenderError
from rubato.actors.messages.samples import Ticket, Trajectory
from rubato.planning.failures import RECENT, is_hopeless
from rubato.runtime.actor import Actor, Handles
from rubato.runtime.observe.figures import Metrics

if TYPE_CHECKING:
    from rubato.actors.envs.environment import Observation
    from rubato.actors.envs.rollout import Rollout

MAX_DETAIL = 300
"""Characters of a failure's own words that are shown."""

DIGITS = re.compile(r"\d+")

MAX_NOTICES = 5
"""Kinds of failure that are shown to the user; the log has all of them."""

WORKERS = "env.workers"
"""The stage in which a step waits for its worker to have time, named as the key that says how many there are."""

SHARES_AFTER = (8, RECENT)
"""Numbers of tasks after which the user reads which share of them failed."""

PROMPTS_KEPT = 4 * RECENT
"""Prompts remembered; one that still runs when so many began after it is forgotten."""


class Driver(Protocol):
    """Player of one trajectory against the policy: the loop of an environment, or an agent that asks by itself."""

    async def drive(self, recorder: Recorder) -> None:
        """Open contexts in `recorder` and generate in them until the episode is over. Raises GaveUp for every way it can end otherwise.

        Cancelled, it waits for nothing.
        """
        ...


class Rollout:
    """One attempt at one trajectory: a recorder and what drives it. `play` is called once."""

    def __init__(self, recorder: Recorder, driver: Driver) -> None:
        self.recorder = recorder
        self.driver = driver

    async def play(self) -> Trajectory:
        """The scored trajectory. Raises GaveUp for every way it can end otherwise."""
        began = asyncio.get_running_loop().time()
        await self.driver.drive(self.recorder)
        return await self.recorder.finish(began)


class RolloutHook(Handles):
    """A mechanism's view of the rollouts of one manager. Subclass it and override what is wanted; messages that it has handlers for
    (`@handler`) are the manager's to take.

    `actors/plugins.py` says which there are, and what makes a job have them: a section of the config, or the first message of a type.
    """

    def __init__(self, manager: Actor, playing: Callable[[], "Iterable[Rollout]"]) -> None:
        """`playing()` gives the rollouts that play at the moment."""
        self.manager = manager
        self.playing = playing

    def driver(self, context: "RolloutContext") -> Driver | None:
        """The driver of a rollout in place of the environment's loop; None: that loop."""
        return None

    def turns(self) -> AbstractContextManager[None]:
        """Around the turns of one rollout, from before its first to after its last; entered by many at once."""
        return nullcontext()

    def ended(self, rollout: "Rollout", *, whole: bool) -> None:
        """After a rollout played; `whole` where a trajectory came of it."""

    def peers_changed(self) -> None:
        """After an actor of the job became ready or went away."""

    async def run(self) -> None:
        """The hook's work beside rollouts, as a task of the manager."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext(RecorderContext):
    """Things that all rollouts of one task share, its environments included."""

    env: EnvSection
    host: EnvHost
    metrics: Metrics
    hooks: Sequence[RolloutHook] = ()

    def rollout_of(self, ticket: Ticket) -> Rollout:
        """A rollout by `ticket`."""
        drivers = (driver for hook in self.hooks if (driver := hook.driver(self)) is not None)
        return Rollout(Recorder(self, ticket), next(drivers, None) or EnvDriver(self))


class EnvDriver:
    """The loop of an environment: reset, then generate and step in turn."""

    def __init__(self, context: RolloutContext) -> None:
        self._context = context
        self._is_stepping = False

    async def drive(self, recorder: Recorder) -> None:
        """One episode, at whose end the environment is free for another rollout.

        Cancelled, it waits for nothing: its request ends between two decode steps, and what a worker process does is left or killed.
        """
        host, purpose = self._context.host, recorder.ticket.purpose
        env, observation = await self._reset(recorder)
        try:
            with ExitStack() as hooks:
                for hook in self._context.hooks:
                    hooks.enter_context(hook.turns())
                await self._play_turns(recorder, env, observation)
        except GaveUp:
            host.give_back(env, purpose)
            raise
        except asyncio.CancelledError:
            if self._is_stepping:
                await env.abandon()
            else:
                host.give_back(env, purpose)
            raise
        except EnvFailure as failure:
            await env.close()
            raise _given_up(failure) from failure
        except Exception:
            await env.close()
            raise
        host.give_back(env, purpose)

    async def _reset(self, recorder: Recorder) -> "tuple[HostedEnv, Observation]":
        context, ticket = self._context, recorder.ticket
        limit = f"env.reset_timeout_s={context.env.reset_timeout_s:g}"
        try:
            with recorder.outside(), recorder.waiting("env.reset", limit):
                env, observation, info = await context.host.begin(ticket.purpose, ticket.seed, recorder.identity())
        except EnvFailure as failure:
            raise _given_up(failure) from failure
        recorder.info.update(info)
        return env, observation

    async def _play_turns(self, recorder: Recorder, env: HostedEnv, observation: "Observation") -> None:
        renderer, max_turns = self._context.renderer, self._context.rollout.max_turns
        with _rendered("reset"):
            opening = renderer.opening(observation)
        transcript = recorder.open(opening)
        while True:
            text = await recorder.generate(transcript)
            observation, terminated, truncated = await self._step(recorder, env, text)
            if terminated:
                return
            recorder.truncated = truncated or len(recorder.texts) >= max_turns
            if recorder.truncated:
                return
            with _rendered("step"):
                shown = renderer.next_turn(observation, transcript)
            recorder.truncated = not recorder.fits(transcript, shown)
            if recorder.truncated:
                return
            transcript.show(shown)

    async def _step(self, recorder: Recorder, env: HostedEnv, text: str) -> "tuple[Observation, bool, bool]":
        """(observation, terminated, truncated) of one step, whose reward and info are the recorder's."""
        busy = nullcontext() if env.asynchronous else self._context.metrics.busy()
        self._is_stepping = True
        with recorder.outside(), self._stepping(recorder) as began, busy:
            observation, reward, terminated, truncated, info = await env.step(text, began)
        self._is_stepping = False
        recorder.reward += reward
        if info:
            recorder.info.update(info)
            recorder.num_invalid += bool(info.get("invalid"))
        return observation, terminated, truncated

    @contextmanager
    def _stepping(self, recorder: Recorder) -> Generator[Callable[[], None]]:
        """Waits for a worker, where it takes one, and steps from the call of what this gives."""
        context, loop = self._context, asyncio.get_running_loop()
        limit = f"env.step_timeout_s={context.env.step_timeout_s:g}"
        asked = since = loop.time()
        with ExitStack() as waiting:

            def began() -> None:
                nonlocal since
                since = loop.time()
                waiting.close()
                waiting.enter_context(recorder.waiting("env.step", limit))

            if context.host.pooled:
                waiting.enter_context(recorder.waiting(WORKERS, f"{WORKERS}={context.host.pool.size}"))
            yield began
        context.metrics.observe("env/step_s", loop.time() - since)
        if context.host.pooled:
            context.metrics.observe("env/worker_wait_s", since - asked)


@contextmanager
def _rendered(method: str) -> Iterator[None]:
    """A block in which an error of rendering counts as a wrong result of the environment's `method`."""
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
        of_last = f"{sum(shares):.0f} of the last {len(shares)} tasks failed{' in their environment' if end.failure else ''}"
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
