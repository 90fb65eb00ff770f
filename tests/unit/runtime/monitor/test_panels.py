"""The pages of the live view as text."""

from runtime.monitor.panels import flow_page, in_flight_page, waits_panel
from runtime.monitor.snapshot import snapshot
from runtime.monitor.table import actor_row, bar, failure_lines, once, versions


def test_what_an_actor_has_in_hand_is_its_stages_then_its_requests_oldest_first(waiting_run):
    text = in_flight_page(waiting_run, "env_manager-1")

    stages, requests = text.split("\n\noldest first\n")
    assert "env.step" in stages
    assert [line.split()[2] for line in requests.splitlines()] == ["tickets", "generate", "env.step"]
    assert "generate g1306.1 at llm_proxy" in requests


def test_a_pull_under_way_is_a_bar_beside_the_version_and_a_state(make_record):
    shown = snapshot("r", [make_record("engine-2", weights__version=22.0, weights__pulled=0.87)], [], {})

    assert versions(shown) == "v22: engine-2 v22 ▒▒▒▒▒▒▒░░ 87%"
    assert actor_row(shown["actors"][0])[1] == "pulling"
    assert bar(1.0) == "▒" * 9


def test_counters_of_failures_are_summed_by_name_and_told_as_totals_and_rates(make_record):
    records = [
        make_record("reward_service-1", reward__failed__timeout=10.0, reward__failed=10.0),
        make_record("reward_service-2", reward__failed__timeout=2.0),
        make_record("engine-1", bus__refused__key=1.0),
    ]
    shown = snapshot("r", records, [], {})

    assert failure_lines(shown) == ["bus/refused/key 1", "reward/failed/timeout 12"]
    assert failure_lines(shown, {"reward/failed/timeout": 8.0}, 10.0)[1] == "reward/failed/timeout 12 (0.4/s)"
    assert "failed   bus/refused/key 1" in once(shown, [])
    assert "  reward/failed/timeout 12" in flow_page(shown, failure_lines(shown))


def test_the_waits_panel_names_culprits_where_there_are_any(waiting_run, make_record):
    assert waits_panel(waiting_run).splitlines()[0] == "env_manager-1 stalled: batch 42"
    assert waits_panel(snapshot("r", [make_record("a-1")], [], {})) == "nothing waits"
