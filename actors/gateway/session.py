"""One session: a trajectory whose turns an agent asks for by itself, over HTTP, until it is complete, or over otherwise."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import msgspec

from rubato.actors.config import RESERVED_SCORES
from rubato.actors.envs.calls import MOST_CALLS, Said, said_in
from rubato.actors.envs.chat import TOKEN_BYTES, Renderer, Transcript
from rubato.actors.envs.recorder import GaveUp, Recorder
from rubato.actors.envs.templates import RenderError
from rubato.actors.gateway.deadlines import Block, Deadlines
from rubato.actors.gateway.forest import Ended, Forest, Message, Place
from rubato.actors.gateway.renderers import opening_of, read_turn
from rubato.actors.messages.generation import Completion, Sampling
from rubato.actors.messages.samples import flaw_of_reward
from rubato.runtime.errors import first_cause
from rubato.runtime.pool.values import clean

OverCode = Literal["stale", "expired", "complete", "cancelled", "failed"]

MOST_TURNS = 4096
"""Of one session."""

MOST_PARTS = 32
"""Of a reward."""

LONGEST_NAME = 64
"""Characters of one's name."""

MOST_AT_ONCE = 64
"""Requests of one session that are under way."""

MOST_ERROR = 2000
"""Characters of an agent's own words on why it failed."""

KEY_PREFIX = "rbt-"
"""Of sessions' keys."""

SHORT = 16 * 1024
"""Characters of messages that are rendered at once: more is done in a thread, while the actor answers others."""

Offload = Callable[..., Any]
"""The actor's."""


class SessionOver(Exception):
    """Nothing can be asked in the session any more."""

    status = 410
    kind = "session_over"

    def __init__(self, code: OverCode) -> None:
        super().__init__(f"the session is over: {code}")
        self.code: OverCode = code


class Refused(Exception):
    """A request that can't be answered, which ends nothing: HTTP status, code, and the sentence."""

    def __init__(self, status: int, code: str, why: str) -> None:
        super().__init__(why)
        self.status, self.code = status, code

    @property
    def kind(self) -> str:
        """As OpenAI's API sorts errors."""
        return "server_error" if self.status >= 500 else "invalid_request_error"


class Ending(msgspec.Struct, frozen=True):
    """How an agent ends its session; the body of POST /sessions/{id}/complete."""

    reward: float | None = None
    rewards: dict[str, float] | None = None
    """In its place its parts, by name."""
    answer: str | None = None
    """What the environment scores, in place of the last turn's text, where there is no reward."""
    error: str | None = None
    """There is no trajectory, and why."""

    @property
    def total(self) -> float | None:
        """The reward, if it has one."""
        return sum(self.rewards.values()) if self.rewards else self.reward

    @property
    def digest(self) -> bytes:
        """By which it is known again; an answer may have megabytes."""
        return blake2b(msgspec.json.encode(self, order="sorted"), digest_size=16).digest()


class Wanted(NamedTuple):
    """How a client would have a turn sampled. In a session that is the run's to say."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    penalties: bool = False
    """For what was said before."""


class Ask(NamedTuple):
    """One request for a turn."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    """Answers, each a turn of its own behind the same history."""
    most_calls: int = MOST_CALLS
    """Of tools, in one turn; what is beyond them stays text."""
    forced: tuple[str, ...] = ()
    """Tools of which the turn is made to begin with a call of one."""
    wanted: Wanted = Wanted()
    stop_token_ids: tuple[int, ...] = ()

    def ends(self, ids: tuple[int, ...], texts: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Token ids and texts that end the turn, where these are the template's own."""
        return tuple(dict.fromkeys((*ids, *self.stop_token_ids))), (*texts, *self.stop)


