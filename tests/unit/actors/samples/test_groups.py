"""All groups together, without a Store: turns, slots, steps, and what a checkpoint brings back."""

from dataclasses import replace

import msgspec
import pytest

from rubato.actors.data.prompts import Mixture, Prompts
from rubato.actors.messages.samples import PolicyState
from rubato.actors.samples import groups as groups_module
from rubato.actors.samples.group import NOTHING, Group, GroupLimits, Member, Receipt, SampleEnd, Training
from rubato.actors.samples.groups import ROUNDS_KEPT, Groups
from rubato.actors.samples.sample import Outcome, OutOfOrder, StaleTerm, Tally
from rubato.planning.prompts import Epochs, shuffled

LIMITS = GroupLimits(group_size=2, batch_groups=1, steps=100, run_seed=1, max_attempts=2, unbounded_batches=8, ticket_ttl_s=10.0)


@pytest.fixture
def groups():
    """One group per batch; α of 2, so three slots."""
    return Groups(LIMITS, 2)


def issue(groups, num=100, now=0.0):
    return groups.issue(num, "env_manager-1", 1, now)


def score(groups, tickets, *, version=None):
    """Every ticket with the reward of its member's number."""
    for ticket in tickets:
        reward = float(ticket.trajectory_id[-1])
        first = ticket.version if version is None else version
        groups.score(ticket.trajectory_id, Outcome(first, reward), b"payload of " + ticket.trajectory_id.encode())
    return tickets


def bind(groups, step):
    plan = groups.plan(step, 1)
    assert plan.take, plan.why
    groups.bind(step, groups.chosen(plan))
    return groups.steps[step]


def train(groups, step):
    score(groups, issue(groups))
    bound = bind(groups, step)
    groups.advance(step)
    return [group.id for group in bound]


def test_every_change_is_noted_once(groups):
    tickets = issue(groups, 2)
    first = groups.take_changes()
    score(groups, tickets)
    second = groups.take_changes()
    groups.advance(0)
    nothing = groups.take_changes()
    bind(groups, 1)
    third = groups.take_changes()
    groups.commit(1, term=4)
    fourth = groups.take_changes()

    names = [t.trajectory_id for t in tickets]
    assert (list(first.groups), first.payloads, first.ends, first.training) == (["g00000000"], {}, [], True)
    assert (list(second.groups), list(second.payloads), second.training) == (["g00000000"], names, True)
    assert (nothing.groups, nothing.payloads, nothing.ends, nothing.training) == ({}, {}, [], False)
    assert list(third.groups) == ["g00000000"]
    assert fourth.payloads == dict.fromkeys(names)
    assert [(end.trajectory_id, end.fate, end.step, end.term) for end in fourth.ends] == [(name, "trained", 1, 4) for name in names]


def test_a_filed_sample_leaves_no_payload_to_delete(groups):
    one, two = issue(groups, 2)
    groups.score(one.trajectory_id, Outcome(0, 0.0), digest="d1")
    groups.score(two.trajectory_id, Outcome(0, 1.0), digest="d2")
    bind(groups, 1)
    groups.commit(1, 1)

    assert groups.take_changes().payloads == {}


def test_slots_are_held_by_what_is_open_ready_or_bound(groups):
    tickets = issue(groups)
    held = [len(tickets)]
    score(groups, tickets)
    held.append(len(issue(groups)))
    bind(groups, 1)
    held.append(len(issue(groups)))
    groups.advance(1)
    held.append(len(issue(groups)))

    assert held == [6, 0, 0, 2]
    assert list(groups.trained) == ["g00000000"]


def test_what_was_taken_back_comes_first_and_as_another_attempt(groups):
    one, two, *_ = issue(groups, 4)

    groups.take_back(one.trajectory_id, "lease_lapsed", counted=True)
    again, new, *_ = issue(groups)

    assert (again.trajectory_id, again.attempt) == (one.trajectory_id, 2)
    assert new.group_id == "g00000002"
    assert groups.settled_fate(one) == "superseded"
    assert groups.settled_fate(two) is None


