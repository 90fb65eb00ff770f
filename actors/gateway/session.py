"""One session: a trajectory whose turns an agent asks for by itself, over HTTP, until it is complete, or over otherwise."""

import asyncio
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from rubato.actors.envs.chat import TOKEN_BYTES, Renderer
from rubato.actors.envs.recorder import GaveUp, Recorder
from rubato.actors.gateway.forest import Ended, Forest, Message, Turn
from rubato.actors.messages.generation import Completion
from rubato.actors.messages.samples import flaw_of_reward

OverCode = Literal["stale", "expired", "complete", "cancelled", "failed"]

MOST_TURNS = 4096
"""Of one session."""

MOST_AT_ONCE = 64
"""Requests of one session that are under way."""


MOST_CALLS = 128
"""Of one turn; further ones stay text."""

SHORT = 16 * 1024
"""Characters of messages that are rendered at once: more is done in a thread, while the actor answers others."""

Offload = Callable[..., Any]
"""The actor's."""

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
THOUGHT = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


class SessionOver(Exception):
    """Nothing can be asked in the session any more."""

    def __init__(self, code: OverCode) -> None:
        super().__init__(f"the session is over: {code}")
        self.code: OverCode = code


class Refused(Exception):
    """A request that can't be answered, which ends nothing: HTTP status, code, and the sentence."""

    def __init__(self, status: int, code: str, why: str) -> None:
        super().__init__(why)
        self.status, self.code = status, code


class Ask(NamedTuple):
    """One request for a turn."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


class Call(NamedTuple):
    """One call of a tool."""

    id: str
    name: str
    arguments: str
    """A JSON object, as it was sampled."""


class Said(NamedTuple):
    """The parts of a turn."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]

    @property
    def message(self) -> dict[str, Any]:
        """As chat completions have it."""
        told: dict[str, Any] = {"role": "assistant", "content": self.content if self.content or not self.calls else None}
        if self.reasoning:
            told["reasoning_content"] = self.reasoning
        if self.calls:
            told["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in self.calls
            ]
        return told


@dataclass(frozen=True)
class Answer:
    """A sampled turn, as its client is told."""

    said: Said
    completion: Completion
    num_prompt: int
    prompt: bytes
    """int32 ids."""

    @property
    def num_sampled(self) -> int:
        return len(self.completion.tokens.ids) // TOKEN_BYTES

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.said.calls else self.completion.finish_reason


