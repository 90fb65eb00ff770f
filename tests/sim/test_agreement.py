"""The quickstart and its simulation: calibrated on the recorded run with two engines, held against those with one and with three.

The recordings are what `tools/calibrate.py RUN_DIR --keep` kept of three live runs.
"""

from pathlib import Path

import pytest

from rubato.sim.calibration.command import main, observed
from rubato.sim.calibration.fit import fit
from rubato.sim.calibration.recording import read_run
from rubato.sim.onehost.observed import observe
from rubato.sim.onehost.processes import host_job
from rubato.sim.onehost.scenario import OneHost, spec_of
from rubato.sim.scenario import load

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "data" / "quickstart"
CALIBRATIONS = ROOT / "configs" / "calibrations"
SCENARIO = ROOT / "configs" / "sim" / "quickstart.yaml"


@pytest.mark.parametrize("engines", [1, 3])
def test_live_and_simulated_runs_agree_at_worker_counts_that_were_not_calibrated_on(engines):
    live = observed(read_run(RECORDED / f"engines_{engines}"))
    scenario = load(SCENARIO).scenario
    assert isinstance(scenario, OneHost)
    scenario = scenario.model_copy(update={"calibrated": fit(read_run(RECORDED / "engines_2"), "recorded")})

    rows = host_job(spec_of(scenario.job, live), scenario.calibration_for(live), seed=1).run()

    ours = observe(rows, live.window, live.engines, live.env_managers)
    print(f"{engines} engines: live {live.steps_s:.3f} steps/s, simulated {ours.steps_s:.3f}; idle {live.idle}, {ours.idle}")
    assert ours.steps_s == pytest.approx(live.steps_s, rel=0.10)
    assert ours.idle == pytest.approx(live.idle, abs=0.10)


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_the_files_of_the_scenario_are_what_the_tool_writes_from_the_recordings(engines, tmp_path):
    recorded = load(SCENARIO).scenario
    assert isinstance(recorded, OneHost)
    host = recorded.calibrated.recorded.host

    main([str(RECORDED / f"engines_{engines}"), "--observed", str(tmp_path / "o.yaml")])

    assert (tmp_path / "o.yaml").read_text() == (CALIBRATIONS / f"engines_{engines}.yaml").read_text()
    if engines == recorded.calibrated.recorded.engines:
        main([str(RECORDED / f"engines_{engines}"), "--out", str(tmp_path / "c.yaml"), "--host", host])
        assert (tmp_path / "c.yaml").read_text() == (CALIBRATIONS / "quickstart.yaml").read_text()


def test_a_run_plays_its_own_rollouts_or_the_calibrations_as_the_scenario_says():
    scenario = load(SCENARIO).scenario
    assert isinstance(scenario, OneHost)
    live = scenario.live[0]

    assert scenario.calibration_for(live).rollouts == live.rollouts != scenario.calibrated.rollouts
    assert scenario.calibration_for(live).costs == scenario.calibrated.costs
    by_calibration = scenario.model_copy(update={"workload": "calibrated"})
    assert by_calibration.calibration_for(live) == scenario.calibrated
    without = live.model_copy(update={"rollouts": None})
    assert scenario.calibration_for(without) == scenario.calibrated


def test_claims_are_about_what_the_live_runs_were_seen_to_do():
    scenario = load(SCENARIO).scenario
    assert isinstance(scenario, OneHost)
    stated = {claim.name: claim.bar for claim in scenario.claims}

    for live in scenario.live:
        if live.engines == scenario.calibrated.recorded.engines:
            continue
        name = "1_engine" if live.engines == 1 else f"{live.engines}_engines"
        assert stated.pop(f"steps_s_{name}") == pytest.approx(live.steps_s, abs=5.1e-4)
        for role, share in live.idle.items():
            assert stated.pop(f"{role}_idle_{name}") == pytest.approx(share, abs=5.1e-4)
    assert not stated
