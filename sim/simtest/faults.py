"""What may go wrong in a simulated run, and how a seed draws it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ROLES = ("sample_buffer", "llm_proxy", "engine", "env_manager", "reward_service", "trainer")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `after_s` seconds after the row of step `step` was first heard. `seconds` is how long it lasts, where it does."""

    kind: str
    step: int
    after_s: float
    target: str = ""
    other: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        where = " ".join(part for part in (self.target, self.other) if part)
        lasts = f" for {self.seconds:.2f} s" if self.seconds else ""
        return f"{self.kind} {where}{lasts} at step {self.step} + {self.after_s:.3f} s"


Draw = Callable[[random.Random, Sequence[str]], tuple[str, str, float]]


def _one(low_s: float, high_s: float) -> Draw:
    return lambda rng, names: (rng.choice(names), "", rng.uniform(low_s, high_s) if high_s else 0.0)


def _two(low_s: float, high_s: float) -> Draw:
    def draw(rng: random.Random, names: Sequence[str]) -> tuple[str, str, float]:
        first, second = rng.sample(list(names), 2)
        return first, second, rng.uniform(low_s, high_s) if high_s else 0.0

    return draw


def _trainer(low_s: float = 0.0, high_s: float = 0.0) -> Draw:
    return lambda rng, names: ("trainer-1", "", rng.uniform(low_s, high_s) if high_s else 0.0)


RANK_STAGES = ("load", "forward", "reduce", "publish", "checkpoint", "before_save")
"""What the trainer's ranks do when one of them is lost."""


def _rank() -> Draw:
    return lambda rng, names: ("trainer-1", rng.choice(RANK_STAGES), 0.0)


def _engine() -> Draw:
    """Only engines read weights. One draw among all names, as in `_one`, so that a seed's other faults stay what they were."""

    def draw(rng: random.Random, names: Sequence[str]) -> tuple[str, str, float]:
        engines = [name for name in names if name.startswith("engine-")]
        return engines[names.index(rng.choice(names)) % len(engines)], "", 0.0

    return draw


def _buffer() -> Draw:
    return lambda rng, names: ("sample_buffer-1", "", 0.0)


def _store(low_s: float, high_s: float) -> Draw:
    return lambda rng, names: ("", "", rng.uniform(low_s, high_s) if high_s else 0.0)


KINDS: dict[str, tuple[int, Draw]] = {
    "link_snap": (3, _two(0, 0)),
    "link_delay": (2, _two(0.05, 0.8)),
    "partition": (3, _two(1.0, 12.0)),
    "kill": (6, _one(0, 0)),
    "freeze": (3, _one(0.5, 12.0)),
    "zombie": (3, _one(2.0, 14.0)),
    "slow_loop": (2, _one(1.0, 4.0)),
    "resume": (2, _store(0, 0)),
    "store_latency": (2, _store(0.5, 4.0)),
    "store_reply_lost": (3, _store(0, 0)),
    "store_restart": (2, _store(0.1, 3.0)),
    "store_loss": (3, _store(0.1, 3.0)),
    "store_loss_kill": (2, _store(0.1, 3.0)),
    "zombie_fence_lost": (1, _store(1.0, 8.0)),
    "script_cache_lost": (1, _store(0, 0)),
    "crash_before_save": (2, _trainer()),
    "crash_after_save": (2, _trainer()),
    "crash_named": (2, _trainer()),
    "crash_before_commit": (2, _trainer()),
    "crash_after_commit": (2, _trainer()),
    "zombie_before_commit": (3, _trainer(1.0, 8.0)),
    "publish_lost": (2, _trainer()),
    "weights_corrupt": (1, _engine()),
    "weights_half": (1, _engine()),
    "cancel": (1, _buffer()),
    "rank_lost": (0, _rank()),
    "moves": (0, _store(1.0, 10.0)),
}
"""Kind → how often it is drawn, and how its target and length are drawn. What has 0 comes on top of those that are drawn."""

MOVES_SHARE = 0.5
"""Of the seeds, how many have requests that move."""

DEFAULT = list(KINDS)
"""Drawn unless others are asked for."""


def draw(seed: int, names: Sequence[str], steps: int, kinds: Sequence[str], rounds: int = 1) -> list[Fault]:
    """Three to seven faults a round, up to two cancels and up to two lost ranks, in the order they come. The last steps are left undisturbed, so that every
    fault takes effect."""
    cancels = random.Random(f"{seed}/cancels")
    num_cancels = cancels.randint(0, 2 * rounds) if "cancel" in kinds else 0
    found = [_at(cancels, "cancel", names, steps) for _ in range(num_cancels)]
    ranks = random.Random(f"{seed}/ranks")
    num_ranks = ranks.randint(0, 2 * rounds) if "rank_lost" in kinds else 0
    found += [_at(ranks, "rank_lost", names, steps) for _ in range(num_ranks)]
    rng, kinds = random.Random(f"{seed}/faults"), [kind for kind in kinds if kind not in ("cancel", "rank_lost")]
    weights = [KINDS[kind][0] for kind in kinds]
    for _ in range(sum(rng.randint(3, 7) for _ in range(rounds)) if any(weights) else 0):
        kind = rng.choices(kinds, weights)[0]
        found.append(_at(rng, kind, names, steps))
    if "moves" in kinds and rng.random() < (MOVES_SHARE if any(weights) else 1.0):
        found.append(_at(rng, "moves", names, steps))
    return sorted(found, key=lambda fault: (fault.step, fault.after_s))


def _at(rng: random.Random, kind: str, names: Sequence[str], steps: int) -> Fault:
    target, other, seconds = KINDS[kind][1](rng, names)
    step, after_s = rng.randint(0, steps - 4), round(rng.uniform(0.0, 1.5), 3)
    return Fault(kind, step, after_s, target, other, round(seconds, 3))
