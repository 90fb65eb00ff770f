"""How many workers a pool should have."""

from rubato.planning.autoscale import PoolBounds, PoolLoad, PoolMeter, WorkersWanted, autoscale

NONE = WorkersWanted(0, "")
BOUNDS = PoolBounds(0, 8)


def load(now=0.0, *, waiting=0, running=0, workers=0, rate=0.0, service=1.0, start=1.0):
    return PoolLoad(now, waiting, running, workers, rate, service, start)


def test_the_first_call_gets_a_worker_though_nothing_is_known_of_it():
    assert autoscale(load(waiting=1, service=None), BOUNDS, NONE).workers == 1


def test_calls_that_last_longer_than_a_start_get_a_worker_each():
    assert autoscale(load(waiting=3, running=2, workers=2, service=4.0), BOUNDS, NONE).workers == 5


def test_calls_that_are_over_before_a_worker_has_started_wait_for_those_that_are_there():
    assert autoscale(load(waiting=5, running=1, workers=1, service=0.1), BOUNDS, NONE).workers == 1


def test_a_steady_load_gets_workers_at_four_fifths_of_their_time():
    plan = autoscale(load(running=1, workers=1, rate=8.0, service=0.5), BOUNDS, NONE)

    assert plan.workers == 5
    assert plan.why == "1 calls of 0.5 s, 8 a second"


def test_what_is_not_needed_is_kept_for_ten_starts_and_then_goes():
    busy = autoscale(load(waiting=4, service=2.0), BOUNDS, NONE)
    calm = autoscale(load(1.0, workers=4), BOUNDS, busy)
    later = autoscale(load(10.9, workers=4), BOUNDS, calm)
    over = autoscale(load(11.0, workers=4), BOUNDS, later)

    assert [plan.workers for plan in (busy, calm, later, over)] == [4, 4, 4, 0]
    assert calm.again_s == later.again_s == 11.0
    assert over.again_s is None


def test_it_shrinks_to_the_most_that_was_needed_meanwhile():
    plan = autoscale(load(workers=6), BOUNDS, NONE)
    plan = autoscale(load(4.0, workers=6, running=3, service=2.0), BOUNDS, plan)
    plan = autoscale(load(8.0, workers=6), BOUNDS, plan)

    assert autoscale(load(10.0, workers=6), BOUNDS, plan).workers == 3


def test_a_need_as_high_as_what_is_there_begins_the_wait_anew():
    plan = autoscale(load(workers=2), BOUNDS, NONE)
    plan = autoscale(load(9.0, workers=2, running=2, service=2.0), BOUNDS, plan)
    plan = autoscale(load(10.0, workers=2), BOUNDS, plan)

    assert (plan.workers, plan.again_s) == (2, 20.0)


def test_a_rate_is_forgotten_when_nothing_has_come_for_ten_starts():
    meter = PoolMeter()
    meter.started(0.5)
    for tenth in range(20):
        meter.arrived(tenth / 10)
        meter.served(0.2)

    assert meter.load(1.9, waiting=0, running=0, workers=1).rate_hz == 20 / 5.0
    assert meter.load(9.0, waiting=0, running=0, workers=1).rate_hz == 0.0
