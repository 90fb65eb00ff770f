"""What the bench of weights makes of an engine's logs, and of two versions."""

import json

import pytest

from tools.bench.weights import HOSTS, WARM, delta_figures, engine_figures
from tools.fabric_job import Job, Stuck
from tools.fabric_namespaces import Racks


def job_that_logged(folder, events):
    logs = folder / "away" / "logs"
    logs.mkdir(parents=True)
    (logs / "engine-2.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return Job(folder / "none.yaml", (), Racks("test", HOSTS), folder, None)


def swap(pause_s, pull_s):
    return {"event": "weights_swapped", "pause_s": pause_s, "pull_s": pull_s}


def test_the_hidden_share_is_that_of_the_worst_version_after_the_first_ones(tmp_path):
    steps = {"event": "step_times", "sampled": [[1, 1, 0.01], [8, 8, 0.03], [8, 8, 0.02]]}
    pulls = [swap(9.0, 9.0)] * WARM + [swap(0.01, 1.0), swap(0.03, 1.0), swap(0.02, 2.0)]

    found = engine_figures(job_that_logged(tmp_path, [*pulls, steps]), "away")

    assert found == {
        "versions": 3,
        "pull_s": 1.0,
        "pause_s": 0.02,
        "pause_s_p99": 0.03,
        "hidden_frac": pytest.approx(0.97),
        "step_cpu_s": 0.02,
    }


def test_an_engine_that_told_nothing_is_named(tmp_path):
    with pytest.raises(Stuck, match="the engine of host away told nothing"):
        engine_figures(job_that_logged(tmp_path, [swap(0.0, 1.0)] * WARM), "away")


async def test_two_versions_are_told_by_the_words_that_changed_and_the_bytes_that_travel():
    old = bytes(1 << 16)
    few, many = b"\1" + old[1:], b"\1\0" * (1 << 15)

    figures = await delta_figures(old, few)
    assert figures["changed_frac"] == 2.0**-15
    assert 0.0 < figures["bytes_frac"] < 0.001
    assert (await delta_figures(old, many))["bytes_frac"] == 1.0
