from msgspec.structs import replace

from rubato.runtime.monitor.snapshot import lookup, snapshot, total
from rubato.runtime.monitor.text import head
from rubato.runtime.registry import RankRecord


def test_a_snapshot_has_exactly_the_documented_keys(waiting_run):
    keys = list(waiting_run)

    assert keys == [
        "run", "state", "trouble", "step", "steps", "alpha", "version", "elapsed_s", "actors", "queues", "waits", "blocked", "metrics",
        "notices", "advice",
    ]  # fmt: skip
    assert list(waiting_run["actors"][0]) == [
        "name", "role", "pid", "host", "state", "incarnation", "mailbox", "rate_s", "idle", "silent_s", "metrics", "stages",
        "pool", "hardware",
    ]  # fmt: skip


def test_an_actor_that_has_ranks_shows_them(config, make_record):
    record = replace(make_record("trainer-1"), ranks=(RankRecord(0, 41, "h", "cuda:0"), RankRecord(1, 42, "h", "cuda:0")))

    shown = snapshot("run", [record], [], config)

    assert shown["actors"][0]["ranks"] == [
        {"rank": 0, "pid": 41, "host": "h", "device": "cuda:0"},
        {"rank": 1, "pid": 42, "host": "h", "device": "cuda:0"},
    ]


def test_step_bound_and_newest_version_come_from_rows_config_and_actors(waiting_run):
    assert (waiting_run["step"], waiting_run["steps"], waiting_run["alpha"]) == (41, 60, 1)
    assert waiting_run["version"] == 23


def test_metrics_hold_the_newest_value_of_every_name_even_one_the_last_row_lacks(waiting_run):
    assert waiting_run["metrics"]["reward/mean"] == 0.83
    assert waiting_run["metrics"]["eval/reward"] == 0.8


def test_queues_are_live_where_an_actor_publishes_them_and_else_from_the_rows(waiting_run):
    assert waiting_run["queues"] == {"held": 7, "ready": 88.0}


def test_waits_name_their_actor_oldest_first(waiting_run):
    told = [(wait.actor, wait.what) for wait in waiting_run["waits"]]

    assert told[:2] == [("env_manager-1", "tickets"), ("env_manager-1", "g1306.1")]
    assert len(told) == 5


def test_a_run_without_rows_or_actors_has_no_version_and_step_0(config):
    shown = snapshot("new", [], [], config)

    assert (shown["step"], shown["version"], shown["queues"]) == (0, None, {})


def test_lookup_ignores_what_is_not_a_number():
    config = {"a": {"b": True, "c": "x", "d": 4}}

    assert [lookup(config, key) for key in ("a.b", "a.c", "a.d", "a.d.e", "z")] == [None, None, 4, None, None]


def test_a_total_is_summed_over_actors_before_rows_are_asked(make_record):
    records = [make_record("engine-1", tokens=3.0), make_record("engine-2", tokens=4.0)]
    shown = snapshot("r", records, [{"step": 1, "tokens": 100.0, "other": 8.0}], {})

    assert total(shown, "tokens") == 7.0
    assert total(shown, "other") == 8.0
    assert total(shown, "none") is None


def test_a_job_whose_bound_was_lifted_has_none(config):
    lifted = {**config, "staleness": {"alpha": 1, "bounded": False}}

    assert snapshot("new", [], [], lifted)["alpha"] == -1
    assert "unbounded" in head(snapshot("new", [], [], lifted), [])


def test_a_bound_that_moves_is_shown_as_the_newest_row_has_it():
    config = {"staleness": {"alpha": "auto"}}

    assert snapshot("r", [], [{"step": 1, "staleness/alpha": 1}, {"step": 2, "staleness/alpha": 2}], config)["alpha"] == 2
    assert snapshot("r", [], [], config)["alpha"] is None
