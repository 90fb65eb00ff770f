"""Renderers of sessions: one for each set of tools, since a chat template shows them in its own form; and how each writes calls of them."""

import asyncio
import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, pairwise, takewhile
from pathlib import Path
from typing import Any

from rubato.actors.config import RolloutSection
from rubato.actors.envs.calls import MOST_CALLS, Call, Said, call_of, said_in
from rubato.actors.envs.chat import Renderer, renderer_of
from rubato.actors.envs.hosting import TOOLS
from rubato.actors.envs.rollout import RolloutContext
from rubato.actors.envs.templates import RenderError

KEPT = 16
"""Sets of tools whose renderer is kept."""

PROBED = "look"
"""Name of the tool with which a template is tried."""


class Renderers:
    """Made when they are first wanted, in a thread: a tokenizer is read for each."""

    def __init__(self, folder: Path, offload: Callable[..., Any]) -> None:
        """Of the model in `folder`; `offload` is the actor's."""
        self._folder, self._offload = folder, offload
        self._kept: OrderedDict[str, Renderer] = OrderedDict()
        self._making = asyncio.Lock()

    async def of(self, context: RolloutContext, tools: Sequence[Mapping[str, Any]]) -> Renderer:
        """Of a task's sessions, for requests with these tools. Raises ValueError, one sentence, for some that the template can't show."""
        if not tools and not context.host.declared.get(TOOLS):
            return context.renderer
        return await self.by(context.rollout, tools)

    async def by(self, limits: RolloutSection, tools: Sequence[Mapping[str, Any]] = ()) -> Renderer:
        """As `limits` say, with these tools. Raises ValueError, one sentence."""
        key = json.dumps([limits.model_dump(mode="json"), [*tools]], sort_keys=True)
        async with self._making:
            if key not in self._kept:
                self._kept[key] = await self._offload(partial(renderer_of, limits, self._folder, tools=tools))
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return self._kept[key]

    async def change(self, context: RolloutContext) -> str:
        """What the chat template does to earlier turns once others follow, as words behind "it"; empty where it is stable as a prefix."""
        try:
            function = {"name": PROBED, "description": "Look", "parameters": {"type": "object", "properties": {}}}
            with_tools = await self.of(context, [{"type": "function", "function": function}])
        except ValueError:  # requests with tools are refused, by that sentence
            with_tools = context.renderer
        return await self._offload(partial(change_of, context.renderer, with_tools))


def change_of(renderer: Renderer, with_tools: Renderer) -> str:
    """As Renderers.change; `with_tools` shows a tool too."""
    if renderer.drops_reasoning:
        return "leaves out what the model reasoned in earlier turns"
    user, said, result = ({"role": role, "content": "x"} for role in ("user", "assistant", "tool"))
    call = {"id": "123456789", "type": "function", "function": {"name": PROBED, "arguments": {"x": "x"}}}
    called, result = {"role": "assistant", "content": None, "tool_calls": [call]}, result | {"tool_call_id": call["id"]}
    if not _stable(renderer, [user], [said, user], [said, user]):
        return "shows earlier turns otherwise"
    return "" if _stable(with_tools, [user], [called, result], [called, result], [said, user]) else "shows earlier calls of tools otherwise"


def _stable(renderer: Renderer, *parts: Sequence[dict[str, Any]]) -> bool:
    """Whether the tokens of each conversation are those that the longer ones begin with. What can't be rendered is no change."""
    with suppress(RenderError):
        shown = [renderer.chat([*chain.from_iterable(parts[:num])]) for num in range(1, len(parts) + 1)]
        return all(longer.startswith(shorter) for shorter, longer in pairwise(shown))
    return True


def read_turn(
    renderer: Renderer, prompt: bytes, turn: bytes, text: str, number: int = 0, *, stop: str = "", most_calls: int = MOST_CALLS
) -> Said:
    """The parts of the session's turn `number`, whose token ids are `turn`, as the renderer's family writes them, else those of its `text`.
    Both are without what comes from `stop` on.
    """
    parse, parsed = getattr(renderer, "parse", None), None
    if parse is not None:
        with suppress(Exception):  # a library's, of whatever the model wrote: then it is text
            parsed = parse(prompt, turn)
    if parsed is None:
        return said_in(text, number, most_calls=most_calls)
    calls, malformed = list[Call](), list[str]()
    for name, arguments, raw in parsed.calls:
        found = call_of(name, arguments) if len(calls) < most_calls else None
        if found is None:
            malformed.append(raw)
        else:
            calls.append(Call(f"call_{number}_{len(calls)}", *found))
    content = "\n".join(filter(None, [parsed.content, *malformed]))
    content = content.partition(stop)[0] if stop else content
    return Said(content, parsed.reasoning, tuple(calls), tuple(malformed) if most_calls else ())


def opening_of(renderer: Renderer, names: Collection[str]) -> bytes:
    """Token ids that the model's turn begins with where it calls one of the tools `names`, as the renderer writes such calls: as far as
    calls of any of them, with whatever arguments, have the same.

    Raises RenderError, one sentence, where calls are not written, or not in a form that is read here.
    """
    first, last = min(names), max(names)  # what these have in common all in between have
    calls = [_rendered_call(renderer, name, arguments) for name in dict.fromkeys((first, last)) for arguments in ({}, {"x": 1}, {"y": 2})]
    alike = takewhile(lambda tokens: len({*tokens}) == 1, zip(*(array("i", call) for call in calls), strict=False))
    opening = array("i", (token for token, *_ in alike))
    if not opening:
        raise RenderError("the model's chat template begins each call in another way")
    return opening.tobytes()


def _rendered_call(renderer: Renderer, name: str, arguments: dict[str, Any]) -> bytes:
    """Token ids of a turn that calls a tool, and of what follows it, from where a prompt ends."""
    asked = {"role": "user", "content": "?"}
    call = {"id": "123456789", "type": "function", "function": {"name": name, "arguments": arguments}}
    prompt = renderer.chat([asked])
    whole = renderer.chat([asked, {"role": "assistant", "content": None, "tool_calls": [call]}])
    turn = whole.removeprefix(prompt)
    if len(turn) == len(whole) or [each.name for each in read_turn(renderer, prompt, turn, renderer.decode(turn)).calls] != [name]:
        raise RenderError("the model's chat template writes no calls in a form that is known here")
    return turn
