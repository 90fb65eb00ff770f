"""Who is named for a wait, from records made by hand; whole jobs are in tests/chaos/test_why_matrix.py."""

import pytest

from rubato.runtime.monitor.snapshot import snapshot
from rubato.runtime.observe.figures import ITSELF, STORE, StageView, WaitView


def blocked(*records, silent=None):
    return snapshot("r", records, [], {}, silent=silent)["blocked"]


def named(*records, silent=None):
    return [(row["actor"], row["stage"], row["holder"], row["kind"]) for row in blocked(*records, silent=silent)]


def wait(stage, holder="", quiet_s=5.0, *, what="", blocks_actor=False):
    return WaitView(what or stage, "", holder, quiet_s, "", stage, quiet_s, blocks_actor)


@pytest.fixture
def asker(make_record):
    """Waits 5 s in a stage that usually takes 0.1 s."""
    return make_record("a-1", waits=(wait("ask b", "b"),), stages=(StageView("ask b", "b", 1, 1.0, 0.1),))


def test_one_that_beats_and_does_not_answer_is_stalled(asker, make_record):
    assert named(asker, make_record("b-1")) == [("a-1", "ask b", "b-1", "stalled")]


def test_one_that_never_took_so_little_is_not_stalled(make_record):
    usual = make_record("a-1", waits=(wait("ask b", "b"),), stages=(StageView("ask b", "b", 1, 1.0, 4.0),))

    assert named(usual, make_record("b-1")) == []


def test_one_without_a_heartbeat_is_stalled_whoever_waits_for_it(asker, make_record):
    rows = blocked(asker, make_record("b-1"), make_record("node-1"), silent={"b-1": 3.0})

    assert [(row["stage"], row["holder"], row["kind"]) for row in rows] == [("process", "b-1", "stalled"), ("ask b", "b-1", "stalled")]
    assert rows[0]["reason"] == "no heartbeat for 3.0 s: its event loop is stuck"


def test_without_a_node_agent_a_silent_actor_may_as_well_be_cut_off(make_record):
    (row,) = blocked(make_record("b-1"), silent={"b-1": 3.0})

    assert row["reason"].endswith("or its host is cut off")


@pytest.mark.parametrize(("stage", "kind"), [("dead", "dead"), ("stopped", "stalled"), ("starting", "starting")])
def test_what_a_node_agent_sees_of_a_process_is_believed(asker, make_record, stage, kind):
    node = make_record("node-1", waits=(WaitView("b-1", "signal 9", "", 1.2, "actors.b.restarts=5", stage),))

    rows = blocked(asker, node)

    assert {(row["holder"], row["kind"]) for row in rows} == {("b-1", kind)}
    assert rows[0]["limit"] == "actors.b.restarts=5"


def test_one_that_was_drained_is_told_from_a_dead_one_and_is_missed_by_nobody_who_does_not_wait_for_it(asker, make_record):
    node = make_record("node-1", waits=(WaitView("b-1", "", "", 60.0, "", "drained"),))

    waited_for = blocked(make_record("a-1", waits=(wait("ask b", "b-1"),)), node)

    assert [(row["holder"], row["kind"], row["reason"]) for row in waited_for] == [("b-1", "refused", "it was drained")]
    assert blocked(node) == []
    assert named(asker, node) == [("a-1", "ask b", "b", "dead")]


def test_one_that_drains_is_no_trouble_by_itself_and_is_told_to_who_waits_for_it(asker, make_record):
    draining = make_record("b-1", state="draining")

    assert blocked(draining) == []
    assert named(asker, draining) == [("a-1", "ask b", "b-1", "refused")]


def test_once_a_job_ends_those_that_left_are_missed_by_nobody_and_one_that_hangs_is_named(asker, make_record):
    ends = WaitView("the end of all actors", "interrupted", "", 9.0, "", "ending", 9.0)
    node = make_record("node-1", waits=(ends,))

    assert blocked(asker, node) == []
    assert blocked(asker, node, make_record("b-1", state="draining")) == []
    assert named(asker, node, make_record("b-1")) == [("a-1", "ask b", "b-1", "stalled")]


def test_a_role_of_which_nobody_is_up_is_dead(asker):
    assert named(asker) == [("a-1", "ask b", "b", "dead")]


