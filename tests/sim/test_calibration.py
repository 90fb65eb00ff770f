"""Calibration finds the costs that a recording was made from, and refuses what it can't use with one sentence."""

import json
from pathlib import Path

import pytest
import yaml

from rubato.runtime.cli import guarded
from rubato.runtime.errors import ConfigError
from rubato.sim.calibration.command import main, observed
from rubato.sim.calibration.fit import fit
from rubato.sim.calibration.recording import read_run
from rubato.sim.onehost.calibrated import Calibration
from tests.sim import made_recordings as made


def test_costs_that_a_run_was_made_from_are_found_again(tmp_path):
    found = fit(read_run(made.write(tmp_path / "run")), "a host").costs

    assert found.env_manager_turn_s == pytest.approx(made.TURN_S)
    assert found.llm_proxy_turn_s == pytest.approx(made.PROXY_S)
    assert found.reward_service_trajectory_s == pytest.approx(made.SCORE_S)
    assert found.sample_buffer_trajectory_s == pytest.approx(made.BUFFER_S)
    assert found.node_trajectory_s == pytest.approx(made.NODE_S)
    engine, trainer = found.engine, found.trainer
    assert (engine.step_s, engine.row_s, engine.token_s) == pytest.approx((made.STEP_S, made.ROW_S, made.TOKEN_S))
    assert (engine.request_s, engine.update_s) == pytest.approx((made.REQUEST_S, made.UPDATE_S))
    assert (trainer.step_s, trainer.token_s) == pytest.approx((made.TRAIN_S, made.TRAIN_TOKEN_S))
    assert trainer.publish_s + trainer.publish_wait_s == pytest.approx(made.PUBLISH_S)
    assert trainer.checkpoint_s + trainer.checkpoint_wait_s == pytest.approx(made.SAVE_S)


def test_rollouts_are_the_recorded_ones(tmp_path):
    found = fit(read_run(made.write(tmp_path / "run")), "a host").rollouts

    shown = (found.prompt_tokens, found.observation_tokens, found.action_tokens)
    assert shown == pytest.approx((made.PROMPT, made.SHOWN, made.SAMPLED))
    assert sum(sum(stage.turns.counts.values()) for stage in found.stages) == 30 * made.GROUPS * made.SIZE
    assert all(0.5 <= stage.trained_share <= 0.75 for stage in found.stages)
    assert found.stage(0) is found.stages[0]
    assert found.stage(999) is found.stages[-1]


def test_an_engine_cost_that_would_be_negative_is_zero_and_the_others_are_fitted_without_it(tmp_path):
    run = made.write(tmp_path / "run")
    steps = [[n, 5 * n, 1e-3 + 5 * n * 1e-5 - n * 2e-6 * (n % 2)] for n in range(1, 101)]
    told = {"event": "step_times", "cpu_s": 9.0, "updates": 1, "update_cpu_s": 0.0, "process_cpu_s": 9.5, "sampled": steps}
    for name in ("engine-1", "engine-2"):
        made.lines(run / "logs" / f"{name}.jsonl", [told])

    engine = fit(read_run(run), "a host").costs.engine

    assert min(engine.step_s, engine.row_s, engine.token_s) >= 0
    assert engine.step_s + 100 * engine.row_s + 500 * engine.token_s == pytest.approx(6e-3, rel=0.1)


def test_others_on_the_host_are_told_and_not_counted_as_ours(tmp_path):
    found = fit(read_run(made.write(tmp_path / "run", foreign_cores=0.5)), "a host")

    assert found.foreign_cores == pytest.approx(0.5)
    assert found.costs.background_cores == 0.0


def test_what_a_run_was_seen_to_do(tmp_path):
    seen = observed(read_run(made.write(tmp_path / "run")))

    assert (seen.engines, seen.env_managers, seen.steps, seen.window) == (2, 1, 30, (6, 28))
    assert seen.idle == {"trainer": pytest.approx(0.4), "engine": pytest.approx(0.3)}
    assert 0.4 < seen.steps_s < 0.9


