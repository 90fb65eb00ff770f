"""Sums that a model's name or its publisher states."""

from pathlib import Path

import pytest

from rubato.planning.hardware import GpuSpec
from rubato.planning.language_model import ModelSpec
from rubato.runtime.config.overrides import read

CONFIGS = Path(__file__).parents[2] / "configs"


def model(name):
    return ModelSpec.model_validate(read(CONFIGS / "models" / f"{name}.yaml").tree)


@pytest.mark.parametrize(("name", "total_b", "active_b"), [("qwen2-57b-a14b", 57.41, 14.25), ("qwen2.5-14b", 14.77, 14.77)])
def test_the_parameters_add_up_to_the_published_sum(name, total_b, active_b):
    spec = model(name)

    assert round(spec.params / 1e9, 2) == total_b
    assert round(spec.active_params / 1e9, 2) == active_b


def test_qwen2_moe_sizes_follow_from_its_shape():
    spec = model("qwen2-57b-a14b")

    assert spec.kv_bytes_per_token == 57_344
    assert spec.routed_params == 28 * 64 * 3 * 3584 * 2560
    assert spec.weight_bytes == 2 * spec.params


def test_a_token_costs_two_flops_per_parameter_it_passes_and_four_per_key_it_sees():
    spec = model("qwen2-57b-a14b")

    without = spec.forward_flops_per_token(0)

    assert without == 2 * (spec.active_params - 151936 * 3584)
    assert spec.forward_flops_per_token(1000) - without == 4 * 28 * 1000 * 3584


@pytest.mark.parametrize("path", sorted((CONFIGS / "hardware").glob("h*.yaml")), ids=lambda path: path.stem)
def test_every_gpu_loads_and_its_file_names_its_source(path):
    GpuSpec.model_validate(read(path).tree)

    assert "SimAI" in path.read_text()
