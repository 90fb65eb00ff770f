"""Renderers of sessions: one for each set of tools, since a chat template shows them in its own form."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

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
        key = json.dumps([context.rollout.model_dump(mode="json"), [*tools]], sort_keys=True)
        async with self._making:
            if key not in self._kept:
                self._kept[key] = await self._offload(partial(renderer_of, context.rollout, self._folder, tools=tools))
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
