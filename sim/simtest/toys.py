"""What stands for a model and a task: an environment, a reward, a tokenizer, and a trainer whose weights are its own history."""

import asyncio
import functools
import json
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rubato.actors.checkpoints import checkpoint as checkpoints
from rubato.actors.config import RolloutSection
from rubato.actors.envs.chat import ChatRenderer
from rubato.actors.messages.samples import NotScored, Score, Scores, Trajectory
from rubato.actors.training.train_engine import StepResult

WORDS = ("<unk>", "<eos>", "a", "b", "c", "d", "e", "f")
TURNS = 2
LONG_SHARE, LONG_S = 0.04, 2.0
"""Some steps of an environment take much longer than the rest: the tail that staleness is about."""


class WalkEnv:
    """Two turns; how long they take and what they are worth follow from seed and text."""

    async def reset(self, *, seed: int) -> tuple[str, Mapping[str, Any]]:
        self._rng = random.Random(seed)
        self._left = TURNS
        return "a b", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        long = self._rng.random() < LONG_SHARE
        await asyncio.sleep(self._rng.uniform(0.02, 0.3) + (LONG_S if long else 0.0))
        self._left -= 1
        return "c", float(len(action) % 3), self._left == 0, False, {}

    def close(self) -> None:
        """Nothing is held."""


class ToyScorer:
    """Stands for Scorer, whose worker processes no virtual loop can start. `asked` hears of what it scores."""

    def __init__(self, asked: Callable[[Score], None] = lambda _: None) -> None:
        self._asked = asked

    async def start(self) -> str:
        return ""

    async def close(self) -> None:
        """Nothing is held."""

    async def score(self, requests: Sequence[Score]) -> list[Scores | NotScored]:
        for request in requests:
            self._asked(request)
        await asyncio.sleep(0.01)
        return [Scores((0.5 * (sum(map(len, request.completions)) % 2),)) for request in requests]


class DrawnSecrets:
    """Stands for the module `secrets`: what it names is on the bus, and a seed must replay."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"{seed}/secrets")

    def token_hex(self, num: int) -> str:
        return self._rng.randbytes(num).hex()

    token_urlsafe = token_hex


class Checkpoint(msgspec.Struct):
    """`history` holds the ids that each step trained, oldest step first: the weights."""

    step: int
    term: int
    history: list[list[str]]


_HEADER = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
_HEAD = len(_HEADER).to_bytes(8, "little") + _HEADER

Trained = Callable[[int, list[list[Trajectory]], list[list[str]]], None]
"""Hears (step, groups, history before it)."""


class ToyTrainEngine:
    """A `TrainEngine`, and stands for its ranks. `saving` is called before and after a checkpoint is written, and at each stage in which ranks
    work together: there the trainer may be made to crash, or a rank be lost."""

    num_ranks = 1

    def __init__(self, trained: Trained, saving: Callable[[str], None]) -> None:
        self._trained, self._saving = trained, saving
        self._state = Checkpoint(0, 0, [])

    def load(self, model_dir: Path, checkpoint: Path | None) -> tuple[int, int]:
        self._saving("load")
        if checkpoint is not None:
            self._state = msgspec.json.decode((checkpoint / "toy.json").read_bytes(), type=Checkpoint)
        return self._state.step, self._state.term

    def train(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> StepResult:
        self._saving("forward")
        held = [list(group) for group in groups]
        self._trained(step, held, self._state.history)
        self._state.history.append([t.ticket.trajectory_id for group in held for t in group])
        self._state.step = step
        self._saving("reduce")
        rewards = [t.reward for group in held for t in group]
        return StepResult({"reward/mean": sum(rewards) / max(1, len(rewards))}, len(rewards))

    def parts(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> Generator[None, None, StepResult]:
        yield
        return self.train(step, groups)

    def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        raise NotImplementedError("the agreement check is off in the simulation")

    def image_bytes(self) -> int:
        return len(_HEAD) + 4

    def export(self, memory: memoryview) -> Callable[[], None]:
        self._saving("publish")
        memory[:] = _HEAD + self._state.step.to_bytes(4, "little")
        return toy_whole

    def sleep(self) -> None:
        """A toy lies on no device."""

    def wake(self) -> None:
        """Nor comes back to one."""

    def snapshot(self, *, term: int, receipts: Sequence[bytes] = ()) -> Callable[[Path], None]:
        self._saving("checkpoint")
        self._state.term = term
        return functools.partial(self.write_toy, self._state.step, msgspec.json.encode(self._state), term, receipts)

    def write_toy(self, step: int, content: bytes, term: int, receipts: Sequence[bytes], folder: Path) -> None:
        self._saving("before_save")
        checkpoints.write(folder, {"toy.json": content}, step=step, term=term, receipts=receipts)
        self._saving("after_save")


def toy_whole() -> None:
    """The weights of a toy are whole at once."""


def write_tokenizer(folder: Path) -> Path:
    """A model folder with a word tokenizer and a chat template, and no weights: enough for environment managers."""
    folder.mkdir(parents=True, exist_ok=True)
    model = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(WORDS)}, "unk_token": "<unk>"}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = "{% for m in messages %}{{ m.content }} <eos> {% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": template}))
    return folder


def renderer(limits: RolloutSection, folder: Path, *, tools: Sequence[Any] = ()) -> ChatRenderer:
    """Shared by every manager of this process: it keeps nothing but caches. Its template reads neither variables nor tools."""
    return _shared(folder, limits.system_prompt)


@functools.cache
def _shared(folder: Path, system_prompt: str) -> ChatRenderer:
    return ChatRenderer(folder, system_prompt=system_prompt)