def test_every_rollout_of_every_run_seed_has_its_own_noise():
    runs = [Groups(replace(LIMITS, run_seed=seed), 2) for seed in (1, 2, 1)]
    one, two, same = ([t.noise for t in issue(run)] for run in runs)

    assert same == one
    assert len({*one, *two}) == 12


@pytest.mark.parametrize("purpose", ["train", "eval"])
def test_a_lost_attempt_draws_the_same_again_and_one_after_a_failure_anew(purpose):
    groups = Groups(replace(LIMITS, max_attempts=9), 2)
    if purpose == "eval":
        groups.round("eval-1.0", 1)
    noises = []
    for counted, failed in ((True, False), (False, False), (True, True), (True, False)):
        (ticket,) = issue(groups, 1)
        noises.append((ticket.trajectory_id, ticket.noise))
        groups.take_back(ticket.trajectory_id, "why", counted=counted, failed=failed)

    assert ticket.purpose == purpose
    assert noises[0] == noises[1] == noises[2]
    assert (noises[3][0], noises[3][1] != noises[0][1]) == (noises[0][0], True)


def test_attempts_that_count_are_used_up(groups):
    (ticket,) = issue(groups, 1)
    told = [groups.take_back(ticket.trajectory_id, "drained", counted=False)]
    for _ in range(2):
        issue(groups, 1)
        told.append(groups.take_back(ticket.trajectory_id, "env_timeout", counted=True))

    assert told == ["", "", "failed"]
    end, *_ = groups.take_changes().ends
    assert (end.fate, end.attempt, end.reason) == ("failed", 3, "env_timeout")


def test_unsent_tickets_are_the_same_attempt_again(groups):
    tickets = issue(groups, 3)

    groups.unsend(tickets[1:])

    assert [(t.trajectory_id, t.attempt) for t in issue(groups, 2)] == [(t.trajectory_id, 1) for t in tickets[1:]]


def test_leases_lapse_in_order_and_are_renewed_by_the_newest_attempt_only(groups):
    one, two = issue(groups, 2, now=0.0)
    groups.renew(one.trajectory_id, one.attempt, 5.0)
    groups.renew(two.trajectory_id, two.attempt + 1, 5.0)

    assert groups.leases == {one.trajectory_id: 15.0, two.trajectory_id: 10.0}


@pytest.mark.parametrize("name", ["", "g1", "g00000000.9", "g00000009.0", "nonsense.x"])
def test_what_is_unknown_is_superseded(groups, name):
    (ticket,) = issue(groups, 1)
    unknown = type(ticket)(name, "g", 1, 0, 0, 0, 0)

    assert groups.settled_fate(unknown) == "superseded"
    assert groups.find(name) is None


def test_a_step_takes_the_oldest_groups_and_none_twice(groups):
    score(groups, issue(groups))

    first, second = bind(groups, 1), bind(groups, 2)

    assert [group.id for group in (*first, *second)] == ["g00000000", "g00000001"]
    assert groups.last_bound == 2


def test_a_step_is_claimed_in_order(groups):
    score(groups, issue(groups))

    with pytest.raises(OutOfOrder, match="step 2 was claimed, but 0 is the last"):
        groups.plan(2, 1)
    bind(groups, 1)
    groups.plan(2, 1)
    groups.commit(1, 1)
    with pytest.raises(OutOfOrder, match="step 1 was claimed, but 1 is committed already"):
        groups.plan(1, 1)
    groups.plan(2, 1)


def test_a_replaced_trainer_is_refused_and_a_newer_one_is_known_from_then_on(groups):
    groups.check_term(3)

    with pytest.raises(StaleTerm, match="term 2 acts, but 3 is the newest"):
        groups.check_term(2)
    groups.check_term(3)

    assert groups.training.term == 3


