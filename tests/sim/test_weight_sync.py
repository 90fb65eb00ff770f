"""Weight transfers against closed forms, and the two scenarios that are made of them."""

from pathlib import Path

import pytest

from rubato.sim.claims import judge
from rubato.sim.outcome import silent
from rubato.sim.scenario import load
from rubato.sim.weight_sync import GIB, CrossLink, StoreSync

SCENARIOS = Path(__file__).parents[2] / "configs" / "sim"


def test_a_pull_that_is_faster_than_the_push_ends_one_bucket_after_it():
    sync = StoreSync(push_bytes_s=GIB / 2, pull_bytes_s=2 * GIB, load_bytes_s=10 * GIB)

    assert sync.staged_s(60 * GIB) == pytest.approx(120 + 0.5)


def test_a_pull_that_is_slower_than_the_push_begins_one_bucket_after_it():
    sync = StoreSync(push_bytes_s=2 * GIB, pull_bytes_s=GIB / 2, load_bytes_s=10 * GIB)

    assert sync.staged_s(60 * GIB) == pytest.approx(0.5 + 120)


def test_engines_stand_still_for_what_is_not_staged_yet_and_for_loading():
    sync = StoreSync(push_bytes_s=GIB, pull_bytes_s=GIB, load_bytes_s=10 * GIB)

    assert sync.exposed_s(60 * GIB, 2, slack_s=51) == pytest.approx(10 + 3)
    assert sync.exposed_s(60 * GIB, 2, slack_s=1000) == pytest.approx(3)


def test_weights_cross_once_by_the_live_tree_and_by_an_all_gather_once_per_copy():
    link = CrossLink(stream_bytes_s=2.0, node_bytes_s=1e9, relay_bytes_s=5.0)

    assert link.all_gather_s(160, streams=8, copies=8) == pytest.approx(80)
    assert link.relayed_s(160, gpus=8) == pytest.approx(10)
    assert link.relayed_s(160, gpus=16) == pytest.approx(32), "what crosses is passed on as it comes"


@pytest.mark.parametrize("gpus", [8, 16, 32, 64])
def test_the_way_between_clusters_carries_a_version_once_however_many_nodes_they_have(gpus):
    slow_between = CrossLink(stream_bytes_s=1.0, node_bytes_s=1e12, relay_bytes_s=1e12)

    assert slow_between.relayed_s(800, gpus) == pytest.approx(100)


@pytest.mark.parametrize("name", ["modelsync", "rollart_weight_pull"])
def test_every_claim_comes_out_as_reviewed(name):
    loaded = load(SCENARIOS / f"{name}.yaml")

    claims = judge(loaded.scenario.claims, loaded.kind.run(loaded.scenario, silent).figures)

    assert [claim.name for claim in claims if claim.surprising] == []


def test_a_row_to_calibrate_on_must_be_one_of_the_table(tmp_path):
    from rubato.runtime.errors import ConfigError

    with pytest.raises(ConfigError, match=r"calibrated_on\.row must be one of 8b, 14b, 32b"):
        load(SCENARIOS / "rollart_weight_pull.yaml", ["calibrated_on.row=70b"])
