"""FrozenLake as text: gymnasium's 4x4 lake without slipping, a new random map per seed, held-out maps kept apart by hash."""

import hashlib
import random
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

ACTIONS = {"left": 0, "down": 1, "right": 2, "up": 3}
"""The words of an answer, with gymnasium's action numbers."""

EVAL_SHARE = 5
"""One map in this many belongs to the eval split."""

_WORD = re.compile("left|down|right|up", re.IGNORECASE)


class FrozenLakeText:
    """The observation is the map with P at the player; the answer is the first of left, down, right, up in the model's text.

    Anything else is no move, with `info["invalid"]`. Reaching G ends the episode with reward 1, a hole (H) with 0. The seed
    makes the map: cells are frozen with probability `p`, and a path always exists.
    """

    inline = True
    """Answers in microseconds and never blocks, so it may run in the manager's own process."""

    held_out = {"split": "eval"}
    """Arguments for held-out tasks where `env.eval_kwargs` names none: no held-out map is ever trained on."""

    def __init__(self, *, size: int = 4, p: float = 0.8, split: Literal["train", "eval"] = "train") -> None:
        if size < 2 or not 0.0 < p <= 1.0 or split not in ("train", "eval"):
            raise ValueError("FrozenLakeText needs size >= 2, 0 < p <= 1 and split train or eval")
        self._size = size
        self._p = p
        self._split = split
        self._moves: Any = None
        self._views: tuple[str, ...] = ()
        self._at = 0

    def reset(self, *, seed: int) -> tuple[str, Mapping[str, Any]]:
        """Start on the map of `seed`; the same seed gives the same map."""
        self._moves, self._views = _lake(seed, self._size, self._p, self._split)
        self._at = 0
        return self._views[0], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Move as the first direction word in `action` says."""
        word = _WORD.search(action)
        if word is None:
            return self._views[self._at], 0.0, False, False, {"invalid": True}
        self._at, reward, terminated = self._moves[self._at][ACTIONS[word.group().lower()]]
        return self._views[self._at], float(reward), terminated, False, {}

    def close(self) -> None:
        """Nothing to release."""


def draw_map(seed: int, *, size: int, p: float, split: str) -> tuple[str, ...]:
    """The first map drawn from `seed` that has a path from S to G and belongs to `split`."""
    rng = random.Random(seed)
    while True:
        cells = ["F" if rng.random() < p else "H" for _ in range(size * size)]
        cells[0], cells[-1] = "S", "G"
        rows = tuple("".join(cells[i : i + size]) for i in range(0, size * size, size))
        if split_of(rows) == split and _has_path(rows):
            return rows


def split_of(rows: tuple[str, ...]) -> str:
    """Which split a map belongs to: a property of the map alone."""
    digest = hashlib.blake2b("\n".join(rows).encode(), digest_size=4).digest()
    return "train" if int.from_bytes(digest, "little") % EVAL_SHARE else "eval"


def _has_path(rows: tuple[str, ...]) -> bool:
    size = len(rows)
    seen, frontier = {(0, 0)}, [(0, 0)]
    while frontier:
        row, column = frontier.pop()
        for at in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            if at not in seen and 0 <= at[0] < size and 0 <= at[1] < size and rows[at[0]][at[1]] != "H":
                seen.add(at)
                frontier.append(at)
    return (size - 1, size - 1) in seen


@lru_cache(256)  # some 4 kB each: rollouts of a group play the same one
def _lake(seed: int, size: int, p: float, split: str) -> tuple[Any, tuple[str, ...]]:
    """The map of a seed, ready to play: gymnasium's outcome of each move in each state, and what the player sees there."""
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

    rows = draw_map(seed, size=size, p=p, split=split)
    cells = "".join(rows).replace("S", "F")
    marked = (cells[:at] + "P" + cells[at + 1 :] for at in range(size * size))
    views = tuple("\n".join(view[i : i + size] for i in range(0, size * size, size)) for view in marked)
    table, once = FrozenLakeEnv(desc=list(rows), is_slippery=False).P, dict[Any, Any]()
    # No move slips: each has one outcome, which gymnasium's own step would draw at ten times the cost. Equal ones are kept once.
    outcomes = ([tuple(outcome[1:]) for (outcome,) in table[cell].values()] for cell in range(size * size))
    return tuple(tuple(once.setdefault(each, each) for each in of_cell) for of_cell in outcomes), views