def test_groups_that_are_too_old_for_a_step_end_before_it_is_planned(groups):
    old = issue(groups, 2)
    groups.score(old[0].trajectory_id, Outcome(0, 1.0), b"")
    groups.advance(3)

    plan = groups.plan(1, 1)
    groups.drop_old(1)

    assert not plan.take
    assert [end.fate for end in groups.take_changes().ends] == ["stale", "stale"]
    assert groups.settled_fate(old[1]) == "stale"


def test_unbounded_jobs_drop_nothing_for_its_age():
    groups = Groups(LIMITS, -1)
    tickets = issue(groups)
    groups.advance(50)

    score(groups, tickets)
    groups.plan(1, 1)

    assert groups.take_changes().ends == []
    assert len(tickets) == 8 * 2


@pytest.mark.parametrize("lost", [[0], [0, 1]])
def test_a_group_of_which_samples_are_gone_trains_with_the_rest_or_ends(lost):
    groups = Groups(three_members(), 2)
    score(groups, issue(groups, 3))
    (group,) = groups.ready()

    groups.lose(group, lost)

    fates = {end.trajectory_id: end.fate for end in groups.take_changes().ends}
    assert [fates.get(f"g00000000.{index}") for index in lost] == ["lost"] * len(lost)
    if len(lost) == 1:
        assert len(fates) == 1
        assert bind(groups, 1)[0].scored == [1, 2]
    else:
        assert fates["g00000000.2"] == "group_too_small"
        assert not groups.live


def three_members():
    return GroupLimits(group_size=3, batch_groups=1, steps=100, run_seed=1, max_attempts=2, unbounded_batches=8, ticket_ttl_s=10.0)


def test_a_trainer_that_begins_again_trains_the_same_groups_in_the_same_order(groups):
    trained = {step: train(groups, step) for step in (1, 2, 3)}
    groups.commit(1, 1)

    groups.take_over(2, 1)
    bound = {step: [group.id for group in groups.steps[step]] for step in groups.steps}

    assert bound == {2: trained[2], 3: trained[3]}
    assert {group.state for step in (2, 3) for group in groups.steps[step]} == {"bound"}
    assert not groups.trained
    assert list(groups.live) == sorted(groups.live)
    groups.advance(3)
    assert {group.state for step in (2, 3) for group in groups.steps[step]} == {"trained"}


@pytest.mark.parametrize(("alpha", "dropped"), [(2, []), (1, [3]), (0, [2, 3])])
def test_a_run_that_goes_on_with_a_lower_bound_samples_anew_what_bound_steps_have_beyond_it(alpha, dropped):
    before = Groups(LIMITS, 2)
    for step in (1, 2, 3):
        score(before, issue(before), version=0)
        train(before, step)
    before.commit(1, 0)
    groups = Groups(LIMITS, alpha)
    groups.restore(*stored(before), 0.0)
    groups.take_over(2, 1)
    bound = {step: [group.id for group in each] for step, each in groups.steps.items()}

    found = groups.drop_bound(alpha)

    assert found == dropped
    assert {end.group_id for end in groups.take_changes().ends if end.fate == "stale"} == {name for step in dropped for name in bound[step]}
    assert [*groups.steps] == [step for step in (2, 3) if step not in dropped]
    assert all(group.state == "bound" for each in groups.steps.values() for group in each)
    assert groups.training.version == 3 - len(dropped)


def test_versions_that_came_of_dropped_steps_are_withdrawn():
    before = Groups(LIMITS, 2)
    for step in (1, 2, 3):
        score(before, issue(before, 2), version=0)
        bind(before, step)
        before.advance(step)
    before.commit(1, 0)
    groups = Groups(LIMITS, 0)
    groups.restore(*stored(before), 0.0)
    groups.take_over(2, 1)
    assert groups.policy.newest == 3

    groups.drop_bound(0)

    assert groups.policy == PolicyState(1, 0, newest=1)
    assert {ticket.version for ticket in issue(groups, 3)} == {1}


def test_a_version_whose_groups_the_store_forgot_is_withdrawn_as_a_trainer_begins_again(groups):
    train(groups, 1)
    groups.commit(1, 1)
    groups.advance(2)  # the trainer trained step 2, of which nothing is known here any more

    groups.take_over(2, 1)

    assert groups.policy == PolicyState(1, groups.alpha, newest=1)


