"""Agents from outside, scripted: they talk with the gateway as SDKs do, and die, repeat, fork and come late."""

import asyncio
import math
import random
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rubato.actors.gateway.gateway import FILE, Address
from rubato.sim.simtest.checks import InvariantChecks
from rubato.sim.simtest.http import Gone, Reply, Request
from rubato.sim.simtest.setup import IDLE_S, QUEUE_S, WAIT_S
from rubato.sim.simtest.tokens import Expected, Told
from rubato.sim.simtest.toys import WORDS
from rubato.sim.simtest.world import World

GATEWAY = "gateway-1"
CHAT = "v1/chat/completions"

SLACK_S = 2.0
ENDS_S: Mapping[str, float] = {"open": WAIT_S + SLACK_S, "turn": QUEUE_S + SLACK_S, "show": SLACK_S, "complete": 200.0}
"""Within which a request of each kind has its answer; the last waits for scores, and for the sample buffer to have the sample."""

PAUSES_S = (0.5, 1.0, 2.0)
"""Before a request is sent again that had no answer, or one which a repetition mends."""

TIMES = (("plain", 50), ("repeat", 8), ("leave", 10), ("at_once", 8), ("title", 8), ("edit", 8), ("choose", 4), ("late", 2), ("die", 3))
"""What an agent does at a turn → how often."""

ENDS = (("complete", 70), ("twice", 8), ("during", 8), ("fail", 4), ("never", 5), ("leave", 5))
"""How it ends its session."""

OVER = ("stale", "expired", "complete", "cancelled", "failed")

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

Message = Mapping[str, str]
History = tuple[tuple[str, str], ...]


class SessionEnded(Exception):
    """Nothing more comes of the session; `code` is what the gateway said, empty where it is away."""

    def __init__(self, code: str = "") -> None:
        super().__init__(code)
        self.code = code


class RunOver(Exception):
    """The run takes no more sessions."""


class Said(NamedTuple):
    """A turn as it came."""

    content: str
    told: Told | None
    """None where the client could not tell the prompt."""


class Talk:
    """One session, as its agent knows it."""

    def __init__(self, session: str, key: str, request: Request) -> None:
        self.id, self.key = session, key
        self.process = request.process
        self.known: dict[History, list[Told]] = {}
        """Turns by the history that ends with them."""
        self.unseen: set[History] = set()
        """Histories behind which there may be turns that the agent was not told of."""
        self.side: list[Told] = []
        self.is_sure = False
        """Whether the newest turn is the one that the agent was told last."""
        self.heard_at = asyncio.get_running_loop().time()
        """When the last answer came."""
        self.over = ""
        self.over_at = math.inf
        """When it was said first."""

    def ended(self, code: str) -> None:
        """The gateway says that it is over."""
        if not self.over:
            self.over, self.over_at = code, asyncio.get_running_loop().time()


async def play(world: World, monitor: InvariantChecks) -> None:
    """As many agents as the gateway has places, and one that waits, until the run is over."""
    async with asyncio.TaskGroup() as tasks:
        for number in range(world.setup.concurrency + 1):
            tasks.create_task(Agent(world, monitor, number).play(), name=f"agent-{number}")