class AskTokens(NamedTuple):
    """One request for a turn behind tokens that its client made."""

    prompt: bytes
    """int32 ids."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    own_ends: bool = False
    """Only `stop` and `stop_token_ids` end a turn, not the template's own ends."""
    n: int = 1
    wanted: Wanted = Wanted()

    def ends(self, ids: tuple[int, ...], texts: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """As Ask has them."""
        ids, texts = ((), ()) if self.own_ends else (ids, texts)
        return tuple(dict.fromkeys((*ids, *self.stop_token_ids))), (*texts, *self.stop)


class Prompt(NamedTuple):
    """What a turn is sampled behind."""

    place: Place
    shown: bytes
    """Token ids that are new behind the place."""
    opening: bytes = b""
    """Those at their end that begin the turn itself."""
    renderer: Renderer | None = None
    """Of the messages; None where there are none."""

    @property
    def num(self) -> int:
        """Tokens of all that is before the turn's first sampled one."""
        return self.place.num_kept + len(self.shown) // TOKEN_BYTES


class Sampled(NamedTuple):
    """A turn as the engine sent it."""

    transcript: Transcript
    prompt: bytes
    """int32 ids before it."""
    text: str
    completion: Completion


@dataclass(frozen=True)
class Answer:
    """A sampled turn, as its client is told."""

    said: Said
    completion: Completion
    num_prompt: int
    prompt: bytes
    """int32 ids."""
    stop: str = ""
    """Of the texts that were to end it, the one that did."""

    @property
    def num_sampled(self) -> int:
        return len(self.completion.tokens.ids) // TOKEN_BYTES

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.said.calls else self.completion.finish_reason


def public_name(session_id: str) -> str:
    """Of a session in requests to engines, and so in logs: its id is as good as its key."""
    return blake2b(session_id.encode(), digest_size=6).hexdigest()


class Session:
    """A Driver (actors/envs/rollout.py) that only waits: requests come from the server, each in a task of its own."""

    def __init__(
        self,
        renderer: Callable[[Sequence[Mapping[str, Any]]], Any],
        *,
        offload: Offload,
        idle_s: float | None,
        max_len: int,
        within: Deadlines | None = None,
        trains_all: bool = False,
        rerenders: bool = False,
        score_names: Sequence[str] = (),
    ) -> None:
        """`renderer(tools)` is an awaitable of the renderer for these tools. Without a request for `idle_s` the session expires, with None it
        does not; a turn ends `within` these, and a context has at most `max_len` tokens.
        `trains_all`: contexts that did not lead to the last turn are trained too. `rerenders`: a turn whose history the renderer shows by
        other tokens than those that were kept begins a context, with the others. `score_names` are those of reward functions.
        """
        self.id, self.key = secrets.token_hex(12), f"{KEY_PREFIX}{secrets.token_urlsafe(24)}"
        self.forest = Forest()
        self._trains_all = trains_all
        self._rerenders = rerenders
        self._taken = RESERVED_SCORES.union(score_names)
        self.over: OverCode | None = None
        self.metadata: Any = None
        self.rewarded = False
        """Whether the agent said its reward itself."""
        self.answer = ""
        """What it ended with: the text of the turn that was asked for last, unless it says another."""
        self._renderer, self._offload, self._idle_s, self._max_len = renderer, offload, idle_s, max_len
        self._within = within or Deadlines(None)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._settled = asyncio.Event()
        self.ending: bytes | None = None
        """The digest of the one that counts, of an agent that ended it."""
        self.fate: str | None = None
        """What the sample buffer says of it: empty while it may train."""
        self.num_unused = 0
        """Contexts that are not trained, since they did not lead to the last turn."""
        self._recorder: Recorder | None = None
        self._driving: asyncio.Task[Any] | None = None
        self._heard_at = asyncio.get_running_loop().time()
        self._asking = 0
        self._limits: dict[Block, None] = {}
        """Of requests under way: what ends them."""
        self._quiet = asyncio.Event()
        """Set while none is under way."""
        self._quiet.set()
        self._num_asked = self._num_sampled = self._answered = 0
        """Requests, turns sampled for them, and the request whose turn is the answer."""
        self._num_choices = 0
        self._forced: tuple[Any, bytes] | None = None
        """Which call was forced last, and how it begins."""

    @property
    def recorder(self) -> Recorder:
        assert self._recorder is not None
        return self._recorder

    def begin(self, recorder: Recorder) -> None:
        """Its ticket is there."""
        # A Store that lost its last seconds gives the same attempt out again, and another agent may say something else.
        recorder.key += f".{public_name(self.id)}"
        self._recorder = recorder

    # -- as a driver ------------------------------------------------------------------------------------------------

    async def drive(self, recorder: Recorder) -> None:
        """Until the agent says that it is complete. Raises GaveUp where the session ends otherwise."""
        self._driving = asyncio.current_task()
        try:
            await self._until_idle()
            if not self._ended.done():
                self._end("expired")
                raise GaveUp("agent_left", f"no request for {self._idle_s:g} s", retry=True)
            await self._ended
        finally:
            self._end(self._why_cancelled())
        await self._quiet.wait()  # else what is sampled from here on would be trained, and not be scored
        if not self.forest.turns:
            raise GaveUp("agent_idle", "the session was completed without a turn")
        num, recorder.transcripts = len(recorder.transcripts), self.carrying()
        carrying = {*recorder.transcripts}
        turns = [turn for turn in self.forest.turns if turn.transcript in carrying]  # reward functions see what is trained
        recorder.texts = [turn.text for turn in turns]
        recorder.finish_reasons = [turn.finish_reason for turn in turns]
        if num_unused := num - len(recorder.transcripts):
            self.num_unused = recorder.info["unused_contexts"] = num_unused

    async def _until_idle(self) -> None:
        """Return once it has ended, or no request came for `idle_s`."""
        loop, left_s = asyncio.get_running_loop(), self._idle_s
        while not self._ended.done() and (left_s is None or left_s > 0):
            await asyncio.wait((self._ended,), timeout=left_s)
            if self._idle_s is not None:
                left_s = self._idle_s if self._asking else self._heard_at + self._idle_s - loop.time()

    def carrying(self) -> list[Transcript]:
        """Contexts that would carry the reward if the session ended now."""
        if self._trains_all or not self.forest.turns:
            return [*self.recorder.transcripts]
        return self.forest.carrying(self.forest.last)

    def _why_cancelled(self) -> OverCode:
        """Where the sample buffer ends it: nothing can come of it, mostly for its age."""
        try:
            self.recorder.check_age()
        except GaveUp:
            return "stale"
        return "cancelled"

    # -- what the agent asks ----------------------------------------------------------------------------------------

    async def turns(self, ask: Ask | AskTokens) -> tuple[Answer, ...]:
        """The next turn of the agent's conversation, or `n` that follow the same history. Raises SessionOver and Refused."""
        self._check_open()
        if len(self.forest.turns) + self._asking + ask.n > MOST_TURNS:
            raise Refused(400, "too_many_turns", f"a session has at most {MOST_TURNS} turns")
        if self._asking + ask.n > MOST_AT_ONCE:
            raise Refused(429, "too_many_requests", f"{self._asking} requests of this session are under way already")
        self._asking += ask.n
        self._num_asked += 1
        number = self._num_asked
        self._quiet.clear()
        self.heard()
        try:
            async with self._within.block() as limit:
                self._limits[limit] = None
                try:
                    return await self._turns(ask, number)
                finally:
                    del self._limits[limit]
        except TimeoutError:
            self._check_open()
            why = f"no answer came within gateway.queue_s={self._within.within_s:g}; the session goes on: ask again"
            raise Refused(503, "no_answer", why) from None
        except ValueError as error:  # RenderError among them; tools that the template can't show
            raise Refused(400, "invalid_request_error", str(error)) from error
        except GaveUp as end:
            raise self._why_not(end) from end
        finally:
            self._asking -= ask.n
            if not self._asking:
                self._quiet.set()
            self.heard()

    async def count(self, ask: Ask) -> int:
        """Tokens that the prompt of such a request has. Raises SessionOver and Refused."""
        self._check_open()
        try:
            return (await self._prompt(ask)).num
        except ValueError as error:
            raise Refused(400, "invalid_request_error", str(error)) from error
        finally:
            self.heard()

    async def _turns(self, ask: Ask | AskTokens, number: int) -> tuple[Answer, ...]:
        prompt = await self._prompt(ask)
        if prompt.num >= self._max_len:
            raise Refused(
                400, "context_length_exceeded", f"the conversation has {prompt.num} tokens, and rollout.max_len leaves none for an answer"
            )
        choice = 0
        if ask.n == 1:
            turns = [await self._sample(ask, prompt)]
        else:
            self._num_choices += 1
            choice = self._num_choices
            turns = await self._sample_each(ask, prompt)
        self._check_open()
        return tuple(self._answer(ask, prompt, turn, number, choice) for turn in turns)

    async def _prompt(self, ask: Ask | AskTokens) -> Prompt:
        """Raises ValueError."""
        if isinstance(ask, AskTokens):
            place = self.forest.place_tokens(ask.prompt)
            return Prompt(place, ask.prompt[place.num_kept * TOKEN_BYTES :])
        renderer = await self._renderer(ask.tools)
        opening = await self._opening(renderer, ask) if ask.forced else b""
        place = self.forest.place(ask.messages, ask.tools)
        rerenders = self._rerenders and place.before is not None
        size = sum(map(len, place.meanings[0 if rerenders else len(ask.messages) - len(place.new) :]))
        render = partial(_reshown if rerenders else _shown, renderer, place, ask.messages)
        place, shown = render() if size <= SHORT else await self._offload(render)
        return Prompt(place, shown + opening, opening, renderer)

    async def _opening(self, renderer: Renderer, ask: Ask) -> bytes:
        key = ask.tools, ask.forced
        if self._forced is None or self._forced[0] != key:
            try:
                self._forced = key, await self._offload(partial(opening_of, renderer, ask.forced))
            except RenderError as error:
                raise ValueError(f"tool_choice: a call can't be forced here, since {error}. Leave it at auto") from error
        return self._forced[1]

    async def _sample_each(self, ask: Ask | AskTokens, asked: Prompt) -> list[Sampled]:
        """All answers to one request, or none: what was sampled of others is left out where one can't be had, or their client left."""
        turns: list[asyncio.Task[Sampled]] = []

        def leave_out() -> None:
            for turn in turns:
                if not turn.cancelled() and turn.exception() is None:
                    self.recorder.transcripts.remove(turn.result().transcript)

        try:
            with ExitStack() as undo:
                undo.callback(leave_out)
                async with asyncio.TaskGroup() as tasks:
                    turns += [tasks.create_task(self._sample(ask, asked, alone=True)) for _ in range(ask.n)]
                undo.pop_all()
        except ExceptionGroup as group:
            raise first_cause(group) from None
        return [turn.result() for turn in turns]

    async def _sample(self, ask: Ask | AskTokens, asked: Prompt, *, alone: bool = False) -> Sampled:
        """One turn; `alone`: in a context of its own."""
        recorder, place = self.recorder, asked.place
        transcript = self.forest.opened(place, asked.shown, alone=alone)
        if is_new := transcript not in recorder.transcripts:
            recorder.transcripts.append(transcript)
        prompt = transcript.prompt
        with ExitStack() as undo:  # also where its client leaves: asked again, the turn goes on from where this one did
            if is_new:
                undo.callback(recorder.transcripts.remove, transcript)
            else:
                undo.callback(self.forest.withdrawn, place, transcript)
            text, completion = await recorder.complete(transcript, self._sampling(ask, self._max_len - asked.num))
            undo.pop_all()
        return Sampled(transcript, prompt, text, completion)

    def _answer(self, ask: Ask | AskTokens, asked: Prompt, turn: Sampled, number: int, choice: int) -> Answer:
        """As the client of request `number` is told, and as the session has it from now on."""
        completion, prompt = turn.completion, turn.prompt
        said, stop, text = said_to(ask, asked.renderer, prompt, asked.opening, completion, turn.text, len(self.forest.turns))
        self.forest.sampled(
            asked.place,
            turn.transcript,
            said.message,
            choice=choice,
            forced=len(asked.opening) // TOKEN_BYTES,
            text=text,
            finish_reason=completion.finish_reason,
            asked=number,
        )
        if number >= self._answered:
            self.answer, self._answered = said.content, number
        return Answer(said, completion, len(prompt) // TOKEN_BYTES, prompt, stop)

    def _sampling(self, ask: Ask | AskTokens, room: int) -> Sampling:
        """The run's, within what is asked and `room`. Turns behind one history differ by their seeds."""
        sampling = self.recorder.sampling
        seed = (sampling.seed + self._num_sampled) % 2**63
        self._num_sampled += 1
        ends, stop = ask.ends(sampling.stop_token_ids, sampling.stop)
        num = min(room, sampling.max_new_tokens, ask.max_tokens or room)
        return msgspec.structs.replace(sampling, max_new_tokens=num, stop_token_ids=ends, seed=seed, stop=stop)

    def _why_not(self, end: GaveUp) -> SessionOver | Refused:
        if end.reason == "stale":
            self.fail(end, "stale")
            return SessionOver("stale")
        if self.over is not None:
            return SessionOver(self.over)
        # What an engine refused it refuses again; 503 is for what a repetition mends.
        status = 400 if end.reason == "generation_failed" and not end.retry else 503
        return Refused(status, "generation_failed", f"{end.reason}: {end.detail}")

    def complete(self, ending: Ending) -> None:
        """The agent is through, and its reward, if it has one, beside what others add, or its answer. The same ending again changes nothing.

        Raises SessionOver and Refused.
        """
        check_ending(ending, self.ending)
        if self.ending is not None:
            return
        if taken := sorted(self._taken.intersection(ending.rewards or ())):
            raise Refused(400, "invalid_reward", f"rewards.{taken[0]}: a reward function or a metric has this name, so give it another")
        self._check_open()
        if self._is_ending:
            raise SessionOver("cancelled")
        self.ending = ending.digest
        if ending.error is not None:
            self.fail(GaveUp("agent_failed", clean(ending.error[:MOST_ERROR])))
            return
        self.rewarded = ending.total is not None
        self.answer = self.answer if ending.answer is None else ending.answer
        self.recorder.reward, self.recorder.parts = ending.reward or 0.0, ending.rewards or {}
        self._end("complete")
        self._ended.set_result(None)

    def fail(self, end: GaveUp, code: OverCode = "failed") -> None:
        """The session ends without a trajectory."""
        if self.over is None and not self._is_ending:
            self._end(code)
            self._ended.set_exception(end)

    def settle(self) -> None:
        """The sample buffer has its end, or nothing more is to be waited for."""
        self._settled.set()

    async def settled(self) -> dict[str, Any]:
        """Return once the sample buffer has its end: what it says of it, and how many contexts carry the reward and how many are unused."""
        await self._settled.wait()
        return self.told

    @property
    def told(self) -> dict[str, Any]:
        """As `settled`, now."""
        fate = {} if self.fate is None else {"fate": self.fate}
        return {"session_id": self.id, **fate, "segments": len(self.recorder.transcripts), "unused": self.num_unused}

    @property
    def _is_ending(self) -> bool:
        """It ended, or the sample buffer ends it."""
        return self._ended.done() or (self._driving is not None and self._driving.cancelling() > 0)

    def _check_open(self) -> None:
        if self.over is not None:
            raise SessionOver(self.over)

    def _end(self, code: OverCode) -> None:
        self.over = self.over or code
        for limit in self._limits:
            limit.cut()

    def heard(self) -> None:
        """A request began, or is over: a session with one under way does not expire."""
        self._heard_at = asyncio.get_running_loop().time()


def said_to(
    ask: Ask | AskTokens, renderer: Renderer | None, prompt: bytes, opening: bytes, completion: Completion, text: str, number: int
) -> tuple[Said, str, str]:
    """The parts of turn `number`, what of `ask.stop` ended it, and its whole text: `text` was sampled behind `prompt`, and `opening` is the
    end of that which begins the turn."""
    stops = ask.stop if completion.finish_reason == "stop" else ()
    if isinstance(ask, AskTokens) or renderer is None:
        shown, stop = _up_to(text, stops)
        return said_in(shown, number, most_calls=0), stop, text
    turn, begun = opening + completion.tokens.ids, ""
    if opening:
        begun, text = renderer.decode(opening), renderer.decode(turn)
    shown, stop = _up_to(text, stops, len(begun))
    most_calls = ask.most_calls if ask.tools else 0
    said = read_turn(renderer, prompt[: len(prompt) - len(opening)], turn, shown, number, stop=stop, most_calls=most_calls)
    return said, stop, text


def check_ending(ending: Ending, before: bytes | None) -> None:
    """Raises Refused for one that is none, or not the one that the session has, whose digest is `before`."""
    if before is not None:
        if ending.digest != before:
            raise Refused(409, "ended_otherwise", "the session was completed with another body before, which counts: a session ends once")
        return
    if ending.reward is not None and ending.rewards is not None:
        raise Refused(400, "invalid_reward", "give the reward, or the rewards that it is the sum of, not both")
    rewards = ending.rewards or {}
    if len(rewards) > MOST_PARTS or not all(0 < len(name) <= LONGEST_NAME and name.isprintable() for name in rewards):
        why = f"rewards are at most {MOST_PARTS} numbers by names of 1 to {LONGEST_NAME} printable characters"
        raise Refused(400, "invalid_reward", why)
    for name, value in [*((f"rewards.{name}", value) for name, value in rewards.items()), ("reward", ending.total or 0.0)]:
        if flaw := flaw_of_reward(value):
            raise Refused(400, "invalid_reward", f"{name} {value} is {flaw.replace('_', ' ')}")


def _shown(renderer: Renderer, place: Place, messages: Sequence[Message]) -> tuple[Place, bytes]:
    """The place, and the token ids of what is new there."""
    if place.before is None:
        return place, renderer.chat([*map(dict, messages)])
    _require_new(place)
    return place, renderer.next_turn([*map(dict, place.new)], Ended(place.before))


def _reshown(renderer: Renderer, place: Place, messages: Sequence[Message]) -> tuple[Place, bytes]:
    """The same where the whole conversation is rendered: what was kept stays only where that begins with it."""
    _require_new(place)
    whole, kept = renderer.chat([*map(dict, messages)]), Ended(place.before).prompt if place.before else b""
    return (place, whole[len(kept) :]) if whole.startswith(kept) else (place._replace(anew=True), whole)


def _require_new(place: Place) -> None:
    if not place.new:
        raise Refused(400, "invalid_request_error", "the conversation ends with the model's own turn: say something behind it")


def _up_to(text: str, stop: Sequence[str], begin: int = 0) -> tuple[str, str]:
    """The text before the first of `stop` that is in it from `begin` on, and that; the whole without one."""
    at, found = min(((at, each) for each in stop if (at := text.find(each, begin)) >= 0), default=(len(text), ""))
    return text[:at], found