def test_a_bound_step_may_have_sampled_already_though_it_does_not_count_as_trained(groups):
    score(groups, issue(groups, 4))
    bind(groups, 1)

    assert groups.policy == PolicyState(0, groups.alpha, newest=1)


def test_an_attempt_that_is_lost_and_heard_of_time_and_again_is_one_try(groups):
    (ticket,) = issue(groups, 1)
    for _ in range(2 * groups.limits.max_attempts):
        groups.take_back(ticket.trajectory_id, "lease_lapsed", counted=True)
        groups.renew(ticket.trajectory_id, ticket.attempt, 5.0)

    member = groups.find(ticket.trajectory_id)[1]
    assert (member.state, member.tries) == ("running", 1)


def test_a_trainer_whose_checkpoint_is_newer_than_what_was_committed_commits_it(groups):
    trained = train(groups, 1) + train(groups, 2)

    groups.take_over(5, 2)

    ends = groups.take_changes().ends
    assert {end.group_id: (end.fate, end.step, end.term) for end in ends} == {
        name: ("trained", step, 5) for step, name in enumerate(trained, 1)
    }
    assert (groups.training.committed, groups.training.term, groups.steps) == (2, 5, {})


def test_what_is_committed_twice_ends_once(groups):
    train(groups, 1)
    groups.commit(1, 1)
    first = len(groups.take_changes().ends)

    groups.commit(1, 1)
    groups.commit(0, 1)

    assert (first, groups.take_changes().ends) == (2, [])


def test_a_step_that_raised_twice_in_a_row_is_poisoned(groups):
    score(groups, issue(groups))
    (group,) = bind(groups, 1)

    once = groups.raised(1, 1)
    groups.training = Training(**{name: getattr(groups.training, name) for name in Training.__struct_fields__})
    asked_again = groups.raised(1, 1)
    twice = groups.raised(1, 2)
    (other,) = bind(groups, 1)

    assert (once, asked_again, twice) == ([], [], [group])
    assert (group.state, group.fate) == ("ended", "poisoned")
    assert other.id == "g00000001"
    assert groups.raised(1, 2) == groups.raised(1, 3) == []


def test_raising_in_another_step_begins_the_count_anew(groups):
    score(groups, issue(groups))
    bind(groups, 1)
    bind(groups, 2)

    assert [groups.raised(step, term) for term, step in enumerate((1, 2, 1, 2), 1)] == [[]] * 4


def test_only_the_newest_ended_groups_are_remembered(groups, monkeypatch):
    monkeypatch.setattr(groups_module, "ENDED_KEPT", 40)
    (first, *_) = issue(groups)
    last = None
    while groups.settled_fate(first) != "superseded":
        for group in [*groups.open()]:
            groups._end(group, group.discard("unused"))
        (last, *_) = issue(groups)

    remembered = sum(len(group.members) for group in groups._ended.values())
    assert 40 - groups.limits.group_size < remembered <= 40
    for group in [*groups.open()]:
        groups._end(group, group.discard("unused"))
    assert groups.settled_fate(last) == "unused"


def test_an_ended_group_is_remembered_without_the_figures_of_its_samples(groups):
    tickets = issue(groups)[: groups.limits.group_size]
    name = tickets[0].group_id
    for at, ticket in enumerate(tickets):
        groups.score(ticket.trajectory_id, Outcome(ticket.version, float(at), 5, 1, 2.0, ("stop",), scores={"env": 1.0}), b"payload")
    bind(groups, 1)
    groups.advance(1)
    groups.commit(1, 1)

    assert [end.outcome.scores for end in groups.changes.ends if end.group_id == name] == [{"env": 1.0}] * len(tickets)
    assert [member.outcome for member in groups.ended(name).members] == [NOTHING] * len(tickets)
    assert [groups.settled_fate(ticket) for ticket in tickets] == [""] * len(tickets)


# -- what a restart and a checkpoint bring -------------------------------------------------------------------------


