from runtime.monitor.snapshot import snapshot
from runtime.monitor.table import clock, once, short, sparkline


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
    figures = {"fabric/circuits": 10.0, "fabric/epoch": 14.0, "fabric/hidden_s": 0.255, "fabric/exposed_s": 0.0}
    phases = {"fabric/phase/rollout": 0.0, "fabric/phase/weight_sync": 1.0}
    record = make_record("fabric_controller-1", **{k.replace("/", "__"): v for k, v in (figures | phases).items()})

    text = once(snapshot("r", [record], [], {}), [])
    down = once(snapshot("r", [], [{"step": 1, **figures, "fabric/electrical": 1.0}], {}), [])

    assert "fabric   weight_sync: circuits 10, epoch 14, hidden s 0.255, exposed s 0.000" in text.splitlines()
    assert "(electrical path only)" in " ".join(down.split())
    assert "fabric" not in once(snapshot("r", [], [], {}), [])


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
