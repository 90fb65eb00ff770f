from msgspec.structs import replace

from rubato.runtime.monitor.crews import actor_row, short
from rubato.runtime.monitor.snapshot import snapshot
from rubato.runtime.monitor.text import bar, clock, failure_lines, flow_page, in_flight_page, once, sparkline, versions, waits_panel


def test_one_table_tells_run_actors_flow_versions_and_waits_within_80_columns(waiting_run, rows):
    text = once(waiting_run, rows)
    lines = text.splitlines()

    assert max(len(line) for line in lines) <= 80
    assert lines[0] == "quickstart-0421 ── step 41/60 ── 0:52 ── age 1 ≤ α 1 ── 3 dropped"
    assert lines[1].startswith("reward ▁█ 0.83   eval 0.80")
    assert "engine-1            v23         3    2   5.9k   9%" in lines
    assert "flow     in flight 61 ▸ held 7 ▸ ready 88" in lines
    assert "weights  v23: engine-1 v23, engine-2 v22" in lines
    assert "trainer-1 12.4 s for batch 42: 29 of 32 groups" in text


def test_a_run_that_ended_is_told_from_its_rows_alone(rows, config):
    text = once(snapshot("old", [], rows, config, state="ended", elapsed_s=84.0), rows)

    assert text.splitlines()[0] == "old ── step 41/60 ── 1:24 ── age 1 ≤ α 1 ── 3 dropped ── run ended"
    assert "weights  v21" in text


def test_the_network_has_a_line_of_its_own_where_there_is_one(make_record):
    figures = {"fabric/circuits": 10.0, "fabric/change": 14.0, "fabric/hidden_s": 0.255, "fabric/exposed_s": 0.0}
    phases = {"fabric/phase/rollout": 0.0, "fabric/phase/weight_sync": 1.0}
    record = make_record("fabric_controller-1", **{k.replace("/", "__"): v for k, v in (figures | phases).items()})

    text = once(snapshot("r", [record], [], {}), [])
    down = once(snapshot("r", [], [{"step": 1, **figures, "fabric/electrical": 1.0}], {}), [])

    assert "fabric   weight_sync: circuits 10, change 14, hidden s 0.255, exposed s 0.000" in text.splitlines()
    assert "(electrical path only)" in " ".join(down.split())
    assert "fabric" not in once(snapshot("r", [], [], {}), [])


def test_advice_has_a_line_of_its_own():
    advice = {"advice/generation-bound/engine_2_more": 0.18, "advice/generation-bound/alpha_1_more": 0.09}
    shown = snapshot("r", [], [{"step": 2}], {}, advice=advice)
    later = snapshot("r", [], [{"step": 3}], {})

    told = "generation-bound: engine 2 more +18%, alpha 1 more +9%"
    assert f"advice   {told}" in once(shown, []).splitlines()
    assert f"advice {told}" in flow_page(shown).splitlines()
    assert "advice" not in once(later, [])


def test_pools_stand_beside_their_actors_and_in_a_line_of_their_own(make_record):
    decode = [replace(make_record(f"engine-{n}"), pool="decode", hardware="h20") for n in (1, 2)]
    prefill = replace(make_record("engine-3", state="starting"), pool="prefill")
    shown = snapshot("r", [*decode, prefill, make_record("llm_proxy-1")], [], {})

    lines = once(shown, []).splitlines()

    assert "pools    decode h20 2/2, prefill 0/1" in lines
    assert "pools decode h20 2/2, prefill 0/1" in flow_page(shown).splitlines()
    rows = {line.split()[0]: line.split("%")[-1] for line in lines if line.startswith(("engine-", "llm_proxy"))}
    assert rows == {
        "engine-1": "  decode h20 at here",
        "engine-2": "  decode h20 at here",
        "engine-3": "  prefill at here",
        "llm_proxy-1": "",
    }
    assert "pools" not in once(snapshot("r", [make_record("llm_proxy-1")], [], {}), [])


