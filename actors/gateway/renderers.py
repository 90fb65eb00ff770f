"""Renderers of sessions: one for each set of tools, since a chat template shows them in its own form."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rubato.actors.envs.chat import Renderer, renderer_of
from rubato.actors.envs.hosting import TOOLS
from rubato.actors.envs.rollout import RolloutContext

KEPT = 16
"""Sets of tools whose renderer is kept."""


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