class Session:
    """A Driver (actors/envs/rollout.py) that only waits: requests come from the server, each in a task of its own."""

    def __init__(self, renderer: Callable[[Sequence[Mapping[str, Any]]], Any], *, offload: Offload, idle_s: float, max_len: int) -> None:
        """`renderer(tools)` is an awaitable of the renderer for these tools. Without a request for `idle_s` the session expires; a context has
        at most `max_len` tokens.
        """
        self.id, self.key = secrets.token_hex(12), f"rbt-{secrets.token_urlsafe(24)}"
        self.forest = Forest()
        self.over: OverCode | None = None
        self.metadata: Any = None
        self._renderer, self._offload, self._idle_s, self._max_len = renderer, offload, idle_s, max_len
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._settled = asyncio.Event()
        self._recorder: Recorder | None = None
        self._expires: asyncio.Timeout | None = None
        self._asking = 0

    @property
    def recorder(self) -> Recorder:
        assert self._recorder is not None
        return self._recorder

    def begin(self, recorder: Recorder) -> None:
        """Its ticket is there."""
        self._recorder = recorder

    # -- as a driver ------------------------------------------------------------------------------------------------

    async def drive(self, recorder: Recorder) -> None:
        """Until the agent says that it is complete. Raises GaveUp where the session ends otherwise."""
        try:
            async with asyncio.timeout(self._idle_s) as self._expires:
                await self._ended
        except TimeoutError:
            self._end("expired")
            raise GaveUp("agent_left", f"no request for {self._idle_s:g} s", retry=True) from None
        finally:
            self._end("cancelled")
        if not self.forest.turns:
            raise GaveUp("agent_idle", "the session was completed without a turn")
        recorder.transcripts = self.forest.carrying(self.forest.turns[-1])

    # -- what the agent asks ----------------------------------------------------------------------------------------

    async def turn(self, ask: Ask) -> Answer:
        """The next turn of the agent's conversation. Raises SessionOver and Refused."""
        self._check_open()
        if len(self.forest.turns) + self._asking >= MOST_TURNS:
            raise Refused(400, "too_many_turns", f"a session has at most {MOST_TURNS} turns")
        if self._asking >= MOST_AT_ONCE:
            raise Refused(429, "too_many_requests", f"{MOST_AT_ONCE} requests of this session are under way already")
        self._asking += 1
        try:
            return await self._turn(ask, await self._renderer(ask.tools))
        except ValueError as error:  # RenderError among them; tools that the template can't show
            raise Refused(400, "invalid_request_error", str(error)) from error
        except GaveUp as end:
            if end.reason == "stale":
                self.fail(end, "stale")
                raise SessionOver("stale") from end
            if self.over is not None:
                raise SessionOver(self.over) from end
            raise Refused(503, "generation_failed", f"{end.reason}: {end.detail}") from end
        finally:
            self._asking -= 1
            self._heard()

    async def _turn(self, ask: Ask, renderer: Renderer) -> Answer:
        recorder, place = self.recorder, self.forest.place(ask.messages, ask.tools)
        size = sum(map(len, place.meanings[len(ask.messages) - len(place.new) :]))
        render = partial(_shown, renderer, place.before, place.new)
        shown = render() if size <= SHORT else await self._offload(render)
        num = (place.before.end if place.before else 0) + len(shown) // TOKEN_BYTES
        sampling, room = recorder.sampling, self._max_len - num
        if room < 1:
            raise Refused(
                400, "context_length_exceeded", f"the conversation has {num} tokens, and rollout.max_len leaves none for an answer"
            )
        most = min(room, sampling.max_new_tokens, ask.max_tokens or room)
        transcript = self.forest.opened(place, shown)
        if transcript not in recorder.transcripts:
            recorder.transcripts.append(transcript)
        prompt = transcript.prompt
        asked = msgspec.structs.replace(sampling, max_new_tokens=most, stop=(*sampling.stop, *ask.stop))
        text, completion = await recorder.complete(transcript, asked)
        said = said_in(text, len(self.forest.turns), tools=bool(ask.tools))
        self._check_open()
        self.forest.sampled(place, transcript, said.message)
        return Answer(said, completion, len(prompt) // TOKEN_BYTES, prompt)

    def complete(self, reward: float = 0.0) -> None:
        """The agent is through, and its reward beside what reward functions add. Raises SessionOver and Refused."""
        self._check_open()
        if self._ended.done():
            raise SessionOver("cancelled")
        if flaw := flaw_of_reward(reward):
            raise Refused(400, "invalid_reward", f"reward {reward} is {flaw.replace('_', ' ')}")
        self.recorder.reward = reward
        self._end("complete")
        self._ended.set_result(None)

    def fail(self, end: GaveUp, code: OverCode = "failed") -> None:
        """The session ends without a trajectory."""
        if self.over is None and not self._ended.done():
            self._end(code)
            self._ended.set_exception(end)

    def settle(self) -> None:
        """The sample buffer has its end."""
        self._settled.set()

    async def settled(self) -> None:
        """Return once the sample buffer has its end."""
        await self._settled.wait()

    def _check_open(self) -> None:
        if self.over is not None:
            raise SessionOver(self.over)

    def _end(self, code: OverCode) -> None:
        self.over = self.over or code

    def _heard(self) -> None:
        if self._expires is not None and self.over is None and not self._expires.expired():
            self._expires.reschedule(asyncio.get_running_loop().time() + self._idle_s)


def _shown(renderer: Renderer, before: Turn | None, new: Sequence[Message]) -> bytes:
    """Token ids of the messages that follow the turn `before`, or of a whole conversation."""
    messages = [dict(message) for message in new]
    if before is None:
        return renderer.chat(messages)
    if not messages:
        raise Refused(400, "invalid_request_error", "the conversation ends with the model's own turn: say something behind it")
    return renderer.next_turn(messages, Ended(before))


def said_in(text: str, number: int, *, tools: bool) -> Said:
    """The parts of the session's turn `number`, in the form of Hermes and Qwen; calls are looked for where there are `tools`. What is none
    stays text, for the agent to see.
    """
    reasoning = ""
    if thought := THOUGHT.match(text):
        reasoning, text = thought[1].strip(), text[thought.end() :]
    calls, rest, at = list[Call](), list[str](), 0
    for found in CALL.finditer(text) if tools else ():
        call = _call(found[1])
        if call is None or len(calls) == MOST_CALLS:
            continue
        rest.append(text[at : found.start()])
        at = found.end()
        calls.append(Call(f"call_{number}_{len(calls)}", *call))
    rest.append(text[at:])
    content = "".join(rest)
    return Said(content.strip() if calls else content, reasoning, tuple(calls))


def _call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call, where `text` is one."""
    with suppress(ValueError, RecursionError):
        told = json.loads(text)
        if isinstance(told, dict) and isinstance(name := told.get("name"), str):
            arguments = told.get("arguments", {})
            if isinstance(arguments, dict):
                return name, json.dumps(arguments, ensure_ascii=False)
    return None