def stored(groups):
    """What the Store has, as another process decodes it."""
    kept = (*groups.live.values(), *groups.trained.values())
    every = msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=list[Group])
    training = msgspec.msgpack.decode(msgspec.msgpack.encode(groups.training), type=Training)
    return training, sorted(every, key=lambda group: group.id)


def receipt(groups, step):
    ends = tuple(end for group in groups.steps[step] for end in group.ends(1))
    return Receipt(step, groups.training.cursor, ends)


def test_a_restored_buffer_stands_where_the_one_before_stood(groups):
    train(groups, 1)
    score(groups, issue(groups))
    bind(groups, 2)
    running = issue(groups)
    again = Groups(LIMITS, 2)

    again.restore(*stored(groups), 7.0)

    assert again.live == groups.live
    assert again.trained == groups.trained
    assert again.steps == groups.steps
    assert again.training == groups.training
    assert again.leases == {t.trajectory_id: 17.0 for t in running}
    assert [again.settled_fate(t) for t in running] == [None] * len(running)


def test_steps_that_the_store_forgot_altogether_come_from_the_receipts(groups):
    first, second = train(groups, 1), train(groups, 2)
    receipts = [receipt(groups, 1), receipt(groups, 2)]
    again = Groups(LIMITS, 2)
    again.restore(Training(), [], 0.0)

    again.cover(receipts)

    assert list(again.trained) == [*first, *second]
    assert again.training.cursor == receipts[1].cursor
    assert {group.state for group in again.live.values()} == {"open"}
    assert not {*again.live} & {*again.trained}
    again.commit(2, 1)
    ends = again.take_changes().ends
    assert sorted(end.group_id for end in ends) == sorted(2 * [*first, *second])
    assert {end.fate for end in ends} == {"trained"}


def test_receipts_of_steps_that_are_known_or_committed_change_nothing(groups):
    train(groups, 1)
    train(groups, 2)
    receipts = [receipt(groups, 1), receipt(groups, 2)]
    groups.commit(1, 1)
    groups.take_changes()
    before = stored(groups)

    groups.cover(receipts)
    groups.cover(receipts)

    assert stored(groups) == before
    assert groups.take_changes().ends == []


def test_groups_that_were_bound_instead_of_the_trained_ones_may_train_later(groups):
    train(groups, 1)
    told = receipt(groups, 1)
    again = Groups(LIMITS, 2)
    again.restore(Training(cursor=2), [], 0.0)
    again.training.cursor = 5
    score(again, issue(again))
    (other,) = bind(again, 1)

    again.cover([told])

    assert other.state == "ready"
    assert [group.id for group in again.steps[1]] == ["g00000000"]
    assert other.id in again.live
    assert bind(again, 2) == [other]


def test_a_group_that_runs_again_although_it_was_trained_is_taken_from_its_holders(groups):
    train(groups, 1)
    told = receipt(groups, 1)
    again = Groups(LIMITS, 2)
    (ticket, *_) = issue(again)

    again.cover([told])

    assert ticket.group_id == "g00000000"
    assert again.settled_fate(ticket) == ""
    assert ticket.group_id not in again.live
    assert ticket.trajectory_id not in again.leases
    again.commit(1, 1)
    assert [end.trajectory_id for end in again.take_changes().ends] == ["g00000000.0", "g00000000.1"]


def test_a_new_store_passes_over_what_earlier_steps_may_have_trained(groups):
    train(groups, 1)
    second = train(groups, 2)
    told = receipt(groups, 2)
    new = Groups(LIMITS, 2)
    new.restore(Training(), [], 0.0)

    new.cover([told])

    assert list(new.trained) == second
    assert new.training.cursor == told.cursor
    assert not new.live
    assert new.policy.version == 2  # what is sampled before the trainer is there waits for its weights