def test_of_many_instances_the_worst_is_named(asker, make_record):
    found = named(asker, make_record("b-1"), make_record("b-2", state="draining"), make_record("b-3"))

    assert ("a-1", "ask b", "b-1", "stalled") in found


def test_a_late_event_loop_is_starved(make_record):
    assert named(make_record("b-1", loop__late=800.0)) == [("b-1", "process", "b-1", "starved")]


def test_one_that_is_set_aside_is_named_with_the_reason_and_holds_nobody_else_up(make_record):
    aside = WaitView("b-1", "b-1 is set aside, 10 s more: it failed", "", 0.2, "", "aside", 0.2)

    (row,) = blocked(make_record("a-1", waits=(aside,)), make_record("b-1", waits=(wait("work", "a-1", quiet_s=0.2),)))

    assert (row["holder"], row["kind"], row["reason"]) == ("b-1", "refused", aside.detail)


def test_a_refusal_names_who_refused_and_what(make_record):
    refused = WaitView("Generate", "its mailbox is full", "b-1", 0.4, "", "refused", 0.1)

    (row,) = blocked(make_record("a-1", waits=(refused,)), make_record("b-1"))

    assert (row["holder"], row["kind"], row["reason"]) == ("b-1", "refused", "Generate: its mailbox is full")


def test_a_wait_leads_through_what_the_holder_does_meanwhile(asker, make_record):
    busy = make_record("b-1", waits=(wait("checkpoint", blocks_actor=True),), stages=(StageView("checkpoint", "", 1, 1.0, 0.3),))

    assert named(asker, busy)[0] == ("a-1", "ask b", "b-1", "stalled")
    assert "no progress in checkpoint" in blocked(asker, busy)[0]["reason"]


def test_a_queue_of_the_actor_itself_leads_to_what_it_works_on(make_record):
    busy = make_record(
        "b-1",
        waits=(wait("queue", ITSELF, what="t2"), wait("reward", what="t1")),
        stages=(StageView("queue", ITSELF, 1, 1.0, 0.1), StageView("reward", "", 1, 1.0, 0.1)),
    )

    assert {(row["holder"], row["kind"]) for row in blocked(busy)} == {("b-1", "stalled")}
    assert all("in reward of t1" in row["reason"] for row in blocked(busy))


def test_the_store_can_be_the_culprit(make_record):
    writer = make_record("b-1", waits=(wait("put", STORE),), stages=(StageView("put", STORE, 1, 1.0, 0.1),))

    assert named(writer) == [("b-1", "put", "store", "stalled")]


def test_where_everything_moves_the_stage_with_most_of_the_work_is_slow(make_record):
    hungry = make_record("a-1", waits=(wait("batch", "b", what="batch 4"),), stages=(StageView("batch", "b", 1, 1.0, -1.0, True),))
    busy = make_record(
        "b-1",
        waits=(wait("step", quiet_s=0.3, what="t1"),),
        stages=(StageView("step", "", 4, 3.9, 1.0), StageView("generate", "c", 2, 1.0, 1.0)),
    )

    (row,) = blocked(hungry, busy, make_record("c-1"))

    assert (row["holder"], row["kind"]) == ("b-1", "slow")
    assert row["reason"] == "3.9 are in step on average, longest 1.0 s"


def test_one_that_asks_for_more_work_while_its_own_fills_all_slots_is_not_blocked(make_record):
    buffer = make_record(
        "b-1",
        waits=(WaitView("tickets", "all slots; oldest g1", "a-1", 5.0, "", "slots", 0.1),),
        stages=(StageView("slots", "a-1", 1, 1.0, 0.5, True),),
    )
    manager = make_record(
        "a-1",
        waits=(wait("tickets", "b", quiet_s=1.5), wait("step", quiet_s=0.1, what="g1.2")),
        stages=(StageView("tickets", "b", 1, 1.0, 1.4, True), StageView("step", "", 4, 4.0, 0.3)),
    )

    assert named(buffer, manager) == []


def test_a_stage_of_which_none_ended_yet_has_no_longest(make_record):
    idle = make_record(
        "a-1", waits=(wait("ask b", "b"),), stages=(StageView("ask b", "b", 1, 1.0, -1.0, idle=True), StageView("ask b", "b", 1, 1.0, -1.0))
    )

    rows = blocked(idle, make_record("b-1"))

    assert [row["kind"] for row in rows] == ["slow"]
    assert "none ended yet" in rows[0]["reason"]
