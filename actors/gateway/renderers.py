"""Renderers of sessions: one for each set of tools, since a chat template shows them in its own form."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rubato.actors.config import RolloutSection
from rubato.actors.envs.chat import Renderer, renderer_of

KEPT = 16
"""Sets of tools whose renderer is kept."""


class Renderers:
    """Made when they are first wanted, in a thread: a tokenizer is read for each."""

    def __init__(self, folder: Path, offload: Callable[..., Any]) -> None:
        """Of the model in `folder`; `offload` is the actor's."""
        self._folder, self._offload = folder, offload
        self._kept: OrderedDict[str, Renderer] = OrderedDict()
        self._making = asyncio.Lock()

    async def get(self, rollout: RolloutSection, tools: Sequence[Mapping[str, Any]] = ()) -> Renderer:
        """Raises ValueError, one sentence, for tools that the template can't show."""
        key = json.dumps([rollout.model_dump(mode="json"), [*tools]], sort_keys=True)
        async with self._making:
            if key not in self._kept:
                self._kept[key] = await self._offload(partial(renderer_of, rollout, self._folder, tools=tools))
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return self._kept[key]
