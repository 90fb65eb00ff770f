"""A session whose model writes what a test says, and the routes of a gateway around it; a token is a character."""

import asyncio
import json
from array import array
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from rubato.actors.config import EvalSection, RolloutSection
from rubato.actors.envs.recorder import GaveUp, Recorder, RecorderContext
from rubato.actors.gateway.answering import DIALECTS, answer_in, refusal
from rubato.actors.gateway.session import Refused, Session, SessionOver
from rubato.actors.messages.generation import Completion, Tokens, VersionSpan
from rubato.actors.messages.samples import PolicyState, Ticket
from rubato.runtime.observe.figures import Waits

END = 3
VERSION = 7


def ids(text):
    return array("i", map(ord, text)).tobytes()


class CharRenderer:
    """A message is a line of JSON."""

    stop_token_ids = (END,)
    stop_strings = ()
    drops_reasoning = False

    def __init__(self, tools=()):
        self.tools = [*tools]

    def chat(self, messages):
        return ids((json.dumps(self.tools) if self.tools else "") + self._lines(messages))

    def next_turn(self, messages, transcript):
        return ids(self._lines(messages))

    def encode(self, text):
        return map(ord, text)

    def decode(self, sampled):
        return "".join(map(chr, array("i", sampled))).removesuffix(chr(END))

    def _lines(self, messages):
        return "".join(f"\n{json.dumps(message)}" for message in messages) + "\n> "


class ScriptedProxy:
    """Answers with the texts of `says`, in their order, and with the last one from then on; an exception among them is raised."""

    def __init__(self, says, renderer):
        self.says = [*says]
        self.encode = renderer.encode if isinstance(renderer, CharRenderer) else renderer._tokenizer._ids
        self.end = renderer.stop_token_ids[0]
        self.asked = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def ask(self, request, *, timeout):
        self.asked.append(request)
        text = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        await self.goes_on.wait()
        if isinstance(text, Exception):
            raise text
        tokens = [*self.encode(text)]
        cut = tokens[: request.sampling.max_new_tokens]
        is_cut = len(tokens) > len(cut) or len(cut) == request.sampling.max_new_tokens
        cut += [] if is_cut else [self.end]
        logprobs = array("f", [-0.5] * len(cut)).tobytes()
        sampled = Tokens(array("i", cut).tobytes(), logprobs, (VersionSpan(VERSION, 0, len(cut)),))
        return Completion(request.request_id, sampled, "length" if is_cut else "stop", "engine-1")


def scripted_session(*says, max_len=100_000, renderer=CharRenderer):
    """Within a loop that runs; `renderer(tools)` has a token for each character that is written."""

    async def rendered(tools):
        return renderer(tools)

    async def offload(call):
        return call()

    proxy = ScriptedProxy(says, renderer(()))
    context = RecorderContext(
        rollout=RolloutSection(max_len=max_len, max_new_tokens=4096),
        eval=EvalSection(),
        renderer=renderer(()),
        proxy=proxy,
        policy=lambda: PolicyState(VERSION, 1),
        waits=Waits(),
    )
    session = Session(rendered, offload=offload, idle_s=600, max_len=max_len)
    session.begin(Recorder(context, Ticket("t1", "g1", 1, 0, 1, VERSION)))
    session.proxy = proxy
    return session


def app_of(session):
    """All dialects, for whoever asks."""

    async def respond(dialect, request):
        try:
            told = await answer_in(dialect, session, await request.body(), "run")
        except (SessionOver, Refused) as why:
            return refusal(why, dialect.error)
        return told if isinstance(told, Response) else Response(msgspec.json.encode(told), media_type="application/json")

    return Starlette(routes=[Route(path, partial(respond, dialect), methods=["POST"]) for path, dialect in DIALECTS.items()])


def refused_by_engine():
    return GaveUp("generation_failed", "it can't be", retry=False)
