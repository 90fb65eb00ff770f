"""Games of textarena for one player as environments, by their id; the seed makes the game."""

import difflib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from rubato.actors.data.datasets import check_extra
from rubato.runtime.errors import ConfigError


class TextArenaEnv:
    """One game per trajectory. The model is shown what the game says since its last turn; a move that the game does not take is an invalid turn.

    The reward is the game's own, at its end. `kwargs` go to the game's constructor.
    """

    def __init__(self, *, id: str, **kwargs: Any) -> None:  # noqa: A002 - textarena's own name
        import textarena

        check_game(id)
        self._id = id
        self._game: Any = textarena.make(id, **kwargs)
        self._own: Any = self._game
        while isinstance(self._own, textarena.Wrapper):
            self._own = self._own.env
        self._moves = textarena.ObservationType.PLAYER_ACTION
        self._chance = random.getstate(), np.random.get_state()

    def reset(self, *, seed: int) -> tuple[str, Mapping[str, Any]]:
        """Begin the game of `seed`."""
        with self._drawing():
            random.seed(seed)
            np.random.seed(seed & 0x7FFFFFFF)
            try:
                self._game.reset(num_players=1, seed=seed & 0x7FFFFFFF)
            except AssertionError as error:
                raise ValueError(f"textarena's {self._id} is no game for one player: {error}") from error
            return self._said(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Make the move that the text is."""
        with self._drawing():
            done, _ = self._game.step(action)
            said, invalid = self._said(), getattr(self._own.state, "error_count", 0) > 0
            if not done:
                return said, 0.0, False, False, {"invalid": True} if invalid else {}
            rewards, about = self._game.close()
        about = about.get(0, {})
        info = {"reason": str(about.get("reason", ""))} | ({"invalid": True} if about.get("invalid_move") else {})
        return said, float((rewards or {}).get(0, 0.0)), True, False, info

    def close(self) -> None:
        """Nothing to release."""

    def _said(self) -> str:
        """Since the last turn; what the model wrote it knows."""
        _, messages = self._own.get_observation()
        return "\n".join(text.strip() for _, text, kind in messages if kind is not self._moves)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Games draw from the generators of the whole process, which others in it use as well."""
        outside = random.getstate(), np.random.get_state()
        _set(self._chance)
        try:
            yield
        finally:
            self._chance = random.getstate(), np.random.get_state()
            _set(outside)


def _set(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def check_game(id: str) -> None:  # noqa: A002 - textarena's own name
    """Raises ConfigError, one sentence, where textarena is not installed, or has no such game."""
    check_extra("textarena", f"textarena={id}", "pip install -e '.[textarena]'")
    from textarena.envs.registration import ENV_REGISTRY

    if id not in ENV_REGISTRY:
        near = difflib.get_close_matches(id, ENV_REGISTRY, n=1)
        guess = f"Did you mean {near[0]}?" if near else f"It has {len(ENV_REGISTRY)}, among them GuessTheNumber-v0 and FrozenLake-v0."
        raise ConfigError(f"textarena has no game {id}. {guess}")