def test_a_failed_member_that_the_store_forgot_ends_as_the_checkpoint_says(groups):
    ends = (
        SampleEnd("g00000000.0", "g00000000", 2, 0, "failed", 0, 0, NOTHING, "env_timeout"),
        SampleEnd("g00000000.1", "g00000000", 1, 0, "zero_spread", 1, 1, Outcome(0, 1.0, 3, 1, 0.5), ""),
        SampleEnd("g00000000.2", "g00000000", 1, 0, "zero_spread", 1, 1, Outcome(0, 1.0, 3, 1, 0.5), ""),
    )
    remembered = Group("g00000000", 0, [Member("failed", 2, fate="failed", reason="env_timeout"), Member(), Member()])
    forgot, knew = Groups(three_members(), 2), Groups(three_members(), 2)
    knew.restore(Training(cursor=1), [remembered], 0.0)
    told = []
    for each in (forgot, knew):
        each.cover([Receipt(1, 1, ends)])
        each.commit(1, 1)
        told.append(each.take_changes().ends)

    assert told == [list(ends), list(ends[1:])]


def test_held_out_rounds_are_issued_first_and_hold_no_slots(groups):
    issue(groups, 1)
    groups.round("eval-x", 2)

    tickets = issue(groups)

    assert [t.purpose for t in tickets] == ["eval"] * 2 + ["train"] * 5
    assert "eval-x" not in groups.take_changes().groups
    for ticket in tickets[:2]:
        groups.score(ticket.trajectory_id, Outcome(0, 1.0))
    for number in range(ROUNDS_KEPT):
        groups.round(f"eval-{number}", 0)
    assert groups.settled_fate(tickets[0]) == "superseded"
    assert not [name for name in groups.leases if name.startswith("eval")]


def test_of_an_attempt_whose_holder_died_nobody_knows_what_it_sampled(groups):
    lost, _ = issue(groups, 2)

    groups.take_back(lost.trajectory_id, "holder_left", counted=True)

    tally = groups.training.tally
    assert (tally.lost_attempts, tally.generated) == (1, 0)


@pytest.mark.parametrize("heard_of", ["renewed", "scored", "failed"])
def test_an_attempt_that_is_heard_of_after_all_was_not_lost(groups, heard_of):
    (ticket,) = issue(groups, 1)
    groups.take_back(ticket.trajectory_id, "lease_lapsed", counted=True)
    groups.take_changes()

    if heard_of == "renewed":
        groups.renew(ticket.trajectory_id, ticket.attempt, 5.0)
    elif heard_of == "scored":
        groups.score(ticket.trajectory_id, Outcome(0, 1.0, 30, 2), b"")
    else:
        groups.fail(ticket.trajectory_id, "failed", "reward_failed", Outcome(-1, None, 30, 2))

    assert groups.training.tally.lost_attempts == 0
    assert groups.take_changes().training


def test_what_was_given_back_does_not_run_again_by_a_lease_that_is_renewed_late(groups):
    (ticket,) = issue(groups, 1)
    groups.take_back(ticket.trajectory_id, "drained", counted=False, spent=Outcome(-1, None, 30, 2))

    groups.renew(ticket.trajectory_id, ticket.attempt, 5.0, "env_manager-1", 1)

    assert groups.find(ticket.trajectory_id)[1].state == "pending"
    assert not groups.leases


def test_a_holder_that_came_back_has_its_rollouts_as_what_it_is_now(groups):
    one, two = issue(groups, 2)
    for ticket in (one, two):
        groups.renew(ticket.trajectory_id, ticket.attempt, 5.0, groups.find(ticket.trajectory_id)[1].holder, 7)
    groups.renew(two.trajectory_id, two.attempt, 6.0, "another", 9)

    assert [member.incarnation for _, member in groups.running()] == [7, 7]


def test_a_new_held_out_round_ends_the_one_that_is_not_finished(groups):
    groups.round("eval-a", 3)
    (ticket,) = issue(groups, 1)

    groups.round("eval-b", 1, version=0)

    assert groups.settled_fate(ticket) == "superseded"
    assert [t.group_id for t in issue(groups) if t.purpose == "eval"] == ["eval-b"]
    assert not [name for name in groups.leases if name.startswith("eval-a")]


