"""Where jobs of a cluster go, and what follows from the steps that were seen of them."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.actors.cluster.book import LOOKED_AT, Book, JobRecord, profile
from rubato.actors.cluster.cycles import Cycle
from rubato.actors.cluster.pools import ClusterPoolSection, SchedulerSection
from rubato.actors.messages.cluster import JobNeeds
from rubato.planning.consolidation import RolloutTail
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
    return [book.stepped(Cycle(name, each, (slowdown - 1) * sum(each))) for each in steps]


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
    assert "group 0 is judged once b is profiled too; promised: " in verdict.why


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


SAMPLES = JobNeeds(1, 1, GB, GB, 0.0, 0.0, max_tokens=100, steps=1000)


def cycle(name, rollout=10.0, train=10.0, waited=0.0, **rest):
    return Cycle(name, StepTimes(0.0, rollout, train), waited, **rest)


def test_a_job_that_computes_is_planned_by_max_tokens_at_the_rates_of_its_two_steps():
    book = Book(section(slo=1.5), [running("a", slo=1.5, needs=SAMPLES)])
    assert book.jobs["a"].promise == "on trial: nothing is promised until 2 of its steps are profiled"

    book.stepped(cycle("a"), at_limit=3.0)
    verdict = book.stepped(cycle("a", 12.0, 8.0), at_limit=2.0)

    assert book.jobs["a"].times == StepTimes(0.0, 30.0, 30.0)
    promise = "promised: at most 1.5 times its time alone, planned with every response at max_tokens, 60.0 s a step"
    assert verdict.why.endswith(f"it stays alone in group 0; {promise}")


def test_a_job_that_does_not_say_what_it_sampled_is_promised_its_bound_by_its_longest_step():
    assert running("a", slo=1.5, seen=seen()).promise.endswith("planned with its longest step seen, 20.0 s a step")


def test_a_place_keeps_every_bound_at_the_limit_and_as_steps_were_seen():
    def spot(limits, was_seen):
        a = running("a", slo=1.2, seen=seen(), limits=seen())
        return Book(section(slo=1.2), [a]).spot(record("b", slo=1.2, seen=was_seen, limits=limits)).group

    assert spot(seen(), seen()) == 0
    assert spot(seen(10.0, 60.0), seen()) == -1
    assert spot(seen(), seen(10.0, 60.0)) == -1


def test_what_was_promised_is_held_against_every_step_since_and_what_a_move_took():
    moved = running("a", seen=seen(), began_s=100.0, moved=True, starts=2)
    book = Book(section(), [moved])

    book.stepped(cycle("a"), now_s=150.0)  # 30 s until its first rollout
    assert book.jobs["a"].kept == pytest.approx(2.5)
    book.stepped(cycle("a", waited=10.0), now_s=200.0)
    assert book.jobs["a"].kept == pytest.approx((20 + 30 + 20 + 10) / 40)
    assert book.jobs["a"].cold_s == 30.0


def test_steps_on_trial_count_against_no_bound():
    book = Book(section(), [running("a", needs=SAMPLES, began_s=1.0)])

    for _ in range(2):
        book.stepped(cycle("a", waited=100.0), at_limit=1.0, now_s=300.0)

    assert book.jobs["a"].kept == 0.0


def halves(**changes):
    """Two groups that have lost a job each."""
    c = msgspec.structs.replace(running("c", 1, group=1, node=1, seen=seen(), needs=SAMPLES), **changes)
    return [running("a", seen=seen(), needs=SAMPLES), c]


def test_groups_that_departures_left_half_empty_move_together():
    book = Book(section(nodes=2), halves())

    plan = book.regrouped(0)

    (move,) = plan.moves
    assert {move.source, move.target} == {0, 1}
    mover = msgspec.structs.replace(book.jobs[move.job], state="queued", group=-1, node=-1, goes=move.target)
    book.jobs[move.job] = mover
    assert book.spot(mover).group == move.target
    assert "dissolved" in plan.why


@pytest.mark.parametrize("changes", [{"state": "leaving"}, {"seen": ()}, {"goes": 0}, {"step": 998}])
def test_a_job_that_leaves_or_is_not_known_yet_or_is_nearly_done_is_not_moved(changes):
    book = Book(section(nodes=2), halves(**changes))

    assert book.regrouped(0).moves == ()


def test_a_group_that_a_job_is_on_its_way_to_stays_until_it_has_come():
    on_its_way = msgspec.structs.replace(running("b", 2, seen=seen(), needs=SAMPLES), state="queued", group=-1, node=-1, goes=1)
    book = Book(section(nodes=3), [*halves(), on_its_way])

    assert book.regrouped(0).moves == ()
    book.jobs["b"] = msgspec.structs.replace(on_its_way, state="done")
    assert len(book.regrouped(0).moves) == 1


def test_a_live_pool_has_what_a_switch_costs_and_cores():
    pool = ClusterPoolSection(usd_hour=2.0, memory_gb=4, switch_s=3.0, cores=8)
    found = Book(section(rollout=pool)).cluster.rollout
    assert (found.switch_s, found.cores) == (3.0, 8.0)


def test_a_switch_counts_against_bounds_and_not_twice_where_it_was_seen():
    def spot(switch_s, **changes):
        pools = {kind: ClusterPoolSection(usd_hour=1.0, memory_gb=4, switch_s=switch_s) for kind in ("rollout", "training")}
        known = {"needs": JobNeeds(1, 1, GB, GB, 10.0, 10.0), "slo": 1.3} | changes
        return Book(section(**pools), [running("a", **known)]).spot(record("b", **known)).group

    assert spot(0.0) == 0
    assert spot(4.0) == -1
    assert spot(1.0, seen=seen(11.0, 11.0)) == 0


def test_environments_that_fill_the_cores_share_them_in_turns():
    def spot(cores):
        pool = ClusterPoolSection(usd_hour=2.0, memory_gb=4, cores=cores)
        steps = tuple(StepTimes(60.0, 10.0, 10.0) for _ in range(2))
        jobs = {"seen": steps, "slo": 1.2, "needs": JobNeeds(1, 1, GB, GB, 0.0, 0.0, cores=4.0)}
        return Book(section(rollout=pool), [running("a", **jobs)]).spot(record("b", **jobs)).group

    assert spot(8) == 0
    assert spot(4) == -1


def test_a_tail_that_was_seen_frees_its_places_in_the_plan_of_seen_steps_alone():
    tail = RolloutTail(0.5, 1)
    needs = JobNeeds(1, 1, GB, GB, 0.0, 0.0, engines=4, max_tokens=100)
    book = Book(section(), [running("a", needs=needs)])
    for begins in (0.4, 0.5, 1.0):
        book.stepped(cycle("a", tail=tail._replace(begins=begins)), at_limit=2.0)

    assert profile(book.jobs["a"], book.section, as_seen=True).tail == RolloutTail(0.5, 0.25)
    assert profile(book.jobs["a"], book.section).tail == RolloutTail()


# -- nodes on hosts that joined -----------------------------------------------------------------------------


def hosted(nodes, hosts, away):
    book = Book(section(nodes, rollout=ClusterPoolSection(nodes=nodes, usd_hour=2.0, memory_gb=4, hosts=hosts)))
    book.away = frozenset(away)
    return book


def test_a_node_whose_host_is_not_there_takes_no_job():
    assert hosted(2, ["near", "far"], {0}).spot(record("a")).node == 1


def test_a_job_without_a_place_is_told_which_host_its_node_waits_for():
    spot = hosted(1, ["far"], {0}).spot(record("a"))

    assert spot.group == -1
    assert spot.why.endswith("0 rollout and 1 training nodes are free; 1 of 1 rollout nodes lie on far, not joined yet")


def test_nor_does_it_join_a_group_there():
    book = hosted(1, ["far"], {0})
    book.jobs["a"] = running("a", seen=seen())

    assert book.spot(record("b")).group == -1