class Agent:
    """Opens one session after another."""

    def __init__(self, world: World, monitor: InvariantChecks, number: int) -> None:
        self._world, self._monitor = world, monitor
        self._name = f"agent-{number}"
        self._rng = random.Random(f"{world.setup.seed}/{self._name}")

    async def play(self) -> None:
        while True:
            try:
                talk = await self._open()
                await self._play(talk)
            except SessionEnded:
                if self._world.ending is not None and not self._is_gateway_up():
                    return
            except RunOver:
                return

    async def _play(self, talk: Talk) -> None:
        rng = self._rng
        messages = [_user(rng.choice(("a b", "a b", "b")))]
        for number in range(rng.choice((1, 2, 2, 3))):
            await asyncio.sleep(rng.uniform(0.02, 0.3))
            act = _drawn(rng, TIMES)
            if act == "die":
                return
            if act == "late":
                await asyncio.sleep(IDLE_S * rng.uniform(0.8, 1.6))
            said = await self._turn(talk, messages, act)
            if number == 0 and rng.random() < 0.1:
                await self._show(talk)
            messages = [*said, _user(rng.choice(("c", "d e", "f")))]
        await self._end(talk, messages[:-1])
        if rng.random() < 0.1:
            await self._ask(talk, messages)  # late

    async def _turn(self, talk: Talk, messages: Sequence[Message], act: str) -> list[Message]:
        """The conversation with the model's turn at its end."""
        rng = self._rng
        match act:
            case "repeat":
                said = await self._ask(talk, messages)
                again = await self._ask(talk, messages)
                talk.is_sure = rng.random() < 0.5
                said = again if talk.is_sure else said
            case "leave":
                await self._ask_and_leave(talk, messages)
                said = await self._ask(talk, messages)
            case "at_once":
                others = [self._ask(talk, [*messages, _user("e")], is_last=False), self._ask(talk, messages, is_last=False)]
                said, _, _ = await _together(self._ask(talk, messages, is_last=False), *others)
                talk.is_sure = False
            case "title":
                tools = [TOOL] if rng.random() < 0.3 else []
                if rng.random() < 0.5:
                    await self._ask(talk, [_user("f f f")], is_side=True, tools=tools)
                    said = await self._ask(talk, messages)
                else:
                    said, _ = await _together(
                        self._ask(talk, messages, is_last=False), self._ask(talk, [_user("f f f")], is_side=True, tools=tools)
                    )
                    talk.is_sure = False
            case "edit":
                place = rng.randrange(len(messages))
                messages = [*messages[:place], {**messages[place], "content": rng.choice(("e", "e f"))}, *messages[place + 1 :]]
                said = await self._ask(talk, messages)
            case "choose":
                said = await self._ask(talk, messages, n=2)
            case _:
                said = await self._ask(talk, messages, stream=rng.random() < 0.2)
        return [*messages, {"role": "assistant", "content": said.content}]

    async def _end(self, talk: Talk, messages: Sequence[Message]) -> None:
        rng = self._rng
        act = _drawn(rng, ENDS)
        reward = rng.choice((None, 0.0, 0.5, 1.0, 2.0))
        if act == "never":
            return
        if act == "fail":
            await self._complete(talk, {"error": "it broke"})
            return
        body: dict[str, Any] = {"answer": rng.choice(("", "a"))} if reward is None else {"reward": reward}
        if talk.is_sure and act != "during":
            side = () if self._world.setup.trains_all else tuple(talk.side)
            self._monitor.tokens.completes(talk.id, Expected(_path(talk, messages), side, reward))
        match act:
            case "during":
                late = self._ask(talk, [*messages, _user("late e")], is_last=False)
                await _together(late, self._complete(talk, body, after_s=rng.uniform(0.0, 0.1)), may_end=True)
            case "twice":
                both = self._complete(talk, body), self._complete(talk, body, after_s=rng.uniform(0.0, 0.2))
                await _together(*both, may_end=True)
            case "leave":
                await self._sent(talk.process, "complete", f"/sessions/{talk.id}/complete", talk.key, body, leave_s=rng.uniform(0.0, 0.2))
                await self._complete(talk, body)
            case _:
                await self._complete(talk, body)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def _open(self) -> Talk:
        """Raises RunOver and SessionEnded."""
        key = msgspec.json.decode((self._world.folder / FILE).read_bytes(), type=Address).admin_key
        leave_s = self._rng.uniform(0.0, 1.0) if self._rng.random() < 0.05 else 0.0
        request, reply = await self._answered("open", "/sessions", key, {"metadata": {"from": self._name}}, leave_s=leave_s)
        told = msgspec.json.decode(reply.body)
        if reply.status == 410:
            if told["error"]["code"] != "run_over":
                self._wrong("open", reply)
            raise RunOver
        if reply.status != 200:
            self._wrong("open", reply)
        return Talk(told["session_id"], told["api_key"], request)

    async def _ask(
        self,
        talk: Talk,
        messages: Sequence[Message],
        *,
        is_last: bool = True,
        is_side: bool = False,
        tools: Sequence[Any] = (),
        **more: Any,
    ) -> Said:
        """The next turn behind `messages`. Raises SessionEnded."""
        history = _history(messages)
        mark = (("tools", ""), *history) if tools else history
        talk.unseen.add(mark)
        talk.is_sure = False
        by_key = self._rng.random() < 0.5
        path = f"/{CHAT}" if by_key else f"/sessions/{talk.id}/{CHAT}"
        body = {"messages": messages, "return_token_ids": True, "tools": tools, **more}
        request, reply = await self._answered("turn", path, talk.key, body, talk)
        if reply.status != 200:
            self._ended(talk, "turn", request, reply)
        talk.heard_at = asyncio.get_running_loop().time()
        if talk.heard_at > talk.over_at:  # answers given before it are written within the same instant
            self._monitor.fail("a session ends once", f"a session of {self._name} answered after it had said {talk.over}")
        said = self._read(talk, mark, messages, reply, streams=bool(more.get("stream")))
        if is_side:
            talk.side += [one.told for one in said if one.told is not None]
        talk.is_sure = is_last and not is_side
        return self._rng.choice(said)

    def _read(self, talk: Talk, mark: History, messages: Sequence[Message], reply: Reply, *, streams: bool) -> list[Said]:
        found = _streamed(reply.body) if streams else _whole(reply.body)
        prompts, is_exact = self._prompts(talk, mark, messages)
        said: list[Said] = []
        for content, prompt, ids in found:
            if prompt is not None and not (prompt in prompts if is_exact else prompt.endswith(prompts[0])):
                known = " or ".join(each.hex(" ", 4) for each in prompts)
                self._monitor.fail("a history is gone on with", f"{self._name}'s prompt was {prompt.hex(' ', 4)}, and is to be {known}")
            if prompt is None and is_exact and len(prompts) == 1:
                prompt = prompts[0]
            told = None if prompt is None else Told(prompt, ids)
            said.append(Said(content, told))
            if told is not None:
                talk.known.setdefault((*mark, ("assistant", content)), []).append(told)
        if all(one.told for one in said):
            talk.unseen.discard(mark)
        return said

    def _prompts(self, talk: Talk, mark: History, messages: Sequence[Message]) -> tuple[list[bytes], bool]:
        """What the prompt behind `messages` may be, as far as the agent knows, and whether it is that, or what it ends with."""
        for num in range(len(messages) - 1, 0, -1):
            depth = num + len(mark) - len(messages)
            shown = _ids(messages[num:])
            if mark[:depth][:-1] in talk.unseen:
                return [_ids(messages[-1:])], False
            if before := talk.known.get(mark[:depth]):
                return [turn.prompt + turn.ids + (b"" if turn.ids.endswith(END) else END) + shown for turn in before], True
        return [_ids(messages)], True

    async def _ask_and_leave(self, talk: Talk, messages: Sequence[Message]) -> None:
        """Its client goes away, as one does whose own patience ends, or whose answer was lost on the way."""
        talk.unseen.add(_history(messages))
        talk.is_sure = False
        leave_s = self._rng.uniform(0.0, 0.08)
        await self._sent(self._gateway(), "turn", f"/{CHAT}", talk.key, {"messages": messages, "stream": leave_s > 0.04}, leave_s=leave_s)

    async def _show(self, talk: Talk) -> None:
        request, reply = await self._answered("show", f"/sessions/{talk.id}", talk.key, None, talk)
        if reply.status != 200:
            self._ended(talk, "show", request, reply)
        if msgspec.json.decode(reply.body)["metadata"] != {"from": self._name}:
            self._wrong("show", reply)

    async def _complete(self, talk: Talk, body: Mapping[str, Any], *, after_s: float = 0.0) -> None:
        if after_s:
            await asyncio.sleep(after_s)
        request, reply = await self._answered("complete", f"/sessions/{talk.id}/complete", talk.key, body, talk)
        if reply.status != 200:
            self._ended(talk, "complete", request, reply)
        talk.ended("complete")

    def _ended(self, talk: Talk, kind: str, request: Request, reply: Reply) -> None:
        """Raises SessionEnded, where that is what an answer other than 200 may say."""
        code = msgspec.json.decode(reply.body)["error"]["code"]
        if reply.status == 410 and code in OVER:
            talk.ended(code)
            if code == "expired" and (since := request.began - talk.heard_at) < IDLE_S - SLACK_S / 2 and request.undisturbed(talk.heard_at):
                self._monitor.fail("who asks is there", f"a session of {self._name} expired {since:.3f} s after its last answer")
        elif reply.status != 401 or talk.process.alive:
            self._wrong(kind, reply)
        raise SessionEnded(code)

    async def _answered(
        self, kind: str, path: str, key: str, body: Any, talk: Talk | None = None, *, leave_s: float = 0.0
    ) -> tuple[Request, Reply]:
        """As SDKs ask: again where there was no answer, or one that a repetition mends. Raises SessionEnded where that is of no use."""
        for pause_s in PAUSES_S:
            process = self._gateway() if talk is None or not talk.process.alive else talk.process
            request, reply = await self._sent(process, kind, path, key, body, leave_s=leave_s)
            if reply is not None and reply.status not in (429, 503):
                return request, reply
            await asyncio.sleep(pause_s)
        raise SessionEnded

    async def _sent(self, process: Any, kind: str, path: str, key: str, body: Any, *, leave_s: float = 0.0) -> tuple[Request, Reply | None]:
        """Its answer, if there is one before the client goes away, after `leave_s` where that is not 0."""
        limit_s = ENDS_S[kind]
        await asyncio.sleep(self._rng.uniform(0.0, 0.002))
        request = Request(process, "GET" if kind == "show" else "POST", path, key, b"" if body is None else msgspec.json.encode(body))
        try:
            async with asyncio.timeout(leave_s or limit_s):
                reply = await request.reply()
        except Gone:
            self._world.record.asked(self._name, kind, "gone")
            return request, None
        except TimeoutError:
            if not leave_s and request.undisturbed(request.began) and self._world.processes[process.name] is process:
                self._monitor.fail(
                    "every request ends", f"{self._name} waits for {kind} since {request.began:.3f} s: {self._world.waiting()}"
                )
            self._world.record.asked(self._name, kind, "left")
            return request, None
        reply = _ended_in_stream(reply) or reply
        self._world.record.asked(self._name, kind, str(reply.status))
        return request, reply

    def _gateway(self) -> Any:
        return self._world.processes[GATEWAY]

    def _is_gateway_up(self) -> bool:
        return bool(getattr(self._gateway().actor, "http", None) and self._gateway().actor.http.is_up)

    def _wrong(self, kind: str, reply: Reply) -> None:
        self._monitor.fail("answers", f"{self._name} asked for {kind} and was answered {reply.status} {reply.body[:300]!r}")
        raise SessionEnded


