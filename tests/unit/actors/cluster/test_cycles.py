"""A job's steps as the permits tell them."""

import pytest

from rubato.actors.cluster.cycles import Cycle, Cycles
from rubato.actors.cluster.permits import PermitEvent
from rubato.planning.consolidation import RolloutTail
from rubato.planning.permits import Stand
from rubato.planning.round_robin import StepTimes

ROLLOUT, TRAIN = "rollout-0", "training-0"


def event(kind, ticket, at_s, job="a"):
    return PermitEvent(kind, Stand(job, "phase", ticket, at_s), at_s)


def told(cycles, *events):
    return [cycle for pool, each in events if (cycle := cycles.told(pool, each)) is not None]


STEP = [
    (ROLLOUT, event("waits", 1, 0.0)),
    (ROLLOUT, event("holds", 1, 3.0)),
    (ROLLOUT, event("gone", 1, 8.0)),
    (TRAIN, event("waits", 2, 9.0)),
    (TRAIN, event("holds", 2, 11.0)),
    (TRAIN, event("gone", 2, 14.0)),
    (ROLLOUT, event("holds", 3, 15.0)),
]


def test_a_step_is_its_phases_its_waits_and_what_is_left():
    (cycle,) = told(Cycles(frozenset({ROLLOUT})), *STEP)

    assert cycle == Cycle("a", StepTimes(environment=2.0, rollout=5.0, train=3.0), waited_s=5.0)
    assert cycle.slowdown == pytest.approx(1.5)


def test_pools_that_tell_out_of_turn_make_the_same_step():
    late = [*STEP[:5], STEP[6], STEP[5]]

    assert told(Cycles(frozenset({ROLLOUT})), *late) == told(Cycles(frozenset({ROLLOUT})), *STEP)


def test_a_rollout_in_two_parts_is_one_step():
    parts = [
        (ROLLOUT, event("holds", 1, 0.0)),
        (ROLLOUT, event("gone", 1, 2.0)),
        (ROLLOUT, event("holds", 2, 3.0)),
        (ROLLOUT, event("gone", 2, 4.0)),
        (TRAIN, event("holds", 3, 4.0)),
        (TRAIN, event("gone", 3, 5.0)),
        (ROLLOUT, event("holds", 4, 5.0)),
    ]

    assert told(Cycles(frozenset({ROLLOUT})), *parts)[0].times == StepTimes(1.0, 3.0, 1.0)


def test_a_step_that_began_before_anybody_looked_is_not_told():
    assert told(Cycles(frozenset({ROLLOUT}), since_s=1.0), *STEP) == []


def test_a_job_that_moved_begins_anew():
    cycles = Cycles(frozenset({ROLLOUT}))
    told(cycles, *STEP[:3])
    cycles.forget("a")

    assert told(cycles, *STEP[3:]) == []


def test_a_rollout_that_gave_places_away_has_a_tail():
    kept = PermitEvent("narrows", Stand("a", "phase", 1, 0.0, 9, (0,)), 5.0)
    (cycle,) = told(Cycles(frozenset({ROLLOUT})), *STEP[:2], (ROLLOUT, kept), *STEP[2:])

    assert cycle.tail == RolloutTail((5 - 3) / (8 - 3), 1)
    assert cycle.times.rollout == 5.0
