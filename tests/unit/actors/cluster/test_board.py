"""What a user sees of a cluster."""

import msgspec
import pytest

from rubato.actors.cluster.board import ClusterBoard, RolloutLeft
from rubato.actors.cluster.book import Book, JobRecord
from rubato.actors.cluster.permits import PermitEvent
from rubato.actors.cluster.pools import ClusterPoolSection, SchedulerSection
from rubato.actors.messages.cluster import JobNeeds
from rubato.planning.permits import PermitLine, Stand

NOW = 1000.0


def record(name, number, **changes):
    needs = JobNeeds(1, 1, 1e9, 1e9, 10.0, 10.0)
    fields = {"state": "running", "group": 0, "node": 0, "slo": 1.5, "why": f"job {name} is placed", **changes}
    return JobRecord(name=name, id=name, number=number, needs=needs, cwd="/", **fields)


@pytest.fixture
def board():
    section = SchedulerSection(
        rollout=ClusterPoolSection(usd_hour=1.85, memory_gb=8), training=ClusterPoolSection(usd_hour=5.28, memory_gb=8)
    )
    jobs = [
        record("a", 1, slowdowns=(1.04,), alone_s=100.0, took_s=120.0),
        record("b", 2),
        record("c", 3, state="queued", group=-1, node=-1, why="job c waits: no group has room"),
        record("d", 0, state="done", group=-1, node=-1, why="done after step 60"),
    ]
    held = Stand("a", "rollout", 7, NOW - 3.1, 9)
    lines = {"rollout-0": PermitLine(held, (Stand("b", "rollout", 8, NOW - 2.0),)), "training-0": PermitLine()}
    events = {
        "rollout-0": [PermitEvent("holds", held, NOW - 30)],
        "training-0": [PermitEvent("holds", Stand("b", "training", 3, 0), NOW - 60),
                       PermitEvent("gone", Stand("b", "training", 3, 0), NOW - 30)],
    }  # fmt: skip
    return ClusterBoard("lab", Book(section, jobs), lines, events, {"a": 14}, {"a": RolloutLeft(12, 64, 1)}, NOW)


def test_who_waits_for_whom_is_told_across_jobs(board):
    assert board.whys().splitlines() == [
        "job b waits 2.0 s for rollout-0: a holds it for rollout since 3.1 s, 12 of 64 responses left",
        "job c waits: no group has room",
    ]


def test_where_several_engines_share_a_pool_it_is_told_when_the_rest_makes_room(board):
    several = board._replace(left={"a": RolloutLeft(12, 64, 2)})
    line = board.lines["rollout-0"]
    behind_a_tail = several._replace(lines={"rollout-0": line._replace(tail=Stand("c", "rollout", 6, NOW - 9, 8, (1,)))})

    assert several.why("b").endswith(", 12 of 64 responses left, moves at 80 %")
    assert behind_a_tail.why("b").endswith(", 12 of 64 responses left, moves at 80 % once the tail of c is over")


def test_each_pool_has_a_line_with_its_holder_and_its_queue(board):
    lines = board.table().splitlines()

    assert lines[3:6] == [
        " pool         held by                      queue",
        " rollout-0    a 3.1 s                      b 2.0 s",
        " training-0   –                            –",
    ]


def test_jobs_are_listed_with_what_they_hold_their_slowdown_and_slack(board):
    rows = {line.split()[0]: line for line in board.jobs().splitlines()}

    assert rows["a"].split()[1:6] == ["0", "14", "running", "rollout-0", "3.1"]
    assert "1.04   0.46       1.5    1.20" in rows["a"]
    assert rows["b"].endswith("a holds it for rollout since 3.1 s, 12 of 64 responses left")
    assert list(rows)[-1] == "d"


def test_groups_have_their_cost_beside_that_of_jobs_alone(board):
    lines = board.table().splitlines()

    assert lines[0] == "cluster lab · rollout 1, training 1 nodes · 7.13 $/h, 14.26 if each had its own"
    assert lines[1] == "group 0: a, b on rollout 0 · 7.13 $/h"


def test_the_last_minute_of_each_pool_is_drawn(board):
    assert board.gantt(20) == [" last 60 s  a a  b b", " rollout-0  ▐          aaaaaaaaaa▌", " training-0 ▐bbbbbbbbbb          ▌"]


def test_a_program_gets_the_same(board):
    data = board.data()

    assert data["groups"] == [{"group": 0, "nodes": (0,), "jobs": ["a", "b"]}]
    assert [(job["name"], job["state"]) for job in data["jobs"]][:2] == [("d", "done"), ("a", "running")]
    assert {job["name"]: job["slack"] for job in data["jobs"]} == {"a": pytest.approx(0.46), "b": None, "c": None, "d": None}
    assert [(job["promised"], job["kept"]) for job in data["jobs"]][1] == (1.5, pytest.approx(1.2))
    assert (data["usd_hour"], data["usd_hour_solo"]) == pytest.approx((7.13, 14.26))


def test_a_cluster_without_jobs_says_how_to_give_it_one(board):
    empty = board._replace(book=Book(board.book.section), events={})

    assert empty.jobs() == "no jobs. Submit one with: rubato submit JOB.yaml --cluster DIR"
    assert empty.gantt() == []


def test_a_job_without_known_times_is_on_trial(board):
    unknown = record("a", 1)
    unknown = msgspec.structs.replace(unknown, needs=msgspec.structs.replace(unknown.needs, rollout_s=0.0))
    trial = board._replace(book=Book(board.book.section, [unknown]), lines={})

    assert trial.jobs().splitlines()[1].split()[7:9] == ["trial", "–"]
    assert trial.data()["jobs"][0]["promised"] is None
