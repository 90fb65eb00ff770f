"""Where reward functions run: what `Scorer` asks of processes of this host, of a pool that grows and shrinks, and of a URL."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, cast

import msgspec

from rubato.actors.config import RewardSection
from rubato.actors.messages.samples import MOST_REWARD, NotScored, Score, flaw_of_reward
from rubato.runtime.pool.values import Unsendable


@dataclass(eq=False)
class RewardRefused(Exception):
    """A whole call failed; each of its trajectories may be worth a call of its own. Fields as in `NotScored`."""

    reason: str
    detail: str


class CallLimit:
    """How long a call of a reward function may take: `reward.timeout_s`."""

    per_task = False
    """Whether that depends on the task, so that each trajectory needs a call of its own."""

    def __init__(self, section: RewardSection) -> None:
        self.most_s = section.timeout_s

    def of(self, function: str, requests: Sequence[Score]) -> float:
        """Seconds for a call of `function` over `requests`."""
        return self.most_s

    def took(self, function: str, requests: Sequence[Score], scores: Sequence[float | NotScored], seconds: float) -> None:
        """A call ended in time."""


Told = Callable[[int, float | NotScored], object]


class RewardBackend(Protocol):
    """Runs functions; it keeps nothing between calls that a score depends on. Many calls may be under way at once."""

    async def load(self, function: str) -> str:
        """Make ready for calls of it; returns "" or the sentence that says why there can be none."""
        ...

    async def call(self, function: str, requests: Sequence[Score]) -> list[float | NotScored]:
        """One number without a flaw per request, or why that one has none. Raises RewardRefused where the call failed as a whole."""
        ...

    async def each(self, function: str, requests: Sequence[Score], told: "Told") -> None:
        """A call of its own for each, all at once and within `reward.timeout_s` together; `told` gets the place and the outcome of each as it
        comes. Raises nothing."""
        ...

    def once(self, function: str) -> bool:
        """Whether it says of itself that it must not be asked twice for the same trajectory."""
        ...

    async def run(self) -> None:
        """What it does beside calls, until cancelled; returns at once where that is nothing."""
        ...

    async def close(self) -> None:
        """Let go of everything; calls under way end as RewardRefused."""
        ...


def columns_of(request: Score) -> dict[str, Any]:
    """The trajectory's columns by name, its turns among them as `texts`."""
    row = msgspec.msgpack.decode(request.columns, type=dict[str, Any])
    row.pop("completions", None)
    return {**row, "texts": list(request.completions)}


def checked(function: str, result: Any, num: int) -> list[float]:
    """A function's result as `num` numbers without a flaw. Raises RewardRefused."""
    if not isinstance(result, list):
        raise RewardRefused("wrong_type", f"{function} returned a {_kind(result)} instead of a list of numbers")
    numbers = cast("list[Any]", result)
    if len(numbers) != num:
        raise RewardRefused("wrong_length", f"{function} returned {len(numbers)} numbers for {num} trajectories")
    return [checked_number(function, number) for number in numbers]


def checked_number(function: str, number: Any) -> float:
    """One of them. Raises RewardRefused."""
    if not isinstance(number, Real):
        raise RewardRefused("wrong_type", f"{function} returned a {_kind(number)} instead of a number")
    if flaw := flaw_of_reward(float(number)):
        most = f", more than ±{MOST_REWARD:g}" if flaw == "out_of_range" else ""
        raise RewardRefused(flaw, f"{function} returned {number}{most}")
    return float(number)


def _kind(value: Any) -> str:
    return value.type_name if isinstance(value, Unsendable) else type(value).__name__
