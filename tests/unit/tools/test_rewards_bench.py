"""tools/bench/rewards.py: its paced reward model lasts what the roofline says."""

import importlib.util
from pathlib import Path

import pytest

from rubato.actors.engines.pace import deployment_of
from rubato.actors.engines.section import PaceSection
from rubato.planning.roofline import Roofline

ROOT = Path(__file__).resolve().parents[3]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_call_of_the_paced_judge_lasts_a_prefill_at_the_scale_of_the_engines():
    judge, bench = load(ROOT / "tools/bench/peers/paced_judge.py"), load(ROOT / "tools/bench/rewards.py")
    model = Roofline(deployment_of(PaceSection(hardware="h800", model="qwen2.5-7b")))

    assert pytest.approx(model.prefill_s(judge.TOKENS), rel=1e-3) == judge.PREFILL_S
    assert bench.PACE["scale"] == judge.SCALE
