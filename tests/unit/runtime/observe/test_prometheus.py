"""Figures as Prometheus' own parser reads them."""

import math

import pytest

from rubato.runtime.observe.prometheus import Exposition, known_as


def test_a_scrape_reads_back_as_it_was_written():
    parser = pytest.importorskip("prometheus_client.parser")
    told = Exposition(run='a "run"\\n')
    told.add("rubato_up", "gauge", "Whether it is up.", [({"actor": "engine-1"}, True), ({"actor": "two\nlines"}, False)])
    told.add("rubato_restarts_total", "counter", "Restarts.", [({}, 3)])
    told.add("rubato_odd", "gauge", "Not finite.", [({}, math.inf)])
    told.add("rubato_none", "gauge", "Without a sample.", [])

    families = {family.name: family for family in parser.text_string_to_metric_families(told.text().decode())}

    assert {name: family.type for name, family in families.items()} == {
        "rubato_up": "gauge", "rubato_restarts": "counter", "rubato_odd": "gauge"
    }  # fmt: skip
    assert [(sample.labels, sample.value) for sample in families["rubato_up"].samples] == [
        ({"run": 'a "run"\\n', "actor": "engine-1"}, 1.0),
        ({"run": 'a "run"\\n', "actor": "two\nlines"}, 0.0),
    ]
    assert families["rubato_restarts"].samples[0].value == 3.0
    assert families["rubato_odd"].samples[0].value == math.inf


def test_metrics_whose_names_would_fall_together_have_two_names():
    assert known_as("task/a-b/reward", ()) == "rubato_task_a_b_reward"
    assert known_as("task/a_b/reward", {"rubato_task_a_b_reward"}) == "rubato_task_a_b_reward_"
    assert known_as("task/é", ()) == "rubato_task__"
