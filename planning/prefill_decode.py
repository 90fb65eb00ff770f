"""How many of a pool's engines prefill prompts and how many decode, where the two are apart."""

from dataclasses import dataclass
from typing import Final, NamedTuple


class Stage(NamedTuple):
    """One of the two stages as it was lately."""

    num: int
    """Engines that serve it; at least 1."""
    work_s: float
    """What a request takes of one of them, in seconds in which it could have served another: a prefill's duration, or that of a
    completion divided by the requests that an engine decodes at once. Not below 0."""
    queue_s: float
    """How long requests stood in line for it."""


@dataclass(slots=True)
class StageWatch:
    """What was seen of one stage since the last look."""

    finished: int = 0
    total_s: float = 0.0
    """Of the requests that finished it, from asking for an engine to leaving it."""
    seated_s: float = 0.0
    """The part of that on an engine."""
    busy_s: float = 0.0
    """Seconds in which engines had requests of this stage, summed over engines."""


def stages(prefill: StageWatch, decode: StageWatch, num_prefill: int, num_decode: int, num_slots: int) -> tuple[Stage, Stage] | None:
    """Both stages as `balance` takes them, for engines that decode `num_slots` requests at once; None before a request has passed both.

    A prefill stands in line inside its engine too, so its line is all the time that is not its work.
    """
    if not prefill.finished or not decode.finished:
        return None
    work_s = prefill.busy_s / prefill.finished
    return (
        Stage(num_prefill, work_s, max(0.0, prefill.total_s / prefill.finished - work_s)),
        Stage(num_decode, decode.seated_s / num_slots / decode.finished, (decode.total_s - decode.seated_s) / decode.finished),
    )


class Balance(NamedTuple):
    """Engines that prefill from now on; the others decode."""

    num_prefill: int
    why: str


MIN_GAIN: Final = 1.1
"""Requests per second that a change has to promise, as a multiple of today's: less may be noise, and a change costs a moved cache each."""


def throughput(num_prefill: int, num_decode: int, prefill_s: float, decode_s: float) -> float:
    """Requests per second that pass both stages: what the slower one lets through."""
    return min(num / max(work_s, 1e-9) for num, work_s in ((num_prefill, prefill_s), (num_decode, decode_s)))


def balance(prefill: Stage, decode: Stage) -> Balance:
    """At most one engine changes its stage, towards the best split: where that lets at least MIN_GAIN times as many requests through, and is
    seen to (they stand longer in line for the stage that gets the engine).

    Where the work stays the same, all changes go one way and end within MIN_GAIN of the best split.
    """
    now = throughput(prefill.num, decode.num, prefill.work_s, decode.work_s)
    to_prefill = prefill.num / max(prefill.work_s, 1e-9) < decode.num / max(decode.work_s, 1e-9)
    short, name = (prefill, "prefill") if to_prefill else (decode, "decode")
    giver, step = (decode, 1) if to_prefill else (prefill, -1)
    kept = f"{prefill.num} prefill and {decode.num} decode"
    if giver.num < 2:
        return Balance(prefill.num, f"{kept}: {name} is short, and the last engine of the other stage stays")
    if short.queue_s <= giver.queue_s:
        return Balance(prefill.num, f"{kept}: requests do not stand longer in line for {name}")
    total = prefill.num + decode.num
    best = max(throughput(num, total - num, prefill.work_s, decode.work_s) for num in range(1, total))
    gain = best / max(now, 1e-9)
    if gain < MIN_GAIN:
        return Balance(prefill.num, f"{kept}: the best split lets {gain:.2f} times as many requests through")
    why = (
        f"{prefill.num + step} prefill and {decode.num - step} decode: requests wait {short.queue_s:.2g} s for {name}, "
        f"and the best split lets {gain:.2f} times as many through"
    )
    return Balance(prefill.num + step, why)
