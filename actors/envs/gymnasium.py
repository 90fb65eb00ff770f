"""Any gymnasium environment as a text environment: words for its actions, words or its own text for its observations."""

import re
from collections.abc import Mapping, Sequence
from typing import Any


class GymnasiumText:
    """Wraps `gymnasium.make(id, **kwargs)`. `id` is gymnasium's, as in "module:Name-v0" where a module must be imported first.

    `actions` maps words to actions; the first one found in the model's text is taken, and none of them is no move, with
    `info["invalid"]`. Without it the text itself is the action. `observations` names each value of a discrete observation;
    without it `template` formats the observation, or, with `render: true`, what the environment renders as text.
    """

    def __init__(
        self,
        id: str,  # noqa: A002 - gymnasium's own name
        *,
        actions: Mapping[str, Any] | None = None,
        observations: Sequence[str] | None = None,
        template: str = "{observation}",
        render: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        import gymnasium

        mode = {"render_mode": "ansi"} if render else {}
        self._env: Any = gymnasium.make(id, **mode, **(kwargs or {}))
        self._actions = {word.lower(): action for word, action in (actions or {}).items()}
        # Longest first, so that "pick up" wins over "pick".
        words = "|".join(re.escape(word) for word in sorted(self._actions, key=len, reverse=True))
        self._word = re.compile(words, re.IGNORECASE)
        self._observations = observations
        self._template = template
        self._render = render
        self._text = ""

    def reset(self, *, seed: int) -> tuple[str, Mapping[str, Any]]:
        """Start an episode from `seed`."""
        observation, info = self._env.reset(seed=seed & 0x7FFFFFFF)
        self._text = self._describe(observation)
        return self._text, info

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Take the action that the text names."""
        chosen: Any = action
        if self._actions:
            word = self._word.search(action)
            if word is None:
                return self._text, 0.0, False, False, {"invalid": True}
            chosen = self._actions[word.group().lower()]
        observation, reward, terminated, truncated, info = self._env.step(chosen)
        self._text = self._describe(observation)
        return self._text, float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        """Close the wrapped environment."""
        self._env.close()

    def _describe(self, observation: Any) -> str:
        if self._render:
            observation = self._env.render()
        elif self._observations is not None:
            observation = self._observations[int(observation)]
        return self._template.format(observation=observation)