async def _together(*asked: Any, may_end: bool = False) -> list[Any]:
    """What all of them gave, once all are over. Raises the first SessionEnded, unless one may meet the end that another brings."""
    found = await asyncio.gather(*asked, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException) and not (may_end and isinstance(one, SessionEnded)):
            raise one
    return found


def _drawn(rng: random.Random, shares: Sequence[tuple[str, int]]) -> str:
    return rng.choices([name for name, _ in shares], [share for _, share in shares])[0]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _history(messages: Sequence[Message]) -> History:
    return tuple((message["role"], message["content"]) for message in messages)


def _path(talk: Talk, messages: Sequence[Message]) -> tuple[tuple[Told, ...], ...]:
    """The turns in a conversation that the agent was told."""
    history = _history(messages)
    found = (talk.known.get(history[:num]) for num in range(1, len(history) + 1))
    return tuple(tuple(turns) for turns in found if turns)


def _packed(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


END = _packed([WORDS.index("<eos>")])


def _ids(messages: Sequence[Message]) -> bytes:
    """As the toy's template shows them."""
    return b"".join(_packed([_id(word) for word in message["content"].split()]) + END for message in messages)


def _id(word: str) -> int:
    return WORDS.index(word) if word in WORDS else 0


def _whole(body: bytes) -> list[tuple[str, bytes | None, bytes]]:
    """(content, prompt, ids) of each choice."""
    told = msgspec.json.decode(body)
    prompt = _packed(told["prompt_token_ids"])
    return [(choice["message"]["content"], prompt, _packed(choice["token_ids"])) for choice in told["choices"]]


def _ended_in_stream(reply: Reply) -> Reply | None:
    """The error by which a stream ends that had begun, as the answer that it would have been before."""
    found = next((line[6:] for line in reply.body.splitlines() if line.startswith(b'data: {"error"')), None)
    if found is None:
        return None
    statuses = {"session_over": 410, "server_error": 503}
    return Reply(statuses.get(msgspec.json.decode(found)["error"]["type"], 400), found)


def _streamed(body: bytes) -> list[tuple[str, bytes | None, bytes]]:
    """The same of a stream, whose first event tells its prompt."""
    content, ids, prompt = "", list[int](), None
    for line in body.splitlines():
        if line.startswith(b"data: {"):
            told = msgspec.json.decode(line[6:])
            (choice,) = told["choices"]
            content += choice["delta"].get("content") or ""
            ids += choice.get("token_ids") or []
            prompt = _packed(told["prompt_token_ids"]) if "prompt_token_ids" in told else prompt
    return [(content, prompt, _packed(ids))]
