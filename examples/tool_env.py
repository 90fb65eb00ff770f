"""An environment whose model calls a tool: env.class=tool_env.py:Prices, for a model whose chat template shows tools."""

import json
import random
from typing import Any, ClassVar

from rubato.actors.envs.calls import Call, said_in

GOOD = {"type": "object", "properties": {"good": {"type": "string"}}, "required": ["good"]}
TOOL = {"type": "function", "function": {"name": "price", "description": "What a good costs", "parameters": GOOD}}


class Prices:
    """Say which of two goods costs less. What begins as a call and is none costs a tenth of the reward."""

    held_out: ClassVar[dict[str, Any]] = {}
    tools: ClassVar[list[dict[str, Any]]] = [TOOL]

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        """The same seed has the same prices."""
        self._prices: dict[str, int] = dict(zip(("tea", "salt"), random.Random(seed).sample(range(1, 100), 2), strict=True))
        return "tea or salt?", {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Results of the calls, or the end."""
        said = said_in(action)
        if said.malformed:
            return [{"role": "user", "content": f"no such call: {said.malformed[0][:100]}"}], -0.1, False, False, {"invalid": True}
        if said.calls:
            results = [{"role": "tool", "tool_call_id": call.id, "content": self._result(call)} for call in said.calls]
            return results, 0.0, False, False, {}
        return "", float(said.content.strip() == min(self._prices, key=self._prices.__getitem__)), True, False, {}

    def close(self) -> None:
        """Nothing to release."""

    def _result(self, call: Call) -> str:
        good = str(json.loads(call.arguments).get("good"))
        return str(self._prices.get(good, "there is none")) if call.name == "price" else "no such tool"