def test_engines_are_told_by_degree_with_what_was_changed_and_forecast_against_fact(make_record):
    degrees = {1: (2.0, 0.0), 2: (1.0, 1.0), **dict.fromkeys(range(3, 9), (1.0, 0.0))}
    engines = [make_record(f"engine-{n}", engine__degree=degree, engine__asleep=asleep) for n, (degree, asleep) in degrees.items()]
    counted = {"switches": 3.0, "moves": 12.0, "circuits": 2.0, "agreed": 50331653.0, "electrical": 1.0, "remaining_s": 9.44}
    figures = {**counted, "forecast_s": 11.2, "took_s": 11.94}
    orchestrator = make_record("orchestrator-1", **{f"orchestrator__{name}": each for name, each in figures.items()})
    unsure = make_record("orchestrator-1", orchestrator__moves=1.0)

    shown = snapshot("r", [*engines, orchestrator], [], {})

    shapes = "degree 2: engine-1; degree 1: engine-3, engine-4, engine-5, engine-6 and 2 more; asleep: engine-2"
    changes = "switches 3, moves 12, circuits lit 2, agreed number 50331653, electrical 1, left s 9.4"
    told = f"{shapes}; {changes}, the last load 11.9 s of 11.2 s forecast"
    assert f"engines {told}" in " ".join(once(shown, []).split())
    assert f"engines {told}" in flow_page(shown).splitlines()
    assert shown["actors"][-1]["metrics"]["orchestrator/agreed"] == 50331653
    assert "degree 1: engine-3; moves 1" in once(snapshot("r", [engines[2], unsure], [], {}), [])
    assert "asleep: engine-2" in once(snapshot("r", [engines[1]], [], {}), [])
    assert "engines " not in once(snapshot("r", engines[2:], [], {}), [])


def test_the_share_that_was_trained_is_told_by_length(make_record):
    figures = {"length/16/ended": 2048.0, "length/16/trained_frac": 1.0, "length/1024/ended": 40.0, "length/1024/trained_frac": 0.95}

    live = snapshot("r", [make_record("sample_buffer-1", **{k.replace("/", "__"): v for k, v in figures.items()})], [], {})
    ended = snapshot("r", [], [{"step": 1, **figures}], {})

    for shown in (live, ended):
        assert "trained  100.0% of 2,048 ≤ 16, 95.0% of 40 ≤ 1024 tokens" in once(shown, [])
        assert "100.0% of 2,048 ≤ 16, 95.0% of 40 ≤ 1024 tokens" in flow_page(shown)
    assert "trained" not in once(snapshot("r", [], [], {}), [])


def test_a_run_before_its_first_step_is_no_error():
    text = once(snapshot("new", [], [], {}), [])

    assert text.splitlines()[:2] == ["new ── step 0 ── 0:00 ── 0 dropped", "no step yet"]
    assert "nothing waits" in text


def test_an_unbounded_run_is_told_as_such():
    text = once(snapshot("r", [], [], {"staleness": {"alpha": -1}}), [])

    assert "age 0, unbounded" in text


def test_a_sparkline_spans_low_to_high_and_condenses_long_series():
    assert sparkline([], 8) == ""
    assert sparkline([0.5, 0.5], 8) == "▁▁"
    assert sparkline([0.0, 1.0], 8) == "▁█"
    assert len(sparkline([float(i) for i in range(1000)], 16)) == 16


def test_figures_are_short():
    assert [short(v) for v in (0.0, 410.2, 5900.0, 1_200_000.0)] == ["0", "410", "5.9k", "1.2M"]
    assert [clock(v) for v in (0.0, 52.9, 3849.0)] == ["0:00", "0:52", "1:04:09"]


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


def test_a_run_whose_times_are_modelled_says_so_in_its_first_line(make_record):
    live = once(snapshot("r", [make_record("engine-1", paced__engines=1.0)], [], {}), [])
    ended = once(snapshot("r", [], [{"step": 1, "paced/engines": 2.0}], {}, state="ended"), [])

    assert live.splitlines()[0].endswith(" ── paced")
    assert ended.splitlines()[0].endswith(" ── paced ── run ended")
    assert "paced" not in once(snapshot("r", [make_record("engine-1")], [], {}), [])


def test_actors_of_64_hosts_share_lines_by_pool_and_those_that_are_not_well_keep_their_own(make_record):
    engines = [replace(make_record(f"engine-{i}", weights__version=3.0), pool="far", host=f"host{i}", mailbox=1) for i in range(1, 65)]
    engines[6] = replace(engines[6], state="draining")
    managers = [make_record(f"env_manager-{i}") for i in range(1, 9)]

    text = once(snapshot("r", [*engines, *managers], [], {}), [])
    lines = [" ".join(line.split()) for line in text.splitlines()]

    assert any(line.startswith("engine × 63 v3 63 ") and line.endswith("far at 63 hosts") for line in lines), text
    assert any(line.startswith("engine-7 draining") for line in lines)
    assert sum(line.startswith("env_manager-") for line in lines) == 8
    assert "weights v3: 64 engine v3" in lines