def test_the_file_is_read_back_and_a_packed_copy_of_the_run_gives_the_same(tmp_path, capsys):
    run = made.write(tmp_path / "run")

    assert main([str(run), "--out", str(tmp_path / "a.yaml"), "--host", "h", "--keep", str(tmp_path / "kept")]) == 0
    assert main([str(tmp_path / "kept"), "--out", str(tmp_path / "b.yaml"), "--host", "h"]) == 0

    assert "2 engines" in capsys.readouterr().out
    text = (tmp_path / "a.yaml").read_text()
    assert text == (tmp_path / "b.yaml").read_text()
    calibration = Calibration.model_validate(yaml.safe_load(text))
    assert calibration.recorded.host == "h"
    assert {"costs.engine.request_s", "rollouts.stages"} <= {item.figure for item in calibration.fits}
    assert all(item.source and item.residual for item in calibration.fits)


def no_run(run: Path) -> str:
    for path in sorted(run.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    run.rmdir()
    return "is no run folder"


def no_config(run: Path) -> str:
    (run / "config.yaml").unlink()
    return "does not exist"


def no_rows(run: Path) -> str:
    (run / "metrics.jsonl").unlink()
    return "metrics.jsonl does not exist"


def few_steps(run: Path) -> str:
    kept = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:18]
    (run / "metrics.jsonl").write_text("".join(kept))
    return "has 18 training steps; calibration needs 19"


def torn_line(run: Path) -> str:
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text()[:-9])
    return "damaged in line 30"


def no_numbers(run: Path) -> str:
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace('"step": 4', '"step": "four"'))
    return "damaged in line 4"


def lacking(run: Path) -> str:
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace('"time/publish"', '"time/x"', 1))
    return "has no time/publish in step 1"


def a_gap(run: Path) -> str:
    kept = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(kept[:9] + kept[10:]))
    return "without a gap"


def before_cpu(run: Path) -> str:
    text = (run / "metrics.jsonl").read_text().replace('"cpu/', '"was/')
    (run / "metrics.jsonl").write_text(text)
    return "has no cpu/"


def engine_killed(run: Path) -> str:
    made.lines(run / "logs" / "engine-2.jsonl", [{"event": "ready"}])
    return "engine-2.jsonl has no step_times"


def few_samples(run: Path) -> str:
    for name in ("engine-1", "engine-2"):
        told = {"event": "step_times", "cpu_s": 1, "updates": 1, "update_cpu_s": 0, "process_cpu_s": 1, "sampled": []}
        made.lines(run / "logs" / f"{name}.jsonl", [told])
    return "has 0 timed steps"


def no_samples(run: Path) -> str:
    (run / "samples.jsonl").write_text("")
    return "samples.jsonl has no sample"


def odd_sample(run: Path) -> str:
    made.lines(run / "samples.jsonl", [{"fate": "trained", "turns": 3}])
    return "samples.jsonl is damaged in line 1"


def no_time(run: Path) -> str:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[7]["time/step"] = 0
    made.lines(run / "metrics.jsonl", rows)
    return "has time/step at 0 in step 8; it must be above 0. Record the run anew."


def nothing_trained(run: Path) -> str:
    rows = [json.loads(line) | {"perf/train_tokens_s": 0} for line in (run / "metrics.jsonl").read_text().splitlines()]
    made.lines(run / "metrics.jsonl", rows)
    return "run can't be calibrated from: a figure is beyond what can be computed ("


def no_idle(run: Path) -> str:
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().replace('"idle/', '"was/'))
    return "metrics.jsonl has no idle/ of any role for the whole run. Record it anew."


@pytest.mark.parametrize(
    "spoil",
    [
        no_run, no_config, no_rows, few_steps, torn_line, no_numbers, lacking, a_gap, before_cpu, engine_killed, few_samples,
        no_samples, odd_sample, no_time, nothing_trained, no_idle,
    ],
)  # fmt: skip
def test_what_can_not_be_used_is_one_sentence_and_no_file(spoil, tmp_path, capsys):
    run = made.write(tmp_path / "run")
    expected = spoil(run)

    code = guarded(main, [str(run), "--out", str(tmp_path / "out.yaml")])

    said = capsys.readouterr().err.strip()
    assert code == 2
    assert expected in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out.yaml").exists()


def test_a_place_that_can_not_be_written_is_one_sentence(tmp_path):
    run = made.write(tmp_path / "run")

    for option in ("--out", "--observed", "--keep"):
        with pytest.raises(ConfigError, match=r"/x can't be written: .*\. Give another"):
            main([str(run), option, str(run / "metrics.jsonl" / "x")])
