"""Faults drawn by seed from role and kind, alone and in pairs: what `monitor --why` names within 5 seconds, and that it names no other."""

import os
import random
from itertools import pairwise

from rubato.runtime.monitor.blocked import STALL_S
from rubato.runtime.monitor.text import blocked_line
from tests.faulty_job import FreezingLoop, running

SEED = int(os.environ.get("RUBATO_SEED", "1"))
WITHIN_S = 5.0
LOOK_S = 0.5
YOUNG_S = 2.0
"""Figures are up to a second old, and a stall shows after two."""

NUM_PAIRS = 14

ANSWERS = {"hang": "stalled", "stop": "stalled", "kill": "dead", "slow": "slow", "starve": "starved", "refuse": "refused"}
"""What each kind of fault is to be called; the holder is always the actor that was made to fail."""

BLOCKED = {
    "sample_buffer": {"hang": ("env_manager-1", "put"), "slow": ("trainer-1", "batch"), "refuse": ("env_manager-1", "put")},
    "llm_proxy": dict.fromkeys(("hang", "slow", "refuse"), ("trainer-1", "batch")),
    "engine": {"hang": ("trainer-1", "batch"), "slow": ("trainer-1", "batch"), "refuse": ("llm_proxy-1", "refused")},
    "env_manager": dict.fromkeys(("hang", "slow"), ("trainer-1", "batch")),
    "reward_service": dict.fromkeys(("hang", "slow", "refuse"), ("trainer-1", "batch")),
    "trainer": dict.fromkeys(("hang", "slow"), ("env_manager-1", "tickets")),
}  # fmt: skip
"""Who is blocked in which stage. Nothing is asked of environment managers and the trainer, so they can't refuse it."""

PROCESS = ("kill", "stop", "starve")
"""Faults of a process: named whether or not anybody waits for it."""

HOSTED_FIRST = ("refuse", "hang", *PROCESS)
"""Order in which a pair is inflicted: what only work that arrives can run into comes first."""

SINGLE = [(role, kind) for role in BLOCKED for kind in (*BLOCKED[role], *PROCESS)]


def pairs():
    """Of different roles. Slow parts are left out: beside something that stands still nobody waits for them."""
    draw = random.Random(SEED)
    drawn = []
    while len(drawn) < NUM_PAIRS:
        pair = draw.sample([case for case in SINGLE if case[1] != "slow"], 2)
        pair.sort(key=lambda case: HOSTED_FIRST.index(case[1]))
        if pair[0][0] != pair[1][0] and pair not in drawn:
            drawn.append(pair)
    return drawn


def cases():
    """Every fault alone, then the pairs."""
    return [[case] for case in SINGLE] + pairs()


def case_name(case) -> str:
    return "+".join(f"{role}-{kind}" for role, kind in case)


def named(rows):
    return {(row["holder"], row["kind"]) for row in rows}


async def looks_at(folder, case):
    """What is said every half second while `case` is the matter, and which of its faults anybody ran into."""
    async with running(folder) as job:
        began = FreezingLoop.running().time()
        for role, kind in case:
            job.inflict(f"{role}-1", kind)
        looks = []
        while FreezingLoop.running().time() < began + WITHIN_S:
            await FreezingLoop.sleep(LOOK_S)
            looks.append(await job.blocked())
        return looks, [(role, kind) for role, kind in case if job.bites(f"{role}-1", kind, WITHIN_S - STALL_S - 1.0)]


def check(case, folder) -> None:
    """Inflict `case` on a job in `folder`: it is named with its holder and kind within 5 seconds, and nobody else is."""
    looks, biting = FreezingLoop.run(lambda: looks_at(folder, case), seed=SEED)

    told = "\n".join(f"{index} {blocked_line(row)}" for index, look in enumerate(looks) for row in look)
    holders = {f"{role}-1" for role, _ in case}
    expected = {(f"{role}-1", ANSWERS[kind]) for role, kind in biting}
    # A healthy part is never said to stand still, to refuse or to be dead. It may pass for slow within the first seconds, and later
    # in one look: the figures of two actors are up to a second apart, and it may have answered in between.
    assert {holder for look in looks for holder, kind in named(look) if kind != "slow"} <= holders, told
    slow = [{holder for holder, kind in named(look) if kind == "slow"} for look in looks[int(YOUNG_S / LOOK_S) :]]
    assert set.union(*(one & next_one for one, next_one in pairwise(slow))) <= holders, told
    assert expected <= set.union(*map(named, looks)), told
    if len(case) == 1:
        ((role, kind),) = case
        stages = {(row["actor"], row["stage"]) for look in looks for row in look if row["holder"] == f"{role}-1"}
        assert biting == case
        assert (f"{role}-1", "process") in stages if kind in PROCESS else BLOCKED[role][kind] in stages, told
        assert any(named(look) == expected for look in looks), told
