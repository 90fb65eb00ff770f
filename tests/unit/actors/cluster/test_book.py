"""Where jobs of a cluster go, and what follows from the steps that were seen of them."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.actors.cluster.book import LOOKED_AT, Book, JobRecord
from rubato.actors.cluster.pools import ClusterPoolSection, SchedulerSection
from rubato.actors.messages.cluster import JobNeeds
from rubato.planning.round_robin import StepTimes

GB = 1e9
UNKNOWN = JobNeeds(1, 1, GB, GB, 0.0, 0.0)


def section(nodes=1, **changes):
    pools = {
        "rollout": ClusterPoolSection(nodes=nodes, usd_hour=2.0, memory_gb=4),
        "training": ClusterPoolSection(nodes=nodes, usd_hour=5.0, memory_gb=4),
    }
    return SchedulerSection(**{**pools, "slo": 2, **changes})


def record(name, number=0, slo=2.0, **changes):
    return JobRecord(name=name, id=name, number=number, slo=slo, needs=changes.pop("needs", UNKNOWN), cwd="/", **changes)


def seen(rollout=10.0, train=10.0, num=2):
    return tuple(StepTimes(0.0, rollout, train) for _ in range(num))


def running(name, number=0, group=0, node=0, **changes):
    return record(name, number, state="running", group=group, node=node, **changes)


def test_the_first_job_has_nodes_to_itself():
    spot = Book(section()).spot(record("a"))

    assert (spot.group, spot.node) == (0, 0)
    assert spot.why == "job a has group 0 to itself for 7.00 $/h: 2 steps are profiled"


def test_an_unknown_job_shares_on_trial_where_all_others_are_known():
    known = Book(section(), [running("a", seen=seen())])
    unknown = Book(section(), [running("a")])

    assert known.spot(record("b")).why == "job b shares group 0 with a on trial: 2 steps are profiled"
    waiting = unknown.spot(record("b"))
    assert waiting.group == -1
    assert waiting.why.startswith("job b waits: 0 rollout and 0 training nodes are free")


def test_an_unknown_job_is_profiled_alone_where_nodes_are_free():
    spot = Book(section(nodes=2), [running("a", seen=seen())]).spot(record("b"))

    assert (spot.group, spot.node) == (1, 1)


def test_known_jobs_share_where_every_bound_holds_and_not_where_one_is_missed():
    def spot(train):
        book = Book(section(slo=1.2), [running("a", seen=seen(), slo=1.2)])
        return book.spot(record("b", slo=1.2, seen=seen(10.0, train)))

    assert spot(10.0).group == 0
    assert spot(60.0).group == -1


def test_a_job_that_is_known_by_its_max_tokens_is_planned_by_them():
    needs = JobNeeds(1, 1, GB, GB, 10.0, 10.0)

    spot = Book(section(), [running("a", seen=seen())]).spot(record("b", needs=needs))

    assert spot.why.startswith("job b shares group 0 with a: no new node")


def test_memory_of_a_node_is_a_budget():
    big = JobNeeds(1, 1, 3 * GB, GB, 0.0, 0.0)
    book = Book(section(), [running("a", seen=seen(), needs=big)])

    assert book.spot(record("b", needs=big)).group == -1
    assert book.spot(record("b", needs=big, seen=seen())).group == -1
    with pytest.raises(ValueError, match=r"needs 5\.0 GB of host memory on a rollout node, which has 4\.0 GB"):
        book.check(record("c", needs=JobNeeds(1, 1, 5 * GB, GB, 0.0, 0.0)))


def test_a_job_larger_than_a_node_is_refused():
    pool = ClusterPoolSection(gpus=2, usd_hour=1, memory_gb=4)

    with pytest.raises(ValueError, match="needs 4 GPUs for rollout, and a rollout node of this cluster has 2"):
        Book(section(rollout=pool)).check(record("a", needs=JobNeeds(4, 1, GB, GB, 0.0, 0.0)))


def test_a_bound_below_one_is_refused():
    with pytest.raises(ValueError, match=r"SLO of 0\.9: it must be at least 1"):
        Book(section()).check(record("a", slo=0.9))


def stepped(book, name, steps, slowdown=1.0):
    return [book.stepped(name, each, slowdown) for each in steps]


def test_a_job_that_was_profiled_alone_moves_in_with_another_where_that_costs_less():
    book = Book(section(nodes=2), [running("a", seen=seen()), running("b", 1, group=1, node=1)])

    verdicts = stepped(book, "b", seen())

    assert verdicts[0] is None
    assert verdicts[1].leaves == "b"
    assert verdicts[1].why.startswith("job b is profiled: rollout 50%, training 50% of 20.0 s; it moves: job b shares")
    assert book.spot(msgspec.structs.replace(book.jobs["b"], state="queued")).group == 0


def test_a_trial_that_shows_a_missed_bound_ends_with_the_newest_leaving():
    book = Book(section(), [running("a", slo=1.2, seen=seen()), running("b", 1, slo=1.2)])

    verdict = stepped(book, "b", seen(10.0, 60.0))[-1]

    assert verdict.leaves == "b"
    assert "group 0 would miss a bound: b leaves it" in verdict.why


def test_nobody_leaves_before_all_of_the_group_are_profiled():
    needs = JobNeeds(1, 1, GB, GB, 1.0, 1.0)
    book = Book(section(), [running("a", slo=1.2), running("b", 1, slo=1.2, needs=needs)])

    verdict = stepped(book, "a", seen())[-1]

    assert verdict.leaves == ""
    assert verdict.why.endswith("group 0 is judged once b is profiled too")


def test_drift_beyond_the_plan_is_told_and_planned_again():
    both = [
        running("a", seen=seen(), planned=StepTimes(0.0, 10.0, 10.0)),
        running("b", 1, slo=1.3, seen=seen(), planned=StepTimes(0.0, 10.0, 10.0)),
    ]
    a_little, a_lot = Book(section(), both), Book(section(), both)

    told = stepped(a_little, "a", seen(13.0, 10.0, LOOKED_AT))
    left = stepped(a_lot, "a", seen(40.0, 10.0, LOOKED_AT))

    assert told[:-1] == [None] * (LOOKED_AT - 1)
    assert told[-1].leaves == ""
    assert told[-1].why.startswith("the rollout of job a takes 13.0 s, planned 10.0 s; group 0 keeps every bound")
    assert left[-1].leaves == "b"


def test_one_slow_step_moves_no_plan():
    plan = StepTimes(0.0, 10.0, 10.0)
    book = Book(section(), [running("a", seen=seen(num=8), planned=plan)])

    verdicts = stepped(book, "a", [plan, plan, StepTimes(0.0, 90.0, 10.0), plan, plan])

    assert verdicts == [None] * 5
    assert book.jobs["a"].times == plan


def test_who_overruns_costs_the_newest_of_the_group_its_place():
    book = Book(section(), [running("a", slo=1.5, seen=seen()), running("b", 1, seen=seen())])

    verdict = stepped(book, "a", seen(num=LOOKED_AT), slowdown=1.7)[-1]

    assert verdict.leaves == "b"
    assert verdict.why == "job a takes 1.70 of its time alone, above its bound 1.5: b leaves group 0"


def test_a_group_in_which_a_job_overran_is_not_its_next_one():
    book = Book(section(), [running("a", seen=seen())])

    assert book.spot(record("b", seen=seen(), avoids=0)).group == -1


JOBS = st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100), st.floats(1, 3), st.booleans()), min_size=1, max_size=8)


@given(jobs=JOBS, nodes=st.integers(1, 4))
def test_places_are_never_given_beyond_nodes_and_memory(jobs, nodes):
    book = Book(section(nodes=nodes))
    for number, (rollout, train, slo, known) in enumerate(jobs):
        new = record(f"j{number}", number, slo=slo, seen=seen(rollout, train) if known else ())
        book.check(new)
        spot = book.spot(new)
        assert (spot.group >= 0) == (spot.node >= 0)
        if spot.group >= 0:
            book.jobs[new.name] = msgspec.structs.replace(new, state="running", group=spot.group, node=spot.node)

    groups = book.groups()
    held = [node for group in groups for node in group.nodes]
    assert len(groups) <= nodes
    assert len(held) == len(set(held)) <= nodes
    assert all(0 <= node < nodes for node in held)
    assert all(book.memory_gb(node) <= 4 for node in held)
    assert book.usd_hour() <= book.usd_hour_solo()
