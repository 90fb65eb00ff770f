"""What was sampled is accounted for, and no length is trained less than another, where some rollouts take fifty times longer than most."""

import json
from dataclasses import replace

import pytest

import rubato.actors.samples.policy
from rubato.actors.engines.worker import EngineWorker
from rubato.actors.samples.buffer import SampleBuffer
from rubato.planning.staleness import hand_over
from rubato.sim.audit import AuditLimits, audit
from rubato.sim.cluster import ClusterJobSpec
from rubato.sim.live.run import run
from tests.sim.test_both_modes import job

pytestmark = pytest.mark.slow

STEPS = 12


def heavy_tailed(alpha: int) -> ClusterJobSpec:
    spec = job(alpha).model_dump(mode="json")
    turns = {"law": "lognormal", "median": 3, "sigma": 1.3, "most": 60}
    tasks = [spec["tasks"][0] | {"turns": turns, "max_context": 16384}]
    return ClusterJobSpec.model_validate(spec | {"tasks": tasks, "steps": STEPS, "environments": 48})


def shares(row: dict[str, float]) -> dict[int, float]:
    """By length, which share of what ended was trained."""
    return {int(name.split("/")[1]): row[name] for name in row if name.endswith("/trained_frac")}


@pytest.fixture
def seen(monkeypatch):
    """Tokens as the engines count them, and the buffer that the run ended with."""
    found = {"sampled": 0}
    sampled, start = EngineWorker._sampled, SampleBuffer.on_start

    def count(self, shared, chunk):
        found["sampled"] += len(chunk.tokens.ids) // 4
        sampled(self, shared, chunk)

    async def remember(self):
        found["buffer"] = self
        await start(self)

    monkeypatch.setattr(EngineWorker, "_sampled", count)
    monkeypatch.setattr(SampleBuffer, "on_start", remember)
    return found


@pytest.mark.parametrize("alpha", [1, 3])
def test_tokens_balance_and_lengths_are_trained_alike_in_a_heavy_tailed_run(alpha, tmp_path, seen):
    rows = run(heavy_tailed(alpha), 1, tmp_path).rows

    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    tally = seen["buffer"]._groups.training.tally
    assert tally.generated == seen["sampled"] == sum(tally.tokens.values()) == sum(line["tokens"] for line in lines)
    longest, found = max(line["tokens"] for line in lines), shares(rows[-1])
    assert longest >= 20 * sorted(line["tokens"] for line in lines)[len(lines) // 2]
    assert max(found) >= longest
    assert min(found.values()) >= 0.99 * max(found.values())
    assert audit(tmp_path, AuditLimits(STEPS, 4, 4, alpha)).problems == []


def test_a_run_that_takes_whatever_is_ready_first_shows_that_it_trains_less_of_what_is_long(tmp_path, monkeypatch):
    monkeypatch.setattr(rubato.actors.samples.policy, "hand_over", lambda view: hand_over(replace(view, in_flight=())))

    rows = run(heavy_tailed(1), 1, tmp_path).rows

    found = shares(rows[-1])
    assert found[max(found)] < 0.8 * found[64]
    assert rows[-1]["tokens/stale"] > 0
