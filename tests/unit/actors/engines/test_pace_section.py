"""`engine.pace`: what a launch refuses, in one sentence each, and what it takes."""

from pathlib import Path

import pytest

from rubato.actors import catalog
from rubato.actors.engines.section import PaceSection
from rubato.runtime.config.compose import load
from rubato.runtime.errors import ConfigError

QUICKSTART = Path(__file__).parents[4] / "configs" / "quickstart.yaml"


def launched(*overrides: str, **pace: object):
    given = {"hardware": "h20", "model": "qwen3-8b"} | pace
    return load(QUICKSTART, [*(f"engine.pace.{key}={value}" for key, value in given.items()), *overrides])


@pytest.mark.parametrize(
    ("pace", "sentence"),
    [
        ({"hardware": "h2"}, "engine.pace.hardware: 'h2' is none of h100, h20, h200, h800, xeon-8480. Did you mean h20?"),
        ({"hardware": "prices-400g"}, "engine.pace.hardware: 'prices-400g' is none of h100, h20, h200, h800, xeon-8480."),
        ({"model": "qwen38b"}, "Did you mean qwen3-8b?"),
        ({"scale": 0}, "engine.pace.scale is 0; it must be a number above 0."),
        ({"degree": 3}, "engine.pace: degree=3 does not divide the 32 attention heads of qwen3-8b, or is more than one "
                        "server's 8 H20. Take one of 1, 2, 4, 8."),
        ({"degree": 16}, "Take one of 1, 2, 4, 8."),
        ({"model": "qwen2-57b-a14b"}, "engine.pace: qwen2-57b-a14b does not fit 1 x H20. Take a larger degree, or a smaller"),
        ({"degre": 2}, "engine.pace.degre is not a key. Did you mean engine.pace.degree?"),
    ],
)  # fmt: skip
def test_a_pace_that_can_not_be_is_refused_at_launch_in_one_sentence(pace, sentence):
    with pytest.raises(ConfigError) as refused:
        launched(**pace)

    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["vllm", "my.engines:Mine"])
def test_an_engine_with_steps_of_its_own_can_not_be_paced(kind):
    with pytest.raises(ConfigError, match=f"engine.pace has no effect on the steps of engine.kind={kind}. Set engine.k"):
        launched(f"engine.kind={kind}")


def test_a_paced_config_is_the_same_as_a_run_folder_keeps_it(tmp_path):
    config = launched(scale=0.5, degree=2)
    kept = tmp_path / "config.yaml"
    kept.write_text(config.dump())

    assert load(kept).dump() == config.dump()
    assert load(kept).section("engine").pace == PaceSection(hardware="h20", model="qwen3-8b", scale=0.5, degree=2)


def test_every_class_and_model_of_the_catalog_is_a_whole_specification():
    classes = [catalog.hardware(name).name for name in ("h20", "h100", "h200", "h800", "H800")]
    models = sorted(path.stem for path in (catalog.FOLDER / "models").glob("*.yaml"))

    assert classes == ["H20", "H100", "H200", "H800", "H800"]
    assert all(catalog.model(name).params > 0.5e9 for name in models)
