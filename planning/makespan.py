"""When an engine is through with its requests: decode steps summed as requests leave, with a queue where its KV or slots are full.

The sum is the usual one for continuous batching: between two departures each running request gets a token per step, so an interval lasts as
many steps as the next one to leave has tokens left. Of OrchestrRL's own cost model T_k(R_k, y_k) the paper's text was not available.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from typing import NamedTuple

from rubato.planning.roofline import Roofline


class Load(NamedTuple):
    """A request as a planner sees it; lengths in tokens."""

    name: str
    context: int
    """Prompt and what was sampled so far."""
    remaining: float
    """What is still to come, as forecast."""
    cached: int = 0
    """Of `context`, the first ones whose keys and values its engine has; the rest is prefilled."""
    wait_s: float = 0.0
    """Seconds in environments that are still to come, or until its cache is here."""


class Instance(NamedTuple):
    """An engine and its requests in the order in which it takes them."""

    name: str
    degree: int
    """GPUs of its tensor parallelism."""
    loads: tuple[Load, ...] = ()
    server: str = ""
    """Instances are merged within one only."""
    settled: bool = True
    """It may change its degree; False for an interval after a change."""
    start_s: float = 0.0
    """Until it is there, such as the rest of a switch."""

    def through_s(self, engines: Mapping[int, Roofline]) -> float:
        """Seconds until its last request is done, 0 without requests; `engines` by degree."""
        return self.start_s + finish_s(self.loads, engines[self.degree]) if self.loads else 0.0


def finish_s(loads: Iterable[Load], engine: Roofline) -> float:
    """Seconds until the last of `loads` is done; infinite if one of them does not fit the engine's KV room alone.

    A request reserves room for its final length, so none is preempted. Its `wait_s` counts as if all of it came last, although a request in
    an environment leaves its slot to others: never too short.
    """
    return _run(loads, engine, math.inf)[0]


def left_after(loads: Iterable[Load], engine: Roofline, seconds: float) -> tuple[Load, ...]:
    """What is left of `loads` after so many seconds of the same sum, those that run first: further on, with all of their cache."""
    return _run(loads, engine, seconds)[1]


def _run(loads: Iterable[Load], engine: Roofline, until_s: float) -> tuple[float, tuple[Load, ...]]:
    """Seconds until the last is done, and what is left at `until_s`, where that comes first."""
    waiting = deque(loads)
    running: list[tuple[float, int, float, float, Load]] = []  # (last token, order, reserved, held before token 0, load)
    token = seconds = last = reserved = held = 0.0
    while waiting or running:
        while waiting and len(running) < engine.spec.num_slots:
            load = waiting[0]
            if reserved + load.context + load.remaining > engine.kv_tokens:
                break
            waiting.popleft()
            if load.context > load.cached:
                seconds += engine.prefill_s(load.context - load.cached, load.cached)
            room, base = load.context + load.remaining, load.context - token
            heappush(running, (token + load.remaining, -len(waiting), room, base, load))
            reserved, held = reserved + room, held + base
        if not running:
            return math.inf, tuple(waiting)
        end, num = running[0][0], len(running)
        steps = end - token
        took_s = steps * engine.step_s(num, held + num * (token + steps / 2)) if steps > 0 else 0.0
        if seconds + took_s > until_s:
            token += _steps_within(max(0.0, until_s - seconds), num, held + num * token, engine)
            return until_s, tuple(_further(entry, token, until_s) for entry in sorted(running)) + tuple(waiting)
        _, _, room, base, load = heappop(running)
        seconds += took_s
        token, reserved, held = end, reserved - room, held - base
        last = max(last, seconds + load.wait_s)
    return last, ()


def _steps_within(seconds: float, num: int, held: float, engine: Roofline) -> float:
    """Decode steps of `num` requests that hold so many tokens at first."""
    steps = 0.0
    for _ in range(4):  # what they hold grows with the steps: the fixed point is near at once
        steps = seconds / engine.step_s(num, held + num * steps / 2)
    return steps


def _further(entry: tuple[float, int, float, float, Load], token: float, waited_s: float) -> Load:
    end, _, _, base, load = entry
    context = int(base + token)
    return load._replace(context=context, remaining=end - token, cached=context, wait_s=max(0.0, load.wait_s - waited_s))