def test_a_rollout_that_lapsed_and_gives_up_before_another_begins_tells_its_tokens_once(groups):
    (ticket,) = issue(groups, 1)
    groups.take_back(ticket.trajectory_id, "lease_lapsed", counted=True)

    for _ in range(2):
        groups.take_back(ticket.trajectory_id, "drained", counted=False, spent=Outcome(-1, None, 30, 2))

    tally = groups.training.tally
    assert (tally.generated, tally.tokens["retried"], tally.lost_attempts) == (30, 30, 0)
    assert groups.find(ticket.trajectory_id)[1].tries == 1


def test_what_was_sampled_by_a_rollout_whose_last_holder_died_is_not_known(groups):
    (ticket,) = issue(groups, 1)
    for _ in range(groups.limits.max_attempts):
        groups.take_back(ticket.trajectory_id, "holder_left", counted=True)
        issue(groups, 1)

    end, other = groups.take_changes().ends
    assert (end.fate, end.outcome.tokens) == ("failed", -1)
    assert other.fate == "group_too_small"
    assert groups.training.tally.lengths[0].ended == 2


def test_a_store_that_forgot_its_newest_groups_gives_each_row_once_all_the_same():
    rows = Mixture({"sums": Prompts(2.0, Epochs(lambda epoch: shuffled(5, 1, epoch))), "walk": Prompts(1.0)})
    limits = replace(LIMITS, mixture=rows)
    groups = Groups(limits, 20)
    first = {(t.task, t.row, t.group_id) for t in issue(groups, 12)}
    kept = stored(groups)
    later = {(t.task, t.row, t.group_id) for t in issue(groups, 18)}
    again = Groups(limits, 20)

    again.restore(*kept, 0.0)

    assert {(t.task, t.row, t.group_id) for t in issue(again, 18)} == later
    sums = [row for task, row, _ in sorted(first | later, key=lambda found: found[2]) if task == "sums"]
    assert [sorted(sums[at : at + 5]) for at in (0, 5)] == [[0, 1, 2, 3, 4]] * 2
    assert [row for task, row, _ in sorted(first | later, key=lambda found: found[2]) if task == "walk"] == [*range(5)]


def test_a_held_out_round_shows_each_held_out_row_of_each_task_once():
    rows = Mixture({"sums": Prompts(held_out=[7, 3]), "walk": Prompts(weight=0.0)})
    groups = Groups(replace(LIMITS, mixture=rows), 2)
    groups.round("eval-a", 3)

    tickets = issue(groups, 5)

    assert [(t.task, t.row) for t in tickets] == [("sums", 7), ("walk", 0), ("sums", 3), ("walk", 1), ("walk", 2)]
    assert len({t.seed for t in tickets}) == 5


def test_trained_and_ended_are_counted_by_task_too():
    tally = Tally()
    tally.tell(12)
    tally.end("trained", 4, "sums")
    tally.end("stale", 4, "sums")
    tally.end("unused", 4, "walk")

    found = dict(tally.figures(0, [(4, "walk")]))

    assert {name: value for name, value in found.items() if name.startswith("task/")} == {
        "task/sums/ended": 2,
        "task/sums/trained_frac": 0.5,
        "task/sums/stale_frac": 0.5,
        "task/walk/ended": 1,
        "task/walk/trained_frac": 1.0,
    }


def test_what_was_cancelled_counts_by_what_it_had_sampled_once_that_is_known():
    tally = Tally()
    tally.end("stale", 0, "sums")
    tally.end("stale", 0, "sums")

    tally.measured("stale", 5)

    assert {name: value for name, value in tally.figures(0, []) if name.startswith("length/")} == {
        "length/0/ended": 1, "length/0/trained_frac": 0.0, "length/0/stale_frac": 1.0,
        "length/8/ended": 1, "length/8/trained_frac": 0.0, "length/8/stale_frac": 1.0,
    }  # fmt: skip

    tally.measured("stale", 6)

    assert not any(name.startswith("length/0/") for name, _ in tally.figures(0, []))
