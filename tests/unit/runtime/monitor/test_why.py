import pytest

from rubato.runtime.monitor.snapshot import snapshot
from rubato.runtime.monitor.text import explain, render
from rubato.runtime.observe.figures import StageView, WaitView


def test_the_tree_leads_from_the_trainer_to_the_slow_environment(waiting_run):
    lines = render(waiting_run, 120).split("\n\n")[1].splitlines()

    assert lines[0].startswith("trainer-1 waits 12.4 s for batch 42: 29 of 32 groups")
    assert lines[0].endswith("limit samples.claim_s = 60")
    assert lines[1].startswith("  └ sample_buffer-1 waits 12.3 s for batch 42")
    assert lines[2].startswith("    └ env_manager-1 waits 11.9 s for g1307.2: env.step (p99 0.4 s) (and 2 more)")
    assert lines[2].endswith("limit env.step_timeout_s = 60")
    assert lines[3] == "engine-1, engine-2: nothing waits"


def test_each_blocked_stage_is_one_line_with_its_holder_kind_reason_and_limit(waiting_run):
    lines = " ".join(render(waiting_run, 300).split("\n\n")[0].split())

    assert lines.startswith(
        "trainer-1 waits 12.4 s for batch 42: 29 of 32 groups; env_manager-1 is stalled: "
        "no progress in env.step of g1307.2 for 11.9 s; longest before 0.4 s limit env.step_timeout_s = 60"
    )


def test_no_line_is_wider_than_the_screen_and_nothing_is_cut(waiting_run):
    text = render(waiting_run, 60)

    assert max(len(line) for line in text.splitlines()) <= 60
    assert "…" not in text
    assert "oldest group g1307 has 7 of 8" in " ".join(text.split())


def test_a_circle_of_waits_is_named_and_ends_the_walk(make_record):
    records = [make_record("a-1", waits=(WaitView("x", "", "b", 2.0),)), make_record("b-1", waits=(WaitView("y", "", "a", 1.0),))]

    lines = [cause.text for cause in explain(snapshot("r", records, [], {}))]

    assert lines == ["a-1 waits 2.0 s for x", "b-1 waits 1.0 s for y", "a-1, which waits above: a circle"]


def test_who_asks_for_more_work_is_in_no_circle_with_what_it_has_in_hand(make_record):
    asks = (StageView("tickets", "sample_buffer", num=1, load=1.0, longest_s=0.1, idle=True),)
    tickets = WaitView("tickets", "room for 1 rollouts", "sample_buffer", 3.0, stage="tickets")
    slots = WaitView("tickets", "all 4 slots hold groups; oldest group g28", "env_manager-1", 2.0, stage="slots")
    playing = WaitView("g28.1", "", "env_manager-1", 1.0, stage="env.step")

    idle, busy = (
        [cause.text for cause in explain(snapshot("r", [make_record("env_manager-1", waits=waits, stages=asks),
                                                        make_record("sample_buffer-1", waits=(slots,))], [], {}))]
        for waits in ((tickets,), (tickets, playing))
    )  # fmt: skip

    assert idle[-1] == "env_manager-1, which waits above: it has work in hand"
    assert busy[2].startswith("env_manager-1 waits 1.0 s for g28.1: env.step")
    assert "circle" not in " ".join(idle + busy)


def test_an_actor_whose_request_waits_for_another_stage_of_its_own_is_in_no_circle(make_record):
    queued = WaitView("g28.1", "", "itself", 1.0, stage="queue")
    at_work = WaitView("g27.3", "4 trajectories", "", 2.0, stage="reward")

    between, busy = (
        [c.text for c in explain(snapshot("r", [make_record("reward_service-1", waits=waits)], [], {}))]
        for waits in ((queued,), (queued, at_work))
    )

    assert between[-1] == "reward_service-1, which waits above: it has work in hand"
    assert busy == ["reward_service-1 waits 2.0 s for g27.3: reward, 4 trajectories (and 1 more)"]


@pytest.mark.parametrize(
    ("holder", "said"),
    [
        ("store", "the run's Store"),
        ("the cluster's Store", "it does not answer"),
        ("engine", "engine-1 is starting: its process starts"),
        ("engine-1", "engine-1 is starting: its process starts"),
        ("trainer", "trainer: no such actor is up"),
    ],
)
def test_what_is_known_of_a_holder_that_is_not_registered_is_said(holder, said, make_record):
    starting = make_record("node-1", waits=(WaitView("engine-1", "", "", 2.0, stage="starting"),))
    asker = make_record("a-1", waits=(WaitView("x", "", holder, 3.0),))

    lines = [cause.text for cause in explain(snapshot("r", [asker, starting], [], {}))]

    assert lines[lines.index("a-1 waits 3.0 s for x") + 1] == said


def test_the_clusters_store_is_blamed_where_it_does_not_answer_and_nobody_while_another_job_has_its_turn(make_record):
    stage = StageView("training", "", num=1, load=1.0, longest_s=0.1)
    waits = {
        holder: WaitView("permit", "the pool train", holder, 60.0, stage="training", quiet_s=60.0, blocks_actor=True)
        for holder in ("the cluster's Store", "another job")
    }

    blocked = {
        holder: snapshot("r", [make_record("trainer-1", waits=(wait,), stages=(stage,))], [], {})["blocked"]
        for holder, wait in waits.items()
    }

    ((row,), none) = blocked.values()
    assert (row["holder"], row["kind"]) == ("the cluster's Store", "stalled")
    assert none == []


def test_a_holder_that_does_not_wait_is_shown_at_work(make_record):
    records = [make_record("a-1", waits=(WaitView("x", "", "b-1", 2.0),)), make_record("b-1")]

    lines = explain(snapshot("r", records, [], {}))

    assert lines[1] == (1, "b-1 waits for nothing: ready, mailbox 2, 5900 messages/s, idle 9%", "")


def test_a_holder_that_is_not_up_is_said_to_be_missing(make_record):
    records = [make_record("a-1", waits=(WaitView("x", "", "ghost", 2.0),))]

    assert "  └ ghost: no such actor is up" in render(snapshot("r", records, [], {}))


def test_a_role_with_many_instances_shows_the_first_four(make_record):
    records = [make_record("a-1", waits=(WaitView("x", "", "b", 2.0),)), *(make_record(f"b-{i}") for i in range(6))]

    lines = render(snapshot("r", records, [], {})).splitlines()

    assert sum(line.startswith("  └ b-") for line in lines) == 4
    assert "  └ and 2 more" in lines


def test_when_nothing_waits_one_line_says_so(make_record):
    shown = snapshot("r", [make_record("a-1"), make_record("b-1")], [], {})

    assert render(shown) == "a-1, b-1: nothing waits"


def test_a_run_that_ended_waits_for_nothing():
    shown = snapshot("r", [], [], {}, state="ended")

    assert render(shown) == "r has ended: nothing runs, so nothing waits"
